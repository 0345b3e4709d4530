package gateway

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// killed returns a function that says why the kernel killed a command, or code, if that was
// for its memory; else "". The agent sees only a SIGKILL; the host counts the kills.
func (g *Gateway) killed(path string, rec *record.Record, before int64) func() string {
	return func() string {
		if before == unknownKills {
			return ""
		}
		if now, err := g.cfg.Kills(rec.ID); err != nil || now <= before {
			return ""
		}
		return outOfMemory(path, rec)
	}
}

// outOfMemory says that a command or a context met the memory limit.
func outOfMemory(path string, rec *record.Record) string {
	what := "command was killed"
	if path == "/code" {
		what = "the context was killed and its state is lost"
	}
	return fmt.Sprintf("%s: %s: out of memory (sandbox limit %s)", agent.ReasonOOM, what, record.Mebibytes(rec.Spec.MemoryBytes))
}

// unknownKills stands for a count of OOM kills that is not needed, or not known.
const unknownKills = -1

// kills counts the OOM kills of a sandbox, if a request to its agent runs something or
// asks how it ended.
func (g *Gateway) kills(method, path string, rec *record.Record) int64 {
	if !(method == http.MethodPost && runs(path)) && !strings.HasPrefix(path, "/command/status/") {
		return unknownKills
	}
	n, err := g.cfg.Kills(rec.ID)
	if err != nil {
		return unknownKills
	}
	return n
}

// setKills puts the number of OOM kills so far into a request to the agent, or into its
// answer. For a background command the agent compares the number at its start with the
// number when somebody asks how it ended, as the daemon does for a watched command. A
// client compares them as well. setKills always replaces the header, so neither the
// client nor the agent can send the other a number of its own.
func setKills(h http.Header, n int64) {
	h.Del(agent.OOMKillsHeader)
	if n != unknownKills {
		h.Set(agent.OOMKillsHeader, strconv.FormatInt(n, 10))
	}
}
