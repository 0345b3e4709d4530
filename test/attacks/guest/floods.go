package main

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Each flood has an end, which its limit keeps it from. It prints how far it came.

// until calls f n times, and stops at the first error.
func until(n string, f func(i int) error) (string, error) {
	for i := range int(number(n)) {
		if err := f(i); err != nil {
			return fmt.Sprint("after ", i), err
		}
	}
	return "all " + n, nil
}

// memory touches so many MiB.
func memory(args []string) (string, error) {
	debug.SetGCPercent(-1)
	return until(args[0], func(int) error {
		b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		return err
	})
}

// fill writes so many MiB into one file of a directory, and leaves it there.
func fill(args []string) (string, error) {
	f, err := os.Create(filepath.Join(args[0], "attack-fill"))
	if err != nil {
		return "", err
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	rand.Read(block) //nolint:errcheck // never fails since Go 1.24
	more, err := until(args[1], func(int) error { _, err := f.Write(block); return err })
	if err == nil {
		err = f.Sync()
	}
	return more, err
}

// inodes makes so many files in a directory.
func inodes(args []string) (string, error) {
	dir, err := os.MkdirTemp(args[0], "attack-inodes")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	return until(args[1], func(i int) error {
		return descriptor(unix.Open(filepath.Join(dir, fmt.Sprint(i)), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600))
	})
}

// files opens so many, and keeps them open.
func files(args []string) (string, error) {
	return until(args[0], func(int) error { _, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0); return err })
}

func terminals(args []string) (string, error) {
	return until(args[0], func(int) error {
		_, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
		return err
	})
}

func inotify(args []string) (string, error) {
	return until(args[0], func(int) error { _, err := unix.InotifyInit1(unix.IN_CLOEXEC); return err })
}

// pressure sets triggers, each of which takes the kernel 10 ms to close.
func pressure(args []string) (string, error) {
	return until(args[0], func(int) error {
		fd, err := unix.Open("/proc/pressure/cpu", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		_, err = unix.Write(fd, []byte("some 150000 2000000\x00")) // a window that needs no privileges
		return err
	})
}

// threads starts so many. Go ends the program if it cannot have one.
// threads starts so many threads in a process of its own, which Go's runtime ends if it gets
// none.
func threads(args []string) (string, error) {
	_, err := exec.Command("/proc/self/exe", "threads-here", args[0]).Output()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		said, _, _ := strings.Cut(string(e.Stderr), "\n")
		return said, fmt.Errorf("%s: %w", said, unix.EAGAIN)
	}
	return "", err
}

func threadsHere(args []string) (string, error) {
	debug.SetMaxThreads(1 << 20)
	n := int(number(args[0]))
	var up, down sync.WaitGroup
	up.Add(n)
	down.Add(1)
	for range n {
		go func() {
			runtime.LockOSThread()
			up.Done()
			down.Wait()
		}()
	}
	up.Wait()
	down.Done()
	return "", nil
}

// printMuch prints so many MiB, and then the word.
func printMuch(args []string) (string, error) {
	line := strings.Repeat("x", 1<<16-1) + "\n"
	return until(args[0], func(int) error {
		for range 16 {
			if _, err := io.WriteString(os.Stdout, line); err != nil {
				return err
			}
		}
		return nil
	})
}

// unread has the kernel keep so many MiB of messages in sockets, and reads none of them. Then it waits for what
// ends it.
func unread(args []string) (string, error) {
	fill := map[string]func(fd int) error{"netlink": fillNetlink, "icmp": fillICMP, "udp-errors": fillUDPErrors}[args[0]]
	open := map[string][3]int{
		"netlink":    {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE},
		"icmp":       {unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP},
		"udp-errors": {unix.AF_INET, unix.SOCK_DGRAM, 0},
	}[args[0]]
	const full = 200 << 10 // about what a socket holds by default
	more, err := until(fmt.Sprint(int(number(args[1]))<<20/full), func(int) error {
		fd, err := unix.Socket(open[0], open[1]|unix.SOCK_CLOEXEC, open[2])
		if err != nil {
			return err
		}
		return fill(fd)
	})
	if err == nil {
		time.Sleep(10 * time.Second) // the watch of the host looks each five
	}
	return more, err
}

// fillNetlink asks for the first link, without reading the answers.
func fillNetlink(fd int) error {
	ask := binary.NativeEndian.AppendUint32(nil, unix.SizeofNlMsghdr+unix.SizeofIfInfomsg)
	ask = binary.NativeEndian.AppendUint16(ask, unix.RTM_GETLINK)
	ask = binary.NativeEndian.AppendUint16(ask, unix.NLM_F_REQUEST)
	ask = append(ask, make([]byte, 8+4)...) // number, sender; family, kind
	ask = binary.NativeEndian.AppendUint32(ask, 1)
	ask = append(ask, make([]byte, 8)...)
	for range 150 {
		if err := unix.Sendto(fd, ask, unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
	}
	return nil
}

// fillICMP sends large echoes to itself.
func fillICMP(fd int) error {
	echo := make([]byte, 60_000)
	echo[0] = 8
	for range 4 {
		if err := unix.Sendto(fd, echo, unix.MSG_DONTWAIT, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			return err
		}
	}
	return nil
}

// fillUDPErrors has the kernel keep the refusal of each datagram, which has a part of it.
func fillUDPErrors(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1); err != nil {
		return err
	}
	for range 300 {
		err := unix.Sendto(fd, make([]byte, 500), unix.MSG_DONTWAIT, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}})
		if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
	}
	return nil
}

// locks locks so many thousand parts of files, and waits for what ends it.
func locks(args []string) (string, error) {
	more, err := until(args[0], func(int) error {
		fd, err := unix.MemfdCreate("locked", unix.MFD_CLOEXEC)
		for i := 0; i < 1000 && err == nil; i++ {
			part := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(2 * i), Len: 1}
			err = unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &part)
		}
		return err
	})
	if err == nil {
		time.Sleep(10 * time.Second) // as unread
	}
	return more, err
}

// tcpUnread sends so many MiB to sockets of its own that nobody reads, and waits for what ends it.
func tcpUnread(args []string) (string, error) {
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		err = unix.Listen(listener, 4096)
	}
	if err != nil {
		return "", err
	}
	to, err := unix.Getsockname(listener)
	if err != nil {
		return "", err
	}
	sent, want, block := 0, int(number(args[0]))<<20, make([]byte, 1<<20)
	for i := range 4000 {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(fd, to)
		}
		if err == nil {
			_, _, err = unix.Accept(listener)
		}
		if err != nil {
			return fmt.Sprint("after ", i), err
		}
		for {
			n, err := unix.SendmsgN(fd, block, nil, nil, unix.MSG_DONTWAIT)
			sent += max(n, 0)
			if err != nil || n == 0 {
				break
			}
		}
		if sent >= want {
			time.Sleep(10 * time.Second)
			return fmt.Sprint("with ", i+1, " connections"), nil
		}
	}
	return fmt.Sprint(sent>>20, " MiB"), fmt.Errorf("4,000 connections took no more than %d MiB: %w", sent>>20, unix.ENOBUFS)
}
