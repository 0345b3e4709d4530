// Program guest is what the attacks of test/attacks run inside a sandbox:
//
//	guest ATTACK [ARGUMENT...]
//
// It tries one thing and prints one line: a word that says what it got, and perhaps more.
// The word is "ok" if the attempt succeeded, else the name of the error, for example EPERM.
// What a word means is for the table of attacks to say.
//
// Dangerous files are opened, never written. Privileged calls get arguments with which they
// do nothing. Floods have an end. So nothing here harms a host, also without any wall.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// attacks are the attacks by name. Each returns what it got, as an error, and may print
// more about it.
var attacks = map[string]func(args []string) (more string, err error){
	"call": call,
	"unshare": func(a []string) (string, error) {
		return "", in(syscall.SysProcAttr{Unshareflags: uintptr(number(a[0]))})
	},
	"clone": func(a []string) (string, error) {
		return "", in(syscall.SysProcAttr{Cloneflags: uintptr(number(a[0]))})
	},
	"nothing": func([]string) (string, error) { return "", nil },
	"socket":  socket,
	"ioctl": func(a []string) (string, error) {
		return "", sys(unix.SYS_IOCTL, ^uintptr(0), uintptr(number(a[0])), 0)
	},
	"mknod":   mknod,
	"setuid":  setuid,
	"euid":    euid,
	"write":   func(a []string) (string, error) { return "", openAny(a, os.O_WRONLY) },
	"read":    read,
	"create":  create,
	"list":    list,
	"boot-id": bootID,
	"search":  search,
	"reach":   reach,
	"signal":  func(a []string) (string, error) { return "", unix.Kill(int(number(a[0])), 0) },
	"ptrace": func(a []string) (string, error) {
		return "", sys(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(number(a[0])), 0, 0)
	},
	"int80":        apart("int80-here"),
	"int80-here":   func([]string) (string, error) { return "", int80() },
	"x32":          apart("x32-here"),
	"x32-here":     func([]string) (string, error) { return "", sys(x32 | unix.SYS_GETPID) },
	"memory":       memory,
	"fill":         fill,
	"inodes":       inodes,
	"files":        files,
	"terminals":    terminals,
	"inotify":      inotify,
	"pressure":     pressure,
	"unread":       unread,
	"unread-tcp":   tcpUnread,
	"locks":        locks,
	"threads":      threads,
	"threads-here": threadsHere,
	"connect":      func(a []string) (string, error) { return connect(a[0]) },
	"connects":     connects,
	"bind":         bind,
	"dns":          dns,
	"marked":       marked,
	"datagram":     datagram,
	"queries":      queries,
	"serve":        serve,
	"print":        printMuch,
	"replace":      replace,
	"impostor":     impostor,
	"http":         httpRaw,
	"https":        httpsRaw,
	"https-leased": httpsLeased,
	"http2":        http2,
	"follow":       follow,
	"doh":          doh,
	"lookup":       lookup,
	"resolved":     resolved,
	"tunnel":       tunnel,
	"slow":         slow,
	"ping":         ping,
	"quic":         quicTo,
	"shout":        shout,
	"mapped":       mapped,
	"at-once":      atOnce,
	"moved":        moved,
	"spoof":        spoof,
	"bare":         bare,
	"arp":          arp,
	"frames":       frames,
	"fetch":        fetch,
	"trusts":       trusts,
	"hoard":        hoard,
}

func main() {
	runtime.LockOSThread()
	attack := attacks[os.Args[1]]
	if attack == nil {
		fmt.Println("unknown-attack", os.Args[1])
		os.Exit(2)
	}
	more, err := attack(os.Args[2:])
	fmt.Println(word(err), more)
	if err != nil {
		fmt.Fprintln(os.Stderr, err) // as programs do: the agent reads there which limit was met
		os.Exit(1)
	}
}

// A wordError is a result that is no error of the kernel.
type wordError string

func (e wordError) Error() string { return string(e) }

// word is the first word of the answer.
func word(err error) string {
	var errno syscall.Errno
	var own wordError
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &own):
		return string(own)
	case errors.As(err, &errno) && unix.ErrnoName(errno) != "":
		return unix.ErrnoName(errno)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, io.EOF):
		return "EOF"
	}
	return fmt.Sprintf("error (%v)", err)
}

// number reads a number of any base; a mistake in the table shows as a panic.
func number(s string) uint64 {
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		panic(err)
	}
	return n
}

// sys makes a system call by its number.
func sys(nr uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, errno := syscall.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
		return errno
	}
	return nil
}
