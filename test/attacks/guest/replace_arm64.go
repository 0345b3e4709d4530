package main

import "encoding/binary"

// nop is an instruction that does nothing.
var nop = []byte{0x1f, 0x20, 0x03, 0xd5}

// execCode is the code of execve(path, argv, NULL), and again if that failed.
func execCode(path, argv uint64) (b []byte) {
	for _, instruction := range []uint32{
		0x580000c0, // ldr x0, path, which is 24 bytes on
		0x580000e1, // ldr x1, argv
		0xd2800002, // mov x2, 0
		0xd2801ba8, // mov x8, execve
		0xd4000001, // svc 0
		0x17fffffe, // b to the mov before
	} {
		b = binary.LittleEndian.AppendUint32(b, instruction)
	}
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(b, path), argv)
}
