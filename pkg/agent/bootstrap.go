package agent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Bootstrap is all the agent must know before it listens. It reaches PID 1 as one line
// of JSON on standard input, never by the environment or a file: programs that run in
// the sandbox later can read those.
type Bootstrap struct {
	Protocol   int               `json:"protocol"`
	Token      string            `json:"token"`
	Hostname   string            `json:"hostname,omitempty"`   // HOSTNAME of programs inside
	Env        map[string]string `json:"env,omitempty"`        // of the image and the sandbox; the process environment is the agent's own
	Variables  map[string]string `json:"variables,omitempty"`  // on top of Env; PUT /variables replaces them
	Entrypoint []string          `json:"entrypoint,omitempty"` // none: the sandbox lives until it is killed
	Literal    bool              `json:"literal,omitempty"`    // an Entrypoint of one element is never split into words
	Workdir    string            `json:"workdir,omitempty"`    // default cwd; "" is /
	User       string            `json:"user,omitempty"`       // docker's user[:group], names or numbers of the guest; "" is root
	Limits     Limits            `json:"limits"`
	Prestart   []string          `json:"prestart,omitempty"` // languages whose standing contexts are made once the entrypoint runs
	// OutputLimit bounds the output of all commands kept inside the sandbox, in
	// bytes; 0 is 256 MiB. A fourth of Limits.DiskBytes bounds it as well.
	OutputLimit int64 `json:"outputLimit,omitempty"`
	// CommandOutputLimit bounds the output of one command that is kept, in
	// bytes, at least 64 KiB; 0 is 16 MiB.
	CommandOutputLimit int64 `json:"commandOutputLimit,omitempty"`
	// ShellAhead lets a shell that was started before run the next command.
	ShellAhead bool `json:"shellAhead,omitempty"`
}

// Limits are what the sandbox may use; zero is unlimited. The agent only reports them;
// the host enforces them.
type Limits struct {
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	CPUMillis   int64 `json:"cpuMillis,omitempty"` // thousandths of a core
	DiskBytes   int64 `json:"diskBytes,omitempty"`
	Pids        int64 `json:"pids,omitempty"`
}

// DiskFull says that the limit of the disk is reached, for people.
func (l Limits) DiskFull() string {
	if l.DiskBytes <= 0 {
		return "the disk limit of the sandbox is reached"
	}
	return fmt.Sprintf("the disk limit of the sandbox, %s, is reached", amount(l.DiskBytes))
}

// amount writes bytes as a limit is given: 64Mi.
func amount(n int64) string {
	for i, unit := range []string{"Ti", "Gi", "Mi", "Ki"} {
		if u := int64(1) << (40 - 10*i); n >= u && n%u == 0 {
			return fmt.Sprintf("%d%s", n/u, unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// Line returns b as the line PID 1 reads.
func (b *Bootstrap) Line() ([]byte, error) {
	line, err := json.Marshal(b)
	if err != nil {
		return nil, fmt.Errorf("encode the agent's bootstrap: %w", err)
	}
	if len(line) >= MaxBootstrap {
		return nil, fmt.Errorf("the agent's bootstrap has %d bytes; at most %d are allowed: "+
			"use fewer or shorter environment variables", len(line), MaxBootstrap-1)
	}
	return append(line, '\n'), nil
}

// File returns a sealed memory file that reads as [Bootstrap.Line], to be the
// standard input of PID 1. It has no name on any file system. The caller closes it.
func (b *Bootstrap) File() (*os.File, error) {
	line, err := b.Line()
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("sandboxd-bootstrap", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create a memory file for the agent's bootstrap: %w", err)
	}
	f := os.NewFile(uintptr(fd), "bootstrap")
	if _, err = f.Write(line); err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("write the memory file of the agent's bootstrap: %w", err)
	}
	return f, nil
}

// ReadBootstrap reads one line of at most MaxBootstrap bytes from r. What follows the
// line in the same read is dropped.
func ReadBootstrap(r io.Reader) (Bootstrap, error) {
	var b Bootstrap
	var line []byte
	buf := make([]byte, 8<<10)
	for {
		n, err := r.Read(buf)
		line = append(line, buf[:n]...)
		if i := bytes.IndexByte(line, '\n'); i >= 0 {
			line = line[:i]
			break
		}
		if len(line) >= MaxBootstrap {
			return b, fmt.Errorf("read bootstrap from standard input: no end of line within %d bytes", MaxBootstrap)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return b, fmt.Errorf("read bootstrap from standard input: %w", err)
		}
	}
	if err := json.Unmarshal(line, &b); err != nil {
		return b, fmt.Errorf("read bootstrap from standard input: %d bytes that are not the JSON line the daemon sends: %w", len(line), err)
	}
	return b, b.check()
}

// check says why an agent cannot begin with b.
func (b *Bootstrap) check() error {
	if b.Protocol < MinProtocol || b.Protocol > Protocol {
		return fmt.Errorf("bootstrap speaks protocol %d, this agent speaks %d to %d: "+
			"daemon and agent are from different releases", b.Protocol, MinProtocol, Protocol)
	}
	if b.Token == "" {
		return fmt.Errorf("bootstrap has no token: without one, every process of the sandbox could use the agent")
	}
	return nil
}
