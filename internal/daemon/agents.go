package daemon

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/health"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
)

var (
	_ sandbox.Agents = (*agents)(nil)
	_ gateway.Agents = (*agents)(nil)
	_ health.Prober  = (*agents)(nil)
)

// keptCommands is how many commands, each with the most output kept for one command,
// fit into the output kept for all.
const keptCommands = 16

const dialTimeout = 5 * time.Second

// agents reaches PID 1 of every sandbox, through one pooled client each.
type agents struct {
	cfg   *config.Config
	disks *snapshot.Disks
	// What a sandbox with inspected hosts has beside its own variables: those by which its programs
	// find what to trust, and placeholders of credentials, which may change while it runs.
	trusted      func(id string) (map[string]string, error)
	placeholders func(context.Context, *record.Record) (map[string]string, error)

	mu      sync.Mutex
	clients map[string]*agent.Client // by sandbox ID
}

func newAgents(
	cfg *config.Config, disks *snapshot.Disks, trusted func(id string) (map[string]string, error),
	placeholders func(context.Context, *record.Record) (map[string]string, error),
) *agents {
	return &agents{cfg: cfg, disks: disks, trusted: trusted, placeholders: placeholders, clients: map[string]*agent.Client{}}
}

// Bootstrap returns the line that PID 1 of r reads. It drops the client for r:
// connections to the agent of an earlier life are dead.
func (a *agents) Bootstrap(r *record.Record) (*os.File, error) {
	a.forget(r.ID)
	b, err := a.bootstrap(r)
	if err != nil {
		return nil, err
	}
	return b.File()
}

// seedBytes is how much entropy a copy gets.
const seedBytes = 64

// Adopt makes the agent that answers to token that of r: of a member of a pool, or of a copied
// memory, which it first waits for.
func (a *agents) Adopt(ctx context.Context, r *record.Record, token string, copied bool) (err error) {
	b, err := a.bootstrap(r)
	if err != nil {
		return err
	}
	was := *r
	was.Token = token
	c, adoption := a.client(&was), agent.Adoption{Bootstrap: *b}
	defer func() {
		if err != nil || copied || r.Spec.Inspect { // the next has the new token, or gives variables
			a.forget(r.ID)
		}
	}()
	if copied {
		if err := c.Ready(ctx); err != nil {
			return err
		}
		var drawn [16 + 16 + seedBytes]byte
		rand.Read(drawn[:]) //nolint:errcheck // never fails since Go 1.24
		adoption.Copy = &agent.Copy{
			Generation: hex.EncodeToString(drawn[:16]), MachineID: hex.EncodeToString(drawn[16:32]), Seed: drawn[32:],
		}
	}
	return c.Adopt(ctx, adoption)
}

// Run runs a line with the shell of r for limit at most.
func (a *agents) Run(ctx context.Context, r *record.Record, line string, limit time.Duration) error {
	output, err := a.client(r).Probe(ctx, line, limit)
	if err != nil {
		return fmt.Errorf("%w: %.500q", err, output)
	}
	return nil
}

// bootstrap is what the agent of r is told first.
func (a *agents) bootstrap(r *record.Record) (*agent.Bootstrap, error) {
	env, variables := environment(r), map[string]string(nil)
	if r.Spec.Inspect {
		more, err := a.trusted(r.ID)
		if err != nil {
			return nil, err
		}
		maps.Copy(env, more) // the guest has set none of them
		if variables, err = a.placeholders(context.Background(), r); err != nil {
			return nil, fmt.Errorf("read the placeholders of sandbox %s: %w", r.ID, err)
		}
	}
	return &agent.Bootstrap{
		Protocol:           agent.Protocol,
		Token:              r.Token,
		Hostname:           r.Hostname(),
		Env:                env,
		Variables:          variables,
		Entrypoint:         r.Spec.Entrypoint,
		Literal:            r.Spec.Literal,
		Workdir:            r.Spec.Image.Config.Workdir,
		User:               r.Spec.Image.Config.User,
		Limits:             limitsOf(r),
		Prestart:           r.Spec.Prestart,
		CommandOutputLimit: r.Spec.LogBytes,
		OutputLimit:        r.Spec.LogBytes * keptCommands,
		ShellAhead:         a.cfg.Defaults.ShellAhead,
	}, nil
}

// environment is what the guest of r starts with: the variables of the image, and over
// them those of the creation. Reserved ones may be in images and in old records.
func environment(r *record.Record) map[string]string {
	env := map[string]string{}
	for _, kv := range r.Spec.Image.Config.Env {
		if k, v, ok := strings.Cut(kv, "="); ok {
			env[k] = v
		}
	}
	maps.Copy(env, r.Spec.Env)
	maps.DeleteFunc(env, func(k, _ string) bool { return record.IsReserved(k) })
	return env
}

// limitsOf are the limits of r that its agent reports.
func limitsOf(r *record.Record) agent.Limits {
	return agent.Limits{MemoryBytes: r.Spec.MemoryBytes, CPUMillis: r.Spec.CPUMillis, DiskBytes: r.Spec.DiskBytes, Pids: r.Spec.Pids}
}

// Tell sends the agent of r its limits.
func (a *agents) Tell(ctx context.Context, r *record.Record) error {
	return a.client(r).Tell(ctx, limitsOf(r))
}

// client returns the pooled client of r.
func (a *agents) client(r *record.Record) *agent.Client {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[r.ID]
	if c == nil {
		c = a.newClient(r)
		a.clients[r.ID] = c
	}
	return c
}

