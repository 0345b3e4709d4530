package upgrade

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/doctor"
)

// preflightLimit is how long the checks of a new version may take: whoever waits for a package must not wait for ever.
const preflightLimit = 10 * time.Minute

// preflightInTime is preflight with an end.
func (c *Change) preflightInTime(ctx context.Context, from string, before *view) error {
	limited, cancel := context.WithTimeoutCause(ctx, preflightLimit, fmt.Errorf("its checks took longer than %s", preflightLimit))
	defer cancel()
	return inTime(limited, func(ctx context.Context) error { return c.preflight(ctx, from, before) })
}

// preflight lets the new version read the configuration, look at the host, and bring a copy of the
// state forward. It changes nothing.
func (c *Change) preflight(ctx context.Context, from string, before *view) error {
	program := c.Root.Program(c.To, "sandboxd")
	if err := tell(ctx, nil, program, c.args("config", "check")...); err != nil {
		return fmt.Errorf("its configuration: %w", err)
	}
	if cfg, err := config.Load(c.Config); err == nil && cfg.OwnPrograms {
		return fmt.Errorf("%s sets libexec_dir = %q, so runtimes and agent would not be of that version: remove libexec_dir", c.Config,
			cfg.LibexecDir)
	}
	if before.dead != nil {
		return c.checkDead(ctx, from, program)
	}
	if err := c.examine(ctx, from); err != nil {
		return err
	}
	return c.restores(ctx, program, c.Client.System().Backup)
}

// restores lets a program try whether it can restore a backup.
func (c *Change) restores(ctx context.Context, program string, save func(context.Context, io.Writer) error) error {
	state, backup := io.Pipe()
	go func() { backup.CloseWithError(save(ctx, backup)) }()
	err := tell(ctx, state, program, c.args("restore", "--check", "-")...)
	state.CloseWithError(errors.New("nobody reads it")) //nolint:errcheck // never fails
	if err != nil {
		return fmt.Errorf("a copy of the state: %w", err)
	}
	return nil
}

func (c *Change) args(words ...string) []string { return withConfig(c.Config, words...) }

// withConfig lets a command read the file; "": it has none.
func withConfig(file string, words ...string) []string {
	if file != "" {
		words = append(words, "--config", file)
	}
	return words
}

// examine compares what the doctors of both versions find: what the host lacked before is no reason
// to stay with an old version.
func (c *Change) examine(ctx context.Context, from string) error {
	failed := map[string]bool{}
	old, err := c.findings(ctx, from)
	if err != nil {
		return err
	}
	for _, f := range old {
		failed[f.Check] = f.Status == doctor.Fail
	}
	found, err := c.findings(ctx, c.To)
	if err != nil {
		return err
	}
	var all []error
	for _, f := range found {
		if f.Status == doctor.Fail && !failed[f.Check] {
			all = append(all, fmt.Errorf("%s: %s; fix: %s", f.Check, f.Detail, f.Mend))
		}
	}
	if all != nil {
		return fmt.Errorf("what it needs of this host and %s does not: %w", from, errors.Join(all...))
	}
	return nil
}

func (c *Change) findings(ctx context.Context, version string) (found []doctor.Finding, err error) {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, c.Root.Program(version, "sandboxd"), c.args("doctor", "--output", "json")...)
	cmd.Stderr, cmd.WaitDelay = &said, waitDelay
	out, ran := cmd.Output() // its exit status is 1 when a check failed
	if err := json.Unmarshal(out, &found); err != nil {
		return nil, fmt.Errorf("sandboxd doctor of %s: %w: %s", version, errors.Join(ran, err), bytes.TrimSpace(said.Bytes()))
	}
	return found, nil
}

// waitDelay is how long what a program has left behind may have its output open after the program was ended.
const waitDelay = 10 * time.Second

// tell runs a program, and returns what it says when it fails.
func tell(ctx context.Context, in io.Reader, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdin, cmd.WaitDelay = in, waitDelay
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(append([]string{"sandboxd"}, args...), " "), err, bytes.TrimSpace(out))
	}
	return nil
}
