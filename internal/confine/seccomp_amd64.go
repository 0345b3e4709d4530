package confine

import "golang.org/x/sys/unix"

// ofMachine are the calls of this machine alone: the runtime keeps its thread pointer by
// one.
var ofMachine = []uint32{unix.SYS_ARCH_PRCTL}
