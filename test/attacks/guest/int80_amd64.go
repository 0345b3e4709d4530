package main

import "syscall"

// getpid80 is getpid by the system calls of i386.
func getpid80() int32

func int80() error {
	if n := getpid80(); n < 0 {
		return syscall.Errno(-n)
	}
	return nil
}