func (a *agents) newClient(r *record.Record) *agent.Client {
	addr := netip.AddrPortFrom(a.cfg.Addr(r.Slot), agent.Port)
	c := agent.New(func(ctx context.Context) (net.Conn, error) { return dial(ctx, addr) }, r.Token)
	if rec := *r; rec.Spec.Inspect {
		c.GiveVariables(func(ctx context.Context) (map[string]string, error) { return a.placeholders(ctx, &rec) })
	}
	return c
}

// changed says that a sandbox has other placeholders now. Its agent learns of them with the next
// request.
func (a *agents) changed(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[id]; c != nil { // else the client that is made tells it
		c.VariablesChanged()
	}
}

// forget drops the client of a sandbox that is gone.
func (a *agents) forget(id string) {
	a.mu.Lock()
	c := a.clients[id]
	delete(a.clients, id)
	a.mu.Unlock()
	if c != nil {
		c.Close()
	}
}

// forgetAllBut drops the clients of all sandboxes for which keep returns false.
func (a *agents) forgetAllBut(keep func(id string) bool) {
	a.mu.Lock()
	ids := slices.Collect(maps.Keys(a.clients))
	a.mu.Unlock()
	for _, id := range ids {
		if !keep(id) {
			a.forget(id)
		}
	}
}

func dial(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp4", addr.String())
	if err != nil {
		return nil, err
	}
	return relay.New(c), nil
}

// Ready blocks until the agent of r answers, or ctx ends.
func (a *agents) Ready(ctx context.Context, r *record.Record) error { return a.client(r).Ready(ctx) }

// Terminate sends the entrypoint of r the signal that asks it to end, by its number: an older
// agent does not know all names.
func (a *agents) Terminate(ctx context.Context, r *record.Record) error {
	url := fmt.Sprintf("http://sandbox/command/%s/signal?signal=%d", agent.EntrypointID, r.Spec.StopWith())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, nil)
	if err != nil {
		return err
	}
	resp, err := a.client(r).RoundTripper().RoundTrip(req)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		err = fmt.Errorf("signal the entrypoint: the agent answers %d", resp.StatusCode)
	}
	return errors.Join(err, resp.Body.Close())
}

// Transport returns pooled connections to the agent of r.
func (a *agents) Transport(r *record.Record) http.RoundTripper { return a.client(r).RoundTripper() }

// Dial connects to a port of r. A port that listens on loopback only refuses; then the
// API goes through the agent.
func (a *agents) Dial(ctx context.Context, r record.Record, port uint16) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return dial(ctx, netip.AddrPortFrom(a.cfg.Addr(r.Slot), port))
}

// ProbePort returns nil if a port of r accepts connections, even on loopback only.
func (a *agents) ProbePort(ctx context.Context, r record.Record, port uint16) error {
	conn, err := a.Dial(ctx, r, port)
	switch {
	case err == nil:
		return conn.Close()
	case errors.Is(err, syscall.ECONNREFUSED):
		return a.client(&r).Listening(ctx, port)
	}
	return err
}

// ProbeCommand runs a command with the shell of r and returns the end of its output.
func (a *agents) ProbeCommand(ctx context.Context, r record.Record, command string, limit time.Duration) (string, error) {
	return a.client(&r).Probe(ctx, command, limit)
}

// openOutput opens what the entrypoint or a command of a dead sandbox has printed.
func (a *agents) openOutput(id, command string) (*os.File, error) {
	path, ok := agent.OutputOf(command)
	if !ok {
		return nil, errs.New(errs.NotFound, "no command has the id %.64q", command)
	}
	return a.disks.OpenFile(id, path)
}

// keptEnd is the end of what the entrypoint of a dead sandbox has printed, if its agent kept that.
func (a *agents) keptEnd(id string) string {
	f, err := a.openOutput(id, agent.EntrypointID)
	if err != nil {
		return ""
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return ""
	}
	end, err := io.ReadAll(agent.OpenOutput(f, fi.Size(), agent.MaxLastOutput).Since(0))
	if err != nil {
		return ""
	}
	return strings.ToValidUTF8(string(end), "\uFFFD")
}

// Obituary reads what the agent of a dead sandbox left on its disk. Without an
// obituary, LastOutput is the error that ended the agent, if that is known.
func (a *agents) Obituary(ctx context.Context, id string) (sandbox.Obituary, bool) {
	b, err := a.disks.ReadFile(ctx, id, agent.ObituaryFile, agent.MaxObituary)
	if err != nil {
		crash, err := a.disks.ReadFile(ctx, id, agent.CrashFile, agent.MaxLastOutput)
		if err != nil {
			crash = nil
		}
		return sandbox.Obituary{LastOutput: strings.ToValidUTF8(string(crash), "\uFFFD"), Kept: a.keptEnd(id)}, false
	}
	o, err := agent.ParseObituary(b)
	if err != nil {
		return sandbox.Obituary{}, false
	}
	output, err := a.disks.ReadFile(ctx, id, agent.OutputFile, agent.MaxLastOutput)
	if err != nil {
		output = nil // it wrote no output
	}
	return sandbox.Obituary{
		ExitCode:   o.ExitCode,
		Signal:     o.Signal,
		Message:    o.Message,
		Reason:     o.Reason,
		LastOutput: strings.ToValidUTF8(string(output), "\uFFFD"),
	}, true
}
