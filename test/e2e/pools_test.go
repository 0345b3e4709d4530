package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
)

// pooled makes a pool on a runtime whose members have run a command, and are ready when a check
// says so.
func (h host) pooled(t *testing.T, name, runtime, warm, ready string, c wire.PoolCapacity) {
	t.Helper()
	s := spec(runtime)
	ext := map[string]string{wire.ExtRuntime: runtime, wire.ExtPoolWarm: warm, wire.ExtPoolReady: ready}
	b, err := json.Marshal(wire.PoolTemplate{Image: s.Image, ResourceLimits: s.ResourceLimits, Extensions: ext})
	if err == nil {
		_, err = h.api.System().Pools().Create(t.Context(), wire.PoolRequest{Name: name, Template: b, CapacitySpec: &c})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// poolReady waits until a pool has so many ready members, or the daemon has ended.
func (h host) poolReady(t *testing.T, name string, n int) {
	t.Helper()
	eventually(t, patience, func() error {
		select {
		case <-h.Ended():
			return nil
		default:
		}
		p, err := h.api.System().Pools().Get(t.Context(), name)
		if err == nil && p.Status.Available != n {
			err = fmt.Errorf("pool %s has %d ready members, not %d: %s", name, p.Status.Available, n, p.Status.Message)
		}
		return err
	})
}

// deletePools leaves no pool to the next test.
func (h host) deletePools(t testing.TB) {
	t.Helper()
	all, err := h.api.System().Pools().List(context.Background())
	for _, p := range all {
		err = errors.Join(err, h.api.System().Pools().Remove(context.Background(), p.Name))
	}
	if err != nil {
		t.Error(err)
	}
}

// ofPool is a creation that names a pool.
func ofPool(runtime, pool string, entrypoint ...string) wire.CreateRequest {
	r := spec(runtime, entrypoint...)
	r.Extensions[wire.ExtPool] = pool
	return r
}

// resize changes the capacity of a pool.
func (h host) resize(t *testing.T, name string, c wire.PoolCapacity) {
	t.Helper()
	if _, err := h.api.System().Pools().Update(t.Context(), name, wire.PoolRequest{CapacitySpec: &c}); err != nil {
		t.Fatal(err)
	}
}

// slowly is the command of a member that is up a while after it.
const slowly = "echo warm >/root/warm; (sleep 0.1; echo up >/root/up) >/dev/null 2>&1 &"

// saysHello connects to a server of the world outside that echoes, and prints what that says.
func saysHello(addr string) string {
	return "exec 3<>/dev/tcp/" + addr + "/443 && echo hello >&3 && head -n1 <&3"
}

// TestPools: members run before anybody asks, and are ready when their check says so; a create takes
// one, and gets its own name, metadata, environment, entrypoint, limits and network policy, which
// holds for what it sends; what no member can take comes up cold and says so; beyond poolMax a create
// is refused; there are as many members as a new capacity says; nothing is left when the daemon
// stops.
func TestPools(t *testing.T) {
	newOutside(t)
	h := newHost(t, daemontest.Options{})
	defer h.deletePools(t)
	ctx := t.Context()
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			name := "p-" + runtime
			h.pooled(t, name, runtime, slowly, "test -s /root/up", wire.PoolCapacity{BufferMin: 1, BufferMax: 2, PoolMax: 4})
			h.poolReady(t, name, 2)
			members := h.links()
			if boxes, err := h.api.List(ctx, client.Filter{}); err != nil || len(boxes) > 0 {
				t.Errorf("clients see %+v, %v", boxes, err)
			}
			r := ofPool(runtime, name, "sh", "-c", `echo "$GREETING" >/root/entry; exec sleep 1000`)
			r.Env = map[string]*string{"GREETING": new("hello")}
			r.Metadata = map[string]string{"team": "a"}
			r.Extensions[wire.ExtRules] = "allow=" + outsideAddr + ":443"
			if runtime == "runc" { // gVisor keeps what it started with
				r.Extensions[wire.ExtName] = "lab"
				r.ResourceLimits = map[string]string{"memory": "128Mi", "cpu": "500m", "pids": "50"}
			}
			sb := h.create(t, r)
			if !slices.Contains(members, sb.ID) {
				t.Errorf("sandbox %s is none of the members %v", sb.ID, members)
			}
			in, err := h.api.Inspect(ctx, sb.ID)
			if err != nil || in.Pool == nil || !in.Pool.Hit || in.Pool.Name != name || in.Metadata["team"] != "a" {
				t.Errorf("inspect says %+v, %v, %v", in.Pool, in.Metadata, err)
			}
			if out, err := h.exec(ctx, sb.ID, "cat", "/root/up"); err != nil || out != "up\n" {
				t.Errorf("a member was taken before its check succeeded: %q, %v", out, err)
			}
			if out, err := h.exec(ctx, sb.ID, "bash", "-c", saysHello(outsideAddr)); err != nil || out != "hello\n" {
				t.Errorf("a host that its policy allows: %q, %v", out, err)
			}
			out, err := h.exec(ctx, sb.ID, "bash", "-c", saysHello(outsideOther))
			if err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("a host that its policy does not allow: %q, %v", out, err)
			}
			host := sb.ID
			if runtime == "runc" {
				host = "lab"
			}
			for command, want := range map[string]string{
				"cat /root/warm":                  "warm",
				"cat /root/entry":                 "hello",
				"echo $GREETING":                  "hello",
				"echo $HOSTNAME":                  host,
				"hostname":                        host,
				"cat /etc/hostname":               host,
				"grep -c " + host + " /etc/hosts": "1",
			} {
				eventually(t, patience, func() error {
					out, err := h.exec(ctx, sb.ID, "sh", "-c", command)
					if err == nil && strings.TrimSpace(out) != want {
						err = fmt.Errorf("%s: %q, not %q", command, out, want)
					}
					return err
				})
			}
			if line := operation(t, h, "create", sb.ID); !strings.Contains(line, "pool="+name) {
				t.Error(line)
			}
			h.poolReady(t, name, 1)

			cold := ofPool(runtime, name)
			cold.Extensions[wire.ExtReadOnly] = "true"
			second := h.create(t, cold)
			if in, err := h.api.Inspect(ctx, second.ID); err != nil || in.Pool == nil || in.Pool.Hit || in.Pool.Miss == "" {
				t.Errorf("inspect says %+v, %v", in.Pool, err)
			}
			third, fourth := h.create(t, ofPool(runtime, name)), ofPool(runtime, name)
			h.answers(t, third.ID)
			h.poolReady(t, name, 1) // the fourth place
			last := h.create(t, fourth)
			if _, err := h.api.Create(ctx, ofPool(runtime, name), true); !errs.Is(err, errs.Exhausted) {
				t.Errorf("a fifth in a pool of four: %v", err)
			}
			if _, err := h.api.Create(ctx, ofPool(runtime, "none"), true); !errs.Is(err, errs.NotFound) {
				t.Errorf("of a pool that does not exist: %v", err)
			}
			for _, id := range []string{sb.ID, second.ID, third.ID, last.ID} {
				h.deletes(t, id)
				h.holdsNothingOf(t, id)
			}
			h.poolReady(t, name, 2)
			h.resize(t, name, wire.PoolCapacity{BufferMin: 3, BufferMax: 3, PoolMax: 4})
			h.poolReady(t, name, 3)
			h.resize(t, name, wire.PoolCapacity{BufferMax: 2, PoolMax: 4})
			h.poolReady(t, name, 2)
			ready := fmt.Sprintf("\nsandboxd_pool_members{pool=%q,state=\"ready\"} 2\n", name)
			if text := scrape(t, h.Daemon); !strings.Contains(text, ready) {
				t.Error("the metrics do not say how many members are ready")
			}
			if err := h.api.System().Pools().Remove(ctx, name); err != nil {
				t.Error(err)
			}
			settles(t, func() error {
				if ids := h.links(); len(ids) > 0 {
					return fmt.Errorf("the members of a pool that is gone hold the links of %v", ids)
				}
				return nil
			})
		})
	}
}

