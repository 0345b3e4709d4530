package command

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// MaxArg is what Linux takes as one argument of a program (MAX_ARG_STRLEN).
const MaxArg = 128<<10 - 1

// Check refuses requests that are invalid in every guest.
func Check(req *agent.CommandRequest) error {
	switch {
	case req.Command == "" && len(req.Argv) == 0:
		return errors.New("command is missing")
	case req.Command != "" && len(req.Argv) > 0:
		return errors.New("command and argv exclude each other")
	case len(req.Argv) > 0 && req.Argv[0] == "":
		return errors.New("argv[0] is empty: it names the program")
	case len(req.Command) > MaxArg:
		return fmt.Errorf("command has %d bytes, and the kernel allows %d: upload it as a file and run the file", len(req.Command), MaxArg)
	case strings.IndexByte(req.Command+req.Cwd, 0) >= 0:
		return errors.New("command or cwd contains a NUL byte")
	case req.Timeout < 0:
		return fmt.Errorf("timeout is %d ms: it must be at least 1, or absent", req.Timeout)
	case req.GID != nil && req.UID == nil:
		return errors.New("gid needs uid")
	case req.Stdin && req.Background:
		return errors.New("a background command reads /dev/null: stdin and background exclude each other")
	}
	for _, a := range req.Argv {
		if len(a) > MaxArg || strings.IndexByte(a, 0) >= 0 {
			return fmt.Errorf("an argument holds a NUL byte or more than %d bytes", MaxArg)
		}
	}
	for k, v := range req.Envs {
		if !record.IsVariable(k) {
			return fmt.Errorf("envs: %.64q is not the name of a variable: it must not be empty, nor have =, NUL or a newline", k)
		}
		if strings.IndexByte(v, 0) >= 0 {
			return fmt.Errorf("envs: the value of %.64q contains a NUL byte", k)
		}
	}
	for _, id := range []*int64{req.UID, req.GID} {
		if id != nil && (*id < 0 || *id >= 1<<32-1) {
			return fmt.Errorf("%d is not a user or group id", *id)
		}
	}
	return nil
}
