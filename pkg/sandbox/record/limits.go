package record

import "fmt"

// Limits are what a sandbox may use of its host. Zero is no limit, or the
// kernel's own default.
type Limits struct {
	MemoryBytes int64 `json:"memoryBytes"`
	CPUMillis   int64 `json:"cpuMillis"` // thousandths of a core
	// CPUShares is its weight against other sandboxes when CPU time is short:
	// docker's 2 to 262144, 1024 by default.
	CPUShares int64 `json:"cpuShares,omitempty"`
	Pids      int64 `json:"pids"`      // tasks of the guest; AgentTasks come on top
	DiskBytes int64 `json:"diskBytes"` // 0: the pool cannot limit
	// For each of the disks that its files are on, and per second.
	IOReadBps   int64 `json:"ioReadBps,omitempty"` // bytes
	IOWriteBps  int64 `json:"ioWriteBps,omitempty"`
	IOReadIOPS  int64 `json:"ioReadIops,omitempty"` // operations
	IOWriteIOPS int64 `json:"ioWriteIops,omitempty"`
	// ShmBytes is the size of /dev/shm, which counts as memory; 64 MiB by default.
	ShmBytes int64 `json:"shmBytes,omitempty"`
	// LogBytes is how much of the output of one command is kept; 16 MiB by default.
	LogBytes int64 `json:"logBytes,omitempty"`
}

// LimitsIO reports whether l limits what goes to disks and comes from them.
func (l Limits) LimitsIO() bool {
	return l.IOReadBps|l.IOWriteBps|l.IOReadIOPS|l.IOWriteIOPS != 0
}

// Tmpfs is a file system in memory, which counts as the sandbox's.
type Tmpfs struct {
	Path  string `json:"path"` // absolute and clean
	Bytes int64  `json:"bytes"`
	Mode  uint32 `json:"mode"`           // permission bits, the sticky bit among them
	Exec  bool   `json:"exec,omitempty"` // programs in it may be executed
}

// Size writes bytes as limits are given: 512Mi, 1Gi; "1000 bytes" where no unit fits.
func Size(n int64) string {
	for i, unit := range []string{"Ti", "Gi", "Mi", "Ki"} {
		if u := int64(1) << (40 - 10*i); n >= u && n%u == 0 {
			return fmt.Sprintf("%d%s", n/u, unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// Mebibytes writes a size for people.
func Mebibytes(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }
