package runsc

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Needs returns what a memory image of id needs that is made now. Its sentry may be of an older
// build than Config.Binary: sandboxes survive an upgrade.
func (d *Driver) Needs(id string) (n record.MemoryNeeds, err error) {
	pid, err := d.MainPID(id)
	if err != nil {
		return n, fmt.Errorf("find the sentry of %s: %w", id, err)
	}
	return d.needs(fmt.Sprintf("/proc/%d/exe", pid))
}

// Meets returns nil if this host can restore an image that needs n. gVisor does not read the
// images of other builds, and a guest may use each feature of the CPU that it found.
func (d *Driver) Meets(n record.MemoryNeeds) error {
	have, err := d.needs(d.c.Binary)
	if err != nil {
		return err
	}
	if n.Build != have.Build {
		return errs.New(errs.Unavailable, "the memory was kept by another build of runsc (%.12s; this host has %.12s), and only that "+
			"build can restore it: create a sandbox from the files alone, or install that build", n.Build, have.Build)
	}
	lacks := slices.DeleteFunc(slices.Clone(n.Features), func(f string) bool {
		_, ok := slices.BinarySearch(have.Features, f)
		return ok
	})
	if len(lacks) > 0 {
		return errs.New(errs.Unavailable, "the memory was kept on a CPU (%.60s) with features that this one (%.60s) lacks: %.200s; "+
			"create a sandbox from the files alone, or restore it on such a CPU", n.CPU, have.CPU, strings.Join(lacks, " "))
	}
	return nil
}

func (d *Driver) needs(binary string) (n record.MemoryNeeds, err error) {
	if n.Build, err = d.builds.of(binary); err != nil {
		return n, fmt.Errorf("identify runsc: %w", err)
	}
	if n.CPU, n.Features, err = readCPU(d.cpuinfo); err != nil {
		return n, fmt.Errorf("identify the CPU: %w", err)
	}
	return n, nil
}

// builds remembers the digests of binaries, by file: one has some 60 MB.
type builds struct{ known sync.Map }

func (b *builds) of(path string) (digest string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", err
	}
	key := [4]int64{int64(st.Dev), int64(st.Ino), st.Size, st.Ctim.Nano()}
	if digest, ok := b.known.Load(key); ok {
		return digest.(string), nil
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	digest = hex.EncodeToString(sum.Sum(nil))
	b.known.Store(key, digest)
	return digest, nil
}

// readCPU reads the model of the CPU and its features, sorted. All CPUs of a host are alike.
func readCPU(cpuinfo string) (model string, features []string, err error) {
	text, err := os.ReadFile(cpuinfo)
	if err != nil {
		return "", nil, err
	}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "model name":
			model = value
		case "flags", "Features": // of x86, and of arm64
			features = strings.Fields(value)
			slices.Sort(features)
		case "":
			return model, features, nil
		}
	}
	return model, features, nil
}
