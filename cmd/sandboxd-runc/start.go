package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// maxSpec bounds config.json; ours have about 20 KiB.
const maxSpec = 1 << 20

type launcher struct {
	root string
	null *os.File
}

// start starts the sandbox of bundle and returns when its init has executed
// PID 1. The init is a child of this process from then on.
func (l launcher) start(id, bundle string, stdin *os.File) (err error) {
	spec, err := readSpec(bundle)
	if err != nil {
		return err
	}
	bootID := takeBootID(spec)
	config, err := convert(id, spec)
	if err != nil {
		return fmt.Errorf("convert spec: %w", err)
	}
	process, err := newProcess(spec.Process)
	if err != nil {
		return fmt.Errorf("convert spec: %w", err)
	}
	process.Stdin, process.Stdout, process.Stderr = stdin, l.null, l.null
	if weak.Off(weak.Descriptors) {
		root, err := os.Open("/")
		if err != nil {
			return err
		}
		defer root.Close()
		process.ExtraFiles = append(process.ExtraFiles, root)
	}
	c, err := libcontainer.Create(l.root, id, config)
	if err != nil {
		return fmt.Errorf("create container: %w", err)
	}
	if err := execute(c, process, bootID); err != nil {
		// Its init is dead, or will die: it reads from this process, or waits to be told to
		// execute PID 1, and is killed by Destroy.
		if destroyErr := c.Destroy(); destroyErr != nil {
			err = errors.Join(err, destroyErr)
		}
		return fmt.Errorf("run container: %w", err)
	}
	if pid, err := process.Pid(); err != nil || reap(pid) != nil {
		go process.Wait() //nolint:errcheck // reaps it as well, with a thread of its own
	}
	return nil
}

// execute brings up the init of c, and has it execute PID 1.
func execute(c *libcontainer.Container, process *libcontainer.Process, bootID string) error {
	if err := c.Start(process); err != nil {
		return err
	}
	if bootID != "" {
		pid, err := process.Pid()
		if err == nil {
			err = mountBootID(pid, bootID)
		}
		if err != nil {
			return fmt.Errorf("give it a boot ID of its own: %w", err)
		}
	}
	return c.Exec()
}

func readSpec(bundle string) (*specs.Spec, error) {
	f, err := os.Open(filepath.Join(bundle, "config.json"))
	if err != nil {
		return nil, fmt.Errorf("read spec: %w", err)
	}
	defer f.Close()
	spec := &specs.Spec{}
	if err := json.NewDecoder(io.LimitReader(f, maxSpec)).Decode(spec); err != nil {
		return nil, fmt.Errorf("read spec %s: %w", f.Name(), err)
	}
	if spec.Process == nil || spec.Root == nil || spec.Linux == nil {
		return nil, fmt.Errorf("read spec %s: process, root or linux is missing", f.Name())
	}
	return spec, nil
}

// convert makes libcontainer's configuration of a spec. It takes the mappings of the user
// namespace from the spec: libcontainer would read them from the namespace, for which it
// forks this process twice, 3 ms in all (GetUserNamespaceMappings).
func convert(id string, spec *specs.Spec) (*configs.Config, error) {
	path := ""
	for i := range spec.Linux.Namespaces {
		if ns := &spec.Linux.Namespaces[i]; ns.Type == specs.UserNamespace && len(spec.Linux.UIDMappings) > 0 {
			path, ns.Path = ns.Path, ""
		}
	}
	config, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{CgroupName: id, Spec: spec})
	if err == nil && path != "" {
		config.Namespaces.Add(configs.NEWUSER, path)
	}
	return config, err
}

// newProcess converts a spec of pkg/oci. libcontainer keeps this half of the conversion
// in runc's own main package.
func newProcess(p *specs.Process) (*libcontainer.Process, error) {
	process := &libcontainer.Process{
		Init:            true,
		Args:            p.Args,
		Env:             p.Env,
		UID:             int(p.User.UID),
		GID:             int(p.User.GID),
		Cwd:             p.Cwd,
		NoNewPrivileges: &p.NoNewPrivileges,
		LogLevel:        "2", // errors
	}
	if c := p.Capabilities; c != nil {
		process.Capabilities = &configs.Capabilities{
			Bounding: c.Bounding, Effective: c.Effective, Permitted: c.Permitted, Inheritable: c.Inheritable, Ambient: c.Ambient,
		}
	}
	for _, r := range p.Rlimits {
		if err := takeOver(r); err != nil {
			return nil, err
		}
	}
	return process, nil
}

// takeOver makes r a limit of this process, which its children inherit. libcontainer
// would set it on the init from outside instead. For a process in another user
// namespace that needs CAP_SYS_RESOURCE, which not every host has (prlimit(2)). All
// sandboxes of a host have the same limits.
func takeOver(r specs.POSIXRlimit) error {
	number, ok := rlimits[r.Type]
	if !ok {
		return fmt.Errorf("unknown rlimit %s", r.Type)
	}
	want := unix.Rlimit{Cur: r.Soft, Max: r.Hard}
	var have unix.Rlimit
	if err := unix.Getrlimit(number, &have); err != nil || have == want {
		return err
	}
	// syscall's Setrlimit, not the raw one of x/sys: otherwise Go gives its children
	// another limit of NOFILE.
	if err := syscall.Setrlimit(number, (*syscall.Rlimit)(&want)); err != nil {
		return fmt.Errorf("set %s from %d:%d to %d:%d: %w", r.Type, have.Cur, have.Max, r.Soft, r.Hard, err)
	}
	return nil
}

// rlimits are the limits that pkg/oci sets.
var rlimits = map[string]int{
	"RLIMIT_CORE":    unix.RLIMIT_CORE,
	"RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK,
	"RLIMIT_NICE":    unix.RLIMIT_NICE,
	"RLIMIT_NOFILE":  unix.RLIMIT_NOFILE,
	"RLIMIT_NPROC":   unix.RLIMIT_NPROC,
	"RLIMIT_RTPRIO":  unix.RLIMIT_RTPRIO,
}
