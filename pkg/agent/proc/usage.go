package proc

import (
	"bytes"
	"os"
	"strconv"
	"time"
)

// ticksPerSecond is USER_HZ, 100 on every architecture Go knows.
const ticksPerSecond = 100

// CPUTime is what all processes of the sandbox have used since it began. Each process
// counts itself and the children that it waited for. Somebody waits for every dead
// process, in the end this process.
func CPUTime() time.Duration {
	var ticks uint64
	for _, p := range List() {
		ticks += p.ticks
	}
	return time.Duration(ticks) * time.Second / ticksPerSecond
}

// Private is the memory that all processes hold for themselves, in bytes.
func Private() (used int64) {
	page := int64(os.Getpagesize())
	for _, p := range List() {
		b, err := readSmall("/proc/" + strconv.Itoa(p.PID) + "/statm")
		if err != nil {
			continue
		}
		if f := bytes.Fields(b); len(f) > 2 {
			resident, _ := strconv.ParseInt(string(f[1]), 10, 64)
			shared, _ := strconv.ParseInt(string(f[2]), 10, 64)
			used += max(resident-shared, 0) * page
		}
	}
	return used
}

// MemTotal is the memory of the host, in bytes, as the guest sees it; 0: not known.
func MemTotal() int64 {
	b, err := readSmall("/proc/meminfo")
	if err != nil {
		return 0
	}
	_, rest, _ := bytes.Cut(b, []byte("MemTotal:"))
	f := bytes.Fields(rest)
	if len(f) == 0 {
		return 0
	}
	kib, _ := strconv.ParseInt(string(f[0]), 10, 64)
	return kib << 10
}

// Tasks counts all threads but the agent's.
func Tasks() (n int64) {
	self := os.Getpid()
	for _, p := range List() {
		if p.PID != self {
			n += int64(p.Tasks)
		}
	}
	return n
}
