package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

type story struct {
	name string
	tell func(*testing.T, *lab)
}

// stories are what users do, told by the command line tool and, where that
// would forbid it, by raw HTTP. `make test-all` tells each on both runtimes.
var stories = []story{
	{"Run", tellRun},
	{"Bench", tellBench},
	{"RunFails", tellRunFails},
	{"Lab", tellLab},
	{"Copy", tellCopy},
	{"Follow", tellFollow},
	{"NoShell", tellNoShell},
	{"Memory", tellMemory},
	{"Pids", tellPids},
	{"Full", tellFull},
	{"CPU", tellCPU},
	{"Disk", tellDisk},
	{"Small", tellSmall},
	{"ReadOnly", tellReadOnly},
	{"LogLimit", tellLogLimit},
	{"Update", tellUpdate},
	{"IO", tellIO},
	{"Reasons", tellReasons},
	{"Failures", tellFailures},
	{"Hardening", tellHardening},
	{"Levels", tellLevels},
	{"NetworkDenied", tellNetworkDenied},
	{"NetworkRules", tellNetworkRules},
	{"NetworkOpen", tellNetworkOpen},
	{"NetworkChange", tellNetworkChange},
	{"NetworkExplained", tellNetworkExplained},
	{"Eval", tellEval},
	{"Prestart", tellPrestart},
	{"Mischief", tellMischief},
	{"Aliases", tellAliases},
	{"Entrypoints", tellEntrypoints},
	{"Creates", tellCreates},
	{"Snapshots", tellSnapshots},
	{"SnapshotsRefused", tellSnapshotsRefused},
	{"StopAndStart", tellStopAndStart},
	{"Verbs", tellVerbs},
	{"Ready", tellReady},
	{"HangingProbe", tellHangingProbe},
	{"Restart", tellRestart},
	{"Recycle", tellRecycle},
	{"HealthBad", tellHealthBad},
}

// walls are the stories of what holds a guest, and of why one ended. Each runtime does that
// in a way of its own: `make test` tells them on both.
var walls = map[string]bool{
	"Memory": true, "Pids": true, "Full": true, "CPU": true, "Disk": true, "Small": true, "ReadOnly": true, "Update": true, "IO": true,
	"Reasons": true, "Hardening": true, "Levels": true, "NetworkDenied": true, "NetworkRules": true, "Mischief": true,
}

// TestWalls: each of walls is a story.
func TestWalls(t *testing.T) {
	for name := range walls {
		if !slices.ContainsFunc(stories, func(s story) bool { return s.name == name }) {
			t.Errorf("walls has %q, and stories has no such story", name)
		}
	}
}

// TestStories tells them all to one daemon, others than walls on a chosen runtime; a story
// cleans up after itself.
func TestStories(t *testing.T) {
	out := newOutside(t) // first: the daemon looks for uplinks when it starts, and once a minute
	h := newHost(t, daemontest.Options{Config: []string{
		"[network]", `upstreams = ["` + outsideAddr + `"]`, "[security]", `levels = ["strict", "default", "compat"]`,
	}})
	daemontest.Image(t, h.Daemon, "python")
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			for _, s := range stories {
				if !walls[s.name] && !chosen(runtime, s.name) {
					continue
				}
				t.Run(s.name, func(t *testing.T) {
					l := &lab{host: h, T: t, runtime: runtime, out: out}
					defer h.deleteAll(t) // not in a Cleanup, before which the context ends
					s.tell(t, l)
				})
			}
		})
	}
	t.Run("API", func(t *testing.T) { tellAPI(t, &lab{host: h, T: t, runtime: "runsc", out: out}) })
}

// A lab is where a story is told.
type lab struct {
	host
	*testing.T
	runtime string
	out     *outside
}

// result is what a process printed and how it ended.
type result struct {
	out, errout string
	code        int
}

