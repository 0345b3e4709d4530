package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// openAny opens the first of some files that opens. It reads and writes nothing.
func openAny(paths []string, how int) (err error) {
	for _, path := range paths {
		if err = descriptor(unix.Open(path, how|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)); err == nil {
			return nil
		}
	}
	return err
}

// read is "empty" for a file that says nothing.
func read(args []string) (string, error) {
	f, err := os.Open(args[0])
	if err != nil {
		return "", err
	}
	defer f.Close()
	n, err := f.Read(make([]byte, 1))
	if n == 0 && (err == nil || err == io.EOF) {
		return "", wordError("empty")
	}
	return "", err
}

// list is "empty" for a directory without names.
func list(args []string) (string, error) {
	f, err := os.Open(args[0])
	if err != nil {
		return "", err
	}
	defer f.Close()
	names, err := f.Readdirnames(3)
	if len(names) == 0 && (err == nil || err == io.EOF) {
		return "", wordError("empty")
	}
	return strings.Join(names, " "), err
}

// create makes a file in a directory, and removes it.
func create(args []string) (string, error) {
	path := filepath.Join(args[0], ".attack")
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return "", err
	}
	unix.Close(fd)
	return "", os.Remove(path)
}

// bootID is "ok" if this machine has that boot ID, "other" if not.
func bootID(args []string) (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err == nil && strings.TrimSpace(string(b)) != args[0] {
		err = wordError("other")
	}
	return "", err
}

// search looks for a text in files, whatever its case; "none" if no file has it.
func search(args []string) (string, error) {
	for _, path := range args[1:] {
		b, err := os.ReadFile(path)
		if err != nil {
			return path, err
		}
		if bytes.Contains(bytes.ToLower(b), []byte(args[0])) {
			return path, nil
		}
	}
	return "", wordError("none")
}

// reach looks for a file of the host by every way out of this root that processes have
// open: CVE-2024-21626. "none" if there is none.
func reach(args []string) (string, error) {
	marker := args[0]
	up := strings.Repeat("/..", 16)
	ways := []string{"", up}
	for _, pattern := range []string{"/proc/[0-9]*/root", "/proc/[0-9]*/cwd", "/proc/[0-9]*/fd/*", "/proc/self/task/*/fd/*"} {
		found, _ := filepath.Glob(pattern)
		for _, way := range found {
			ways = append(ways, way, way+up)
		}
	}
	for _, way := range ways {
		if _, err := os.Stat(way + marker); err == nil {
			return way, nil
		}
	}
	return fmt.Sprintf("(%d ways)", len(ways)), wordError("none")
}
