package main

import "encoding/binary"

// nop is an instruction that does nothing.
var nop = []byte{0x90}

// execCode is the code of execve(path, argv, NULL), and again if that failed.
func execCode(path, argv uint64) []byte {
	b := binary.LittleEndian.AppendUint64([]byte{0x48, 0xbf}, path)   // mov rdi, path
	b = binary.LittleEndian.AppendUint64(append(b, 0x48, 0xbe), argv) // mov rsi, argv
	b = append(b, 0x31, 0xd2)                                         // xor edx, edx
	b = append(b, 0xb8, 59, 0, 0, 0)                                  // mov eax, execve
	return append(b, 0x0f, 0x05, 0xeb, 0xf7)                          // syscall; jmp to the mov before
}