// ofMembers are the failpoints that only members of pools pass.
func ofMembers() (names []string) {
	for _, name := range sandbox.FailpointNames() {
		bare := strings.TrimPrefix(name, "after:")
		if strings.HasPrefix(bare, "member:") || strings.HasPrefix(bare, "claim:") || slices.Contains([]string{
			"store:member", "store:claim", "warm", "ready",
		}, bare) {
			names = append(names, name)
		}
	}
	return names
}

// TestKillWithMembers kills the daemon at each step of making and taking a member. The next
// one releases members that nobody took, and those that somebody took are sandboxes.
func TestKillWithMembers(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	defer h.deletePools(t)
	before := h.empty(t)
	for _, runtime := range runtimes {
		for _, point := range ofMembers() {
			if !chosen(runtime, point) {
				continue
			}
			t.Run(runtime+"/"+point, func(t *testing.T) {
				h.pooled(t, "p", runtime, "true", "true", wire.PoolCapacity{BufferMin: 1, BufferMax: 1, PoolMax: 3})
				h.Stop()
				h.StartArmed(point + "=kill") //nolint:errcheck // it makes members before it says that it serves
				h.poolReady(t, "p", 1)
				if sb, err := h.api.Create(t.Context(), ofPool(runtime, "p"), true); err == nil {
					t.Fatalf("a creation with a member never passed %s: %+v", point, sb)
				}
				<-h.Ended()
				if err := h.TryStart(); err != nil {
					t.Fatalf("start again: %v", err)
				}
				if err := h.api.System().Pools().Remove(t.Context(), "p"); err != nil {
					t.Error(err)
				}
				agree(t, h)
				h.deleteAll(t)
				h.holdsOnly(t, before)
			})
		}
	}
}

// TestPoolOfContexts: a sandbox that took a member has its contexts, and code in them sees
// the environment of the sandbox.
func TestPoolOfContexts(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	defer h.deletePools(t)
	defer h.deleteAll(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			name := "py-" + runtime
			b, err := json.Marshal(wire.PoolTemplate{Image: &wire.Image{URI: "python"}, Extensions: map[string]string{
				wire.ExtRuntime: runtime, wire.ExtPrestart: "python",
			}})
			if err == nil {
				_, err = h.api.System().Pools().Create(t.Context(), wire.PoolRequest{
					Name: name, Template: b, CapacitySpec: &wire.PoolCapacity{BufferMin: 1, BufferMax: 1, PoolMax: 2},
				})
			}
			if err != nil {
				t.Fatal(err)
			}
			h.poolReady(t, name, 1)
			sb := h.create(t, wire.CreateRequest{
				Extensions: map[string]string{wire.ExtPool: name}, Env: map[string]*string{"GREETING": new("hello")},
			})
			if in, err := h.api.Inspect(t.Context(), sb.ID); err != nil || in.Pool == nil || !in.Pool.Hit {
				t.Errorf("inspect says %+v, %v", in.Pool, err)
			}
			run, err := h.api.Interpreters(sb.ID).Run(t.Context(), client.Code{
				Language: "python", Text: "import os; print(os.environ['GREETING'])",
			})
			var out, errw bytes.Buffer
			if err == nil {
				err = run.Wait(&out, &errw, func(map[string]string) error { return nil })
			}
			if err != nil || out.String() != "hello\n" {
				t.Errorf("%q, %q, %v", out.String(), errw.String(), err)
			}
		})
	}
}
