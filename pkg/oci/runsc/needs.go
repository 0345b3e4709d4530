package runsc

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// agentProgram is the agent in a directory that is bound to oci.AgentDir.
const agentProgram = "sandbox-agent"

// Needs returns what a memory image of id needs that is made now. Its sentry and its agent may be of an
// older build than Config.Binary: sandboxes survive an upgrade.
func (d *Driver) Needs(id string) (n record.MemoryNeeds, err error) {
	pid, err := d.MainPID(id)
	if err != nil {
		return n, fmt.Errorf("find the sentry of %s: %w", id, err)
	}
	if n, err = d.needs(fmt.Sprintf("/proc/%d/exe", pid)); err != nil {
		return n, err
	}
	agent, err := oci.SourceOf(d.c.Bundle(id), oci.AgentDir)
	if err == nil && agent != "" {
		n.Agent, err = d.builds.of(filepath.Join(agent, agentProgram))
	}
	if err != nil {
		return n, fmt.Errorf("identify the agent of %s: %w", id, err)
	}
	return n, nil
}

// Meets returns nil if this host can restore an image that needs n. gVisor does not read the
// images of other builds, the memory has parts of the agent's program, and a guest may use each
// feature of the CPU that it found.
func (d *Driver) Meets(n record.MemoryNeeds) error {
	have, err := d.needs(d.c.Binary)
	if err != nil {
		return err
	}
	if _, err := d.binaryOf(n); err != nil {
		return err
	}
	if _, err := d.AgentDir(n); err != nil {
		return err
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

// binaryOf is the runsc that can restore an image that needs n.
func (d *Driver) binaryOf(n record.MemoryNeeds) (string, error) {
	dir, err := d.find(n.Build, filepath.Base(d.c.Binary))
	if err != nil {
		return "", fmt.Errorf("identify runsc: %w", err)
	}
	if dir == "" {
		return "", errs.New(errs.Unavailable, "the memory was kept by another build of runsc (%.12s), which no version of sandboxd on "+
			"this host has, and only that build can restore it: create a sandbox from the files alone (stop and start what "+
			"hibernates), or install the version that was there", n.Build)
	}
	return filepath.Join(dir, filepath.Base(d.c.Binary)), nil
}

// AgentDir is the directory with the agent that is in an image that needs n. An image that says nothing
// of its agent gets the present one.
func (d *Driver) AgentDir(n record.MemoryNeeds) (string, error) {
	if n.Agent == "" {
		return filepath.Join(filepath.Dir(d.c.Binary), "agent"), nil
	}
	dir, err := d.find(n.Agent, filepath.Join("agent", agentProgram))
	if err != nil {
		return "", fmt.Errorf("identify the agent: %w", err)
	}
	if dir == "" {
		return "", errs.New(errs.Unavailable, "the memory has an agent of another build (%.12s), which no version of sandboxd on "+
			"this host has, and runs only with that: create a sandbox from the files alone (stop and start what hibernates), or install "+
			"the version that was there", n.Agent)
	}
	return filepath.Join(dir, "agent"), nil
}

// Programs returns the digests of the runsc and of the agent in an installed directory; "": it has none.
func (d *Driver) Programs(dir string) (build, agent string, err error) {
	for file, digest := range map[string]*string{filepath.Base(d.c.Binary): &build, filepath.Join("agent", agentProgram): &agent} {
		of, err := d.builds.of(filepath.Join(dir, file))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", "", err
		}
		*digest = of
	}
	return build, agent, nil
}

// find returns the installed directory that has a file with a digest; "": none. That of Config.Binary
// comes first, and only that must have the file.
func (d *Driver) find(digest, file string) (dir string, err error) {
	dirs := []string{filepath.Dir(d.c.Binary)}
	if d.c.Installed != nil {
		dirs = append(dirs, d.c.Installed()...)
	}
	for i, dir := range dirs {
		have, err := d.builds.of(filepath.Join(dir, file))
		if err != nil && (i == 0 || !errors.Is(err, fs.ErrNotExist)) {
			return "", err
		}
		if err == nil && have == digest {
			return dir, nil
		}
	}
	return "", nil
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
