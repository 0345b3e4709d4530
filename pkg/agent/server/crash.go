package server

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// A panic of this process ends its sandbox, and what Go prints about it goes to
// the null device. So every goroutine that net/http did not start, and does not
// recover, runs in guarded.

// onPanic is told of a panic before the process dies of it. Main sets it, before
// the agent serves: like the reaper, it is one for the process.
var onPanic = func(v any, stack []byte) {}

// keepCrashes has the runtime write down why it ends this process where no code of
// ours can: when it is out of memory or of threads, for example.
func (s *Server) keepCrashes() {
	briefTurns.do(func() {
		path := filepath.Join(s.stateDir, filepath.Base(agent.CrashFile))
		os.Remove(path) //nolint:errcheck // opening fails then
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return // a full disk: an obituary would not fit, either
		}
		debug.SetCrashOutput(f, debug.CrashOptions{}) //nolint:errcheck // as above
		f.Close()                                     // the runtime has its own
	})
}

// guarded calls f. If f panics, onPanic is told and the panic goes on: whoever
// went on with half a state would hang, or lie.
func guarded(f func()) {
	defer func() {
		if v := recover(); v != nil {
			onPanic(v, debug.Stack())
			panic(v)
		}
	}()
	f()
}

// crashed leaves an obituary with the stack of the panic as the last output.
func (s *Server) crashed(v any, stack []byte) {
	stack = stack[:min(len(stack), agent.MaxLastOutput)]
	s.bury(agent.Obituary{ExitCode: 2, Message: fmt.Sprintf("the agent crashed: %v", v)}, stack) //nolint:errcheck // nobody is left to tell
}
