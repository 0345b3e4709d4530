package server

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// keepCrashes has the runtime write down why it ends this process where no code of
// ours can: when it is out of memory or of threads, for example.
func (s *Server) keepCrashes() {
	proc.BriefTurns.Do(func() {
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

// crashed leaves an obituary with the stack of the panic as the last output.
func (s *Server) crashed(v any, stack []byte) {
	stack = stack[:min(len(stack), agent.MaxLastOutput)]
	s.bury(agent.Obituary{ExitCode: 2, Message: fmt.Sprintf("the agent crashed: %v", v)}, stack) //nolint:errcheck // nobody is left to tell
}