// patience is how long one command line, or what the daemon does by itself, may take before it counts
// as hung: how soon it is done proves nothing.
const patience = 60 * time.Second

// ctl runs sandboxctl to its end.
func (l *lab) ctl(args ...string) result { l.Helper(); return l.feed(nil, args...) }

// feed is ctl with a standard input.
func (l *lab) feed(stdin io.Reader, args ...string) result {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), patience)
	defer cancel()
	cmd := l.command(ctx, args...)
	var out, errout bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errout
	err := cmd.Run()
	if ctx.Err() != nil {
		l.Fatalf("sandboxctl %q hangs; it said %.500q and %.500q", args, out.String(), errout.String())
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		l.Fatal(err)
	}
	return result{out.String(), errout.String(), cmd.ProcessState.ExitCode()}
}

func (l *lab) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, daemontest.Bin("sandboxctl"), args...)
	cmd.Env = append(os.Environ(), "SANDBOXD_HOST=unix://"+l.Socket)
	return cmd
}

// ok is ctl for what must succeed and say nothing on stderr; it returns stdout.
func (l *lab) ok(args ...string) string {
	l.Helper()
	r := l.ctl(args...)
	if r.code != 0 || r.errout != "" {
		l.Fatalf("sandboxctl %q: %d, %.500q, %.2000q", args, r.code, r.out, r.errout)
	}
	return r.out
}

// make creates a sandbox of this story's runtime and returns its id.
func (l *lab) make(args ...string) string {
	l.Helper()
	return strings.TrimSpace(l.ok(append([]string{"create", "--runtime", l.runtime}, args...)...))
}

// wants checks how a command line ended and that stderr holds each of the texts.
func (l *lab) wants(r result, code int, texts ...string) {
	l.Helper()
	if r.code != code {
		l.Errorf("exit status %d, want %d; it said %.500q and %.2000q", r.code, code, r.out, r.errout)
	}
	for _, text := range texts {
		if !strings.Contains(r.errout, text) {
			l.Errorf("stderr lacks %q: %.2000q", text, r.errout)
		}
	}
}

// python runs a script in a sandbox; what it prints is JSON that goes into v.
func (l *lab) python(id string, v any, script string, args ...string) {
	l.Helper()
	out := l.ok(append([]string{"exec", id, "--", "python3", "-c", script}, args...)...)
	if err := json.Unmarshal([]byte(out), v); err != nil {
		l.Fatalf("the script printed %.1000q: %v", out, err)
	}
}

// inspect returns what is known of one sandbox.
func (l *lab) inspect(id string) wire.Inspection {
	l.Helper()
	var all []wire.Inspection
	if err := json.Unmarshal([]byte(l.ok("inspect", id)), &all); err != nil || len(all) != 1 {
		l.Fatalf("inspect %s: %v, %d of them", id, err, len(all))
	}
	return all[0]
}

// usage returns what a sandbox uses.
func (l *lab) usage(id string) wire.Usage {
	l.Helper()
	u, err := l.api.Stats(l.Context(), id)
	if err != nil {
		l.Fatal(err)
	}
	return u
}

// answer is a reply of the TCP listener.
type answer struct {
	status int
	header http.Header
	body   string
}

// request asks the TCP listener with the key; header are pairs that come over it.
func (l *lab) request(method, path string, body io.Reader, header ...string) answer {
	l.Helper()
	a, err := l.try(method, path, body, header...)
	if err != nil {
		l.Fatalf("%s %s: %v", method, path, err)
	}
	return a
}

// try is request for what may break off.
func (l *lab) try(method, path string, body io.Reader, header ...string) (a answer, err error) {
	ctx, cancel := context.WithTimeout(l.Context(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "http://"+l.TCP, body)
	if err != nil {
		return a, err
	}
	r.URL.Opaque = path // as it is: nothing is cleaned on the way
	r.Header.Set("OPEN-SANDBOX-API-KEY", daemontest.Key)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(b)}, err
}
