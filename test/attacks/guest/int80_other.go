//go:build !amd64

package main

// int80 is for amd64 alone.
func int80() error { return wordError("ENOSYS") }
