package proc

import (
	"fmt"
	"os"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Credential returns what a child that is to run as id must change, or nil.
func (id Identity) Credential() *syscall.Credential {
	if int(id.UID) == os.Geteuid() && int(id.GID) == os.Getegid() {
		have, err := os.Getgroups()
		if err == nil && sameGroups(have, id.allGroups()) {
			return nil
		}
	}
	return &syscall.Credential{Uid: id.UID, Gid: id.GID, Groups: id.allGroups()}
}

// allGroups are the supplementary groups of a process of id. As with docker its own group is the
// first of them: otherwise a program that is setgid, which replaces that, could open what a
// file's permissions deny to the group (CVE-2022-36109).
func (id Identity) allGroups() []uint32 {
	all := []uint32{id.GID}
	for _, g := range id.Groups {
		if !slices.Contains(all, g) {
			all = append(all, g)
		}
	}
	return all
}

// sameGroups reports whether this process has the groups want, in any order.
func sameGroups(have []int, want []uint32) bool {
	if os.Geteuid() != 0 {
		return true // only root can change them
	}
	return len(have) == len(want) && !slices.ContainsFunc(have, func(g int) bool { return !slices.Contains(want, uint32(g)) })
}

// Enter gives the calling thread, to which the caller is locked, the credentials that
// the kernel asks for when it opens files: setresuid(2) of the thread alone, which
// takes its capabilities. The real and saved ids stay: with them the thread can leave
// again, and they keep processes of that user from signalling or tracing it.
func (id Identity) Enter() error {
	groups := id.allGroups()
	const keep = ^uintptr(0)
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&groups[0])), 0)
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(id.GID), keep)
	}
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(id.UID), keep)
	}
	if errno != 0 {
		LeaveIdentity()
		return os.NewSyscallError("setresuid", errno)
	}
	return nil
}

// The agent's own, read before any thread has changed its ids.
var ownUID, ownGID, ownGroups = os.Geteuid(), os.Getegid(), func() []uint32 {
	have, _ := os.Getgroups()
	groups := make([]uint32, len(have))
	for i, g := range have {
		groups[i] = uint32(g)
	}
	return groups
}()

// LeaveIdentity undoes Enter.
func LeaveIdentity() {
	const keep = ^uintptr(0)
	var first unsafe.Pointer
	if len(ownGroups) > 0 {
		first = unsafe.Pointer(&ownGroups[0])
	}
	_, _, e1 := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(ownUID), keep)
	_, _, e2 := unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(ownGID), keep)
	_, _, e3 := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(ownGroups)), uintptr(first), 0)
	if e1 != 0 || e2 != 0 || e3 != 0 {
		// This cannot happen, because the saved ids are the agent's. If it does, the
		// thread must serve nobody.
		panic(fmt.Sprintf("leave an identity: %v, %v, %v", e1, e2, e3))
	}
}
