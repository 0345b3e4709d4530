package support

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A sandbox is the part of a record that goes into a bundle: enough to see what
// happened when, and nothing that a person typed.
type sandbox struct {
	ID       string        `json:"id"`
	State    record.State  `json:"state"`
	Reason   record.Reason `json:"reason,omitempty"`
	ExitCode *int          `json:"exitCode,omitempty"`
	Slot     int           `json:"slot"`
	Runtime  string        `json:"runtime"`
	Image    string        `json:"imageDigest"`
	Network  string        `json:"network"`
	BootID   string        `json:"bootId"`
	Created  time.Time     `json:"created"`
	Changed  time.Time     `json:"changed"`
	Expires  time.Time     `json:"expires"`
	Timeout  string        `json:"timeout"`
	OneShot  bool          `json:"oneShot,omitempty"`

	MemoryBytes int64 `json:"memoryBytes"`
	CPUMillis   int64 `json:"cpuMillis"`
	Pids        int64 `json:"pids"`
	DiskBytes   int64 `json:"diskBytes"`

	// Counts of the parts that are left out.
	EntrypointArgs  int `json:"entrypointArgs"`
	EnvVars         int `json:"envVars"`
	Labels          int `json:"labels"`
	Rules           int `json:"rules"`
	MessageBytes    int `json:"messageBytes"`
	LastOutputBytes int `json:"lastOutputBytes"`
}

func redacted(r record.Record) sandbox {
	return sandbox{
		ID: r.ID, State: r.State, Reason: r.Reason, ExitCode: r.ExitCode, Slot: r.Slot, Runtime: r.Spec.Runtime,
		Image: r.Spec.Image.Digest, Network: string(r.Spec.Network.Mode), BootID: r.BootID, Created: r.Created, Changed: r.Changed,
		Expires: r.Expires, Timeout: r.Spec.Timeout.String(), OneShot: r.Spec.OneShot,
		MemoryBytes: r.Spec.MemoryBytes, CPUMillis: r.Spec.CPUMillis, Pids: r.Spec.Pids, DiskBytes: r.Spec.DiskBytes,
		EntrypointArgs: len(r.Spec.Entrypoint), EnvVars: len(r.Spec.Env), Labels: len(r.Spec.Labels), Rules: len(r.Spec.Network.Rules),
		MessageBytes: len(r.Message), LastOutputBytes: len(r.LastOutput),
	}
}

// gone replaces a secret.
const gone = "[redacted]"

// leastSecret is the least length of a value that is treated as a secret: "1" and
// "true" are none, and cutting them out would cut everything.
const leastSecret = 6

// quotings is how many times a text may be quoted inside another quoted text: by an
// error (%q), by the error around it, and by slog or JSON.
const quotings = 3

// scrubber removes every secret that this host knows from a text. It is the second
// wall: parts that may hold a secret are left out first. Logs quote what clients sent.
func scrubber(cfg *config.Config, all []record.Record) *strings.Replacer {
	var secrets []string
	add := func(s string) {
		for _, line := range strings.Split(s, "\n") { // a log quotes each line separately
			if line = strings.TrimSpace(line); len(line) < leastSecret {
				continue
			}
			secrets = append(secrets, line)
			for range quotings {
				q := strconv.Quote(line)
				if q = q[1 : len(q)-1]; q == line {
					break
				}
				line, secrets = q, append(secrets, q)
			}
		}
	}
	keys, _ := os.ReadFile(cfg.Listen.APIKeyFile)
	add(strings.Join(strings.Fields(string(keys)), "\n"))
	signing, _ := os.ReadFile(filepath.Join(cfg.StateDir, "endpoint-secret"))
	add(string(signing))
	for _, r := range all {
		add(r.Token)
		add(r.Spec.Name)
		for _, m := range []map[string]string{r.Spec.Env, r.Spec.Labels, r.Spec.Extensions} {
			for _, v := range m {
				add(v)
			}
		}
		for _, a := range r.Spec.Entrypoint {
			add(a)
		}
	}
	// The longest first: one may be the beginning of another.
	slices.SortFunc(secrets, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	var pairs []string
	for _, s := range slices.Compact(secrets) {
		pairs = append(pairs, s, gone)
	}
	return strings.NewReplacer(pairs...)
}
