package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// stateDir is the agent's own directory. The daemon reads in it how a sandbox has ended.
type stateDir string

// makeStateDir empties the agent's own directory or makes it: files that a snapshot or
// an earlier run left there are about other processes. The directory itself stays if
// there is one, because it may be a mount point.
func makeStateDir(dir, output string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		err = emptyStateDir(dir)
	}
	if err == nil {
		err = os.Mkdir(output, 0o700)
	}
	if err != nil {
		return fmt.Errorf("create the agent's directory: %w", err)
	}
	return nil
}

func emptyStateDir(dir string) error {
	if fi, err := os.Lstat(dir); err == nil && !fi.IsDir() {
		os.Remove(dir) //nolint:errcheck // the next call says it
		return os.Mkdir(dir, 0o700)
	}
	left, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range left {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return errors.Join(os.Chown(dir, os.Geteuid(), os.Getegid()), os.Chmod(dir, 0o700))
}

// writeObituary writes what the daemon reads from the disk of a dead sandbox: the last
// output, then, in one step, the obituary.
func (d stateDir) writeObituary(o agent.Obituary, last []byte) error {
	o.Message = o.Message[:min(len(o.Message), 1<<10)]
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	output := filepath.Join(string(d), filepath.Base(agent.OutputFile))
	obituary := filepath.Join(string(d), filepath.Base(agent.ObituaryFile))
	if err := writeSync(output, last); err != nil {
		return err
	}
	if err := writeSync(obituary+".new", b); err != nil {
		return err
	}
	if err := os.Rename(obituary+".new", obituary); err != nil {
		return err
	}
	f, err := os.Open(string(d))
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// writeSync removes a file and makes it anew: the guest may have put a FIFO there, and
// opening that would hang for ever.
func writeSync(path string, b []byte) error {
	os.Remove(path) //nolint:errcheck // opening fails then
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// keepCrashes makes Go's runtime write why it ends this process when no code of the
// agent can, for example when it is out of memory or threads.
func (d stateDir) keepCrashes() {
	proc.BriefTurns.Do(func() {
		path := filepath.Join(string(d), filepath.Base(agent.CrashFile))
		os.Remove(path) //nolint:errcheck // opening fails then
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return // a full disk: an obituary would not fit, either
		}
		debug.SetCrashOutput(f, debug.CrashOptions{}) //nolint:errcheck // as above
		f.Close()                                     // the runtime has its own
	})
}

// crashed leaves an obituary with the stack of the panic as the last output.
func (d stateDir) crashed(v any, stack []byte) {
	stack = stack[:min(len(stack), agent.MaxLastOutput)]
	o := agent.Obituary{ExitCode: 2, Message: fmt.Sprintf("the agent crashed: %v", v)}
	d.writeObituary(o, stack) //nolint:errcheck // nobody is left to hear
}
