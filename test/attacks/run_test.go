package attacks_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/test/internet"
)

// weakBin is where make weak puts the programs whose walls can be taken down, and guest.
func weakBin(name string) string { return filepath.Join(daemontest.Bin(".."), "weak", name) }

// TestAttacks: every attack is held by the product as it is built for users.
func TestAttacks(t *testing.T) {
	f := newField(t, "")
	for _, place := range []string{"runc", "runsc", "api"} {
		t.Run(place, func(t *testing.T) {
			f.attack(t, place, all(), func(t *testing.T, a attack, g gain) {
				if !a.held.has(g.word) {
					t.Errorf("%-5s %s: NOT HELD: %s; want %v", place, a.name, g, a.held)
					return
				}
				t.Logf("%-5s %s: held: %s", place, a.name, g)
				if !strings.Contains(g.why, a.says) {
					t.Errorf("%s: the record says %q, and not %q", a.name, g.why, a.says)
				}
			})
		})
	}
}

// pushed are the walls whose proofs are run by every push; the rest takes minutes.
var pushed = []string{
	"caps,seccomp", "chains", "descriptors", "framing", "judge", "keys", "masked-paths", "pids", "proxy", "readonly,userns", "resolver",
	"roles", "seccomp", "tokens", "vault",
}

// TestProofs: without its walls, every attack succeeds. So TestAttacks can fail.
func TestProofs(t *testing.T) {
	f := newField(t, weakBin(""))
	groups := map[string][]weak.Wall{}
	for _, a := range all() {
		for _, p := range a.places() {
			if len(p.off) > 0 && (everything || slices.Contains(pushed, nameOf(p.off))) {
				groups[nameOf(p.off)] = p.off
			}
		}
	}
	for _, name := range pushed {
		if groups[name] == nil {
			t.Errorf("no attack is shown without %s", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		t.Run(name, func(t *testing.T) {
			shown := slices.DeleteFunc(all(), func(a attack) bool {
				lacks := a.needs != nil && !a.needs(t)
				for place, p := range a.places() {
					if lacks && nameOf(p.off) == name {
						t.Logf("%-5s %s: not shown: this host does not have what it attacks", place, a.name)
					}
				}
				return lacks
			})
			up := false
			for _, place := range []string{"runc", "runsc", "api"} {
				here := slices.DeleteFunc(slices.Clone(shown), func(a attack) bool {
					p := a.places()[place]
					return p == nil || nameOf(p.off) != name || a.all && !everything
				})
				if len(here) > 0 && !up {
					f.takeDown(t, name)
					up = true
				}
				f.attack(t, place, here, func(t *testing.T, a attack, g gain) {
					if !a.result().has(g.word) {
						t.Errorf("%-5s %s: without %s it got %s, want %v: it proves nothing", place, a.name, name, g, a.result())
						return
					}
					t.Logf("%-5s %s: succeeds without %s: %s", place, a.name, name, g)
				})
			}
		})
	}
}

// TestNoHook: no program for users can take a wall down.
func TestNoHook(t *testing.T) {
	hosttest.Root(t) // the programs are built
	const variable = "SANDBOXD_WEAK"
	for _, program := range []string{"sandboxd", "sandboxd-runc", "sandboxctl", "agent/sandbox-agent", "runsc"} {
		b, err := os.ReadFile(daemontest.Bin(program))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(b, []byte(variable)) {
			t.Errorf("%s reads %s: it was built with the tag weak", program, variable)
		}
	}
	for _, program := range []string{"sandboxd", "sandboxd-runc"} {
		b, err := os.ReadFile(weakBin(program))
		if err != nil {
			t.Fatalf("%v: run make weak", err)
		}
		if !bytes.Contains(b, []byte(variable)) {
			t.Errorf("%s of make weak does not read %s: the check above proves nothing", program, variable)
		}
	}
}

func nameOf(walls []weak.Wall) string {
	names := make([]string, 0, len(walls))
	for _, w := range walls {
		names = append(names, string(w))
	}
	slices.Sort(names)
	return strings.Join(names, ",")
}

// A field is a daemon that is attacked.
type field struct {
	*daemontest.Daemon
	api *client.Client

	guest  []byte // the program
	dir    string // of the host: everybody may read it
	marker string // a file in it
	host   net.Listener
	shouts net.PacketConn // answers what comes, as host listens
	liar   *liar
	net    *internet.Internet
	weak   string // the walls that are down
	lent   string // a directory that guests may mount
}

const secret = "this stands in a file of the host"

// newField starts a daemon of the programs in a directory; empty: those of make build.
func newField(t *testing.T, programs string) *field {
	t.Helper()
	hosttest.Root(t)
	f := &field{}
	var err error
	if f.guest, err = os.ReadFile(weakBin("guest")); err != nil {
		t.Fatalf("%v: run make weak", err)
	}
	f.dir, err = os.MkdirTemp("/tmp", "sandboxd-attack")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(f.dir) })
	f.marker, f.lent = filepath.Join(f.dir, "marker"), filepath.Join(f.dir, "lent")
	must(t, os.Chmod(f.dir, 0o755))
	must(t, os.WriteFile(f.marker, []byte(secret), 0o644))
	must(t, os.Mkdir(f.lent, 0o755))
	must(t, os.Symlink("..", filepath.Join(f.lent, "up")))
	f.liar = newLiar(t)
	f.net = newInternet(t)
	f.Daemon = daemontest.Prepare(t, daemontest.Options{
		Programs: programs, Storage: []string{fmt.Sprintf("allowed_host_paths = [%q]", f.lent)},
		Config: slices.Concat([]string{
			"[network]", fmt.Sprintf("upstreams = [%q]", internet.DNS), fmt.Sprintf("roots = %q", f.roots(t)),
			"[egress]", "mask_secrets = true",
		}, f.liar.config()),
	})
	f.host, err = net.Listen("tcp4", "0.0.0.0:0")
	must(t, err)
	t.Cleanup(func() { f.host.Close() })
	go func() {
		for c, err := f.host.Accept(); err == nil; c, err = f.host.Accept() {
			c.Close()
		}
	}()
	f.shouts, err = net.ListenPacket("udp4", "0.0.0.0:0")
	must(t, err)
	t.Cleanup(func() { f.shouts.Close() })
	go func() {
		b := make([]byte, 64)
		for n, from, err := f.shouts.ReadFrom(b); !errors.Is(err, net.ErrClosed); n, from, err = f.shouts.ReadFrom(b) {
			if err == nil {
				f.shouts.WriteTo(b[:n], from) //nolint:errcheck // the guest sees what is missing
			}
		}
	}()
	f.api, err = client.New("unix://"+f.Socket, "")
	must(t, err)
	t.Cleanup(f.api.Close)
	if programs == "" {
		f.Start()
		daemontest.Image(t, f.Daemon, "base")
	}
	return f
}

// takeDown starts the daemon anew, without some walls.
func (f *field) takeDown(t *testing.T, walls string) {
	t.Helper()
	f.Stop()
	f.api.Close()
	f.weak = walls
	f.Start("SANDBOXD_WEAK=" + walls)
	daemontest.Image(t, f.Daemon, "base")
}

// A gain is what an attack got.
type gain struct {
	word, more string
	why        string // what agent and record say
}

func (g gain) String() string { return strings.TrimSpace(g.word + " " + g.more) }

// attack runs attacks in one place, and hands over what each got. Attacks that leave
// nothing share a sandbox.
func (f *field) attack(t *testing.T, place string, attacks []attack, judge func(*testing.T, attack, gain)) {
	attacks = slices.DeleteFunc(slices.Clone(attacks), func(a attack) bool {
		return a.places()[place] == nil || a.all && !everything
	})
	if len(attacks) == 0 {
		return
	}
	defer f.deleteAll(t)
	if place == "api" {
		w := f.target(t)
		for _, a := range attacks {
			t.Run(a.name, func(t *testing.T) { judge(t, a, gain{word: a.ask(t, w)}) })
		}
		return
	}
	published := hosttest.FreePort(t).Port()
	neighbour := f.create(t, place, func(r *wire.CreateRequest) {
		r.Extensions[wire.ExtPublish] = fmt.Sprintf("0.0.0.0:%d:7000", published)
	})
	f.background(t, neighbour.ID, "serve", "7000")
	f.await(t, neighbour.ID, 7000)
	values := f.values(t, neighbour.ID, published)
	shared := map[bool]*wire.Sandbox{} // by named
	var held *vaulted                  // by a sandbox of its own
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			if a.vault {
				if held == nil {
					held = f.vaulted(t, place)
				}
				judge(t, a, f.move(t, a, held, values))
				return
			}
			change := a.own
			if a.named {
				change = byName(a.own)
			}
			in := shared[a.named]
			if a.own != nil || in == nil {
				made := f.create(t, place, change)
				in = &made
			}
			if a.own == nil {
				shared[a.named] = in
			}
			flows := conntrack(t)
			g := f.run(t, a, in.ID, values)
			judge(t, a, g)
			if a.own != nil {
				f.unharmed(t, place, neighbour.ID, flows)
				must(t, f.api.Delete(t.Context(), in.ID))
			}
		})
	}
}

// create makes a sandbox that idles, with the program in it.
func (f *field) create(t *testing.T, runtime string, change func(*wire.CreateRequest)) wire.Sandbox {
	t.Helper()
	r := wire.CreateRequest{
		Image:          &wire.Image{URI: "base"},
		ResourceLimits: map[string]string{"memory": "256Mi", "cpu": "1"},
		Extensions:     map[string]string{wire.ExtRuntime: runtime, wire.ExtIdle: "true"},
	}
	if change != nil {
		change(&r)
	}
	sb, err := f.api.Create(t.Context(), r, true)
	if err != nil {
		t.Fatal(err)
	}
	if sb.Status.State != wire.Running {
		t.Fatalf("created sandbox %s is %+v", sb.ID, sb.Status)
	}
	must(t, f.api.Files(sb.ID).Put(t.Context(), []client.Upload{{
		Path: "/attack", Mode: 755, Size: int64(len(f.guest)),
		Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(f.guest)), nil },
	}}))
	return sb
}

// background starts the program, and leaves it.
func (f *field) background(t *testing.T, id string, args ...string) {
	t.Helper()
	p, err := f.api.Start(t.Context(), id, client.Command{Argv: append([]string{"/attack"}, args...), Background: true})
	must(t, err)
	must(t, p.Close())
}

// await returns when a sandbox listens on a port.
func (f *field) await(t *testing.T, id string, port int) {
	t.Helper()
	limit := time.Now().Add(hosttest.Patient(10 * time.Second))
	for {
		g := f.exec(t, id, 0, []string{"/attack", "connect", fmt.Sprintf("127.0.0.1:%d", port)})
		if g.word == "ok" {
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("sandbox %s does not listen on %d: %s", id, port, g)
		}
	}
}

// values are what the words of a row stand for, as strings.NewReplacer takes them.
func (f *field) values(t *testing.T, neighbour string, published uint16) []string {
	t.Helper()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	must(t, err)
	g := f.exec(t, neighbour, 0, []string{"sh", "-c", "grep -v localhost /etc/hosts"})
	_, port, err := net.SplitHostPort(f.host.Addr().String())
	must(t, err)
	_, shouts, err := net.SplitHostPort(f.shouts.LocalAddr().String())
	must(t, err)
	return []string{
		"MARKER", f.marker, "BOOTID", strings.TrimSpace(string(boot)), "PID", strconv.Itoa(os.Getpid()),
		"GATEWAY", f.Instance.Gateway().String(), "LISTENER", port, "NEIGHBOUR", g.word,
		"DATAGRAMS", shouts, "PUBLISHED", fmt.Sprint(published),
		"DNS", internet.DNS.String(), "SHARED", internet.Shared.String(), "OTHER", internet.Other.String(),
		"PRIVATE", internet.Private.String(), "UPLINK", internet.Uplink.String(),
	}
}

// run runs an attack in a sandbox.
func (f *field) run(t *testing.T, a attack, id string, values []string) gain {
	t.Helper()
	var argv []string
	if a.run[0] != "sh" {
		argv = append(argv, "/attack")
	}
	for _, arg := range a.run {
		argv = append(argv, strings.NewReplacer(values...).Replace(arg))
	}
	g := f.exec(t, id, a.uid, argv)
	if a.says != "" {
		g.why += " " + f.obituary(t, id, g.word == "gone")
	}
	return g
}

// exec runs a program to its end. Its last line says what it got; if there is none, how it
// ended does.
func (f *field) exec(t *testing.T, id string, uid int64, argv []string) (g gain) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), hosttest.Patient(2*time.Minute))
	defer cancel()
	cmd := client.Command{Argv: argv}
	if uid != 0 {
		cmd.UID, cmd.GID = &uid, &uid
	}
	p, err := f.api.Start(ctx, id, cmd)
	if err != nil {
		return gain{word: "gone", more: err.Error()}
	}
	var out, errout bytes.Buffer
	exit, err := p.Wait(&out, &errout)
	g.why = exit.Reason + " " + exit.Hint
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	said := errout.String()
	switch last := lines[len(lines)-1]; {
	case err != nil:
		g.word, g.more = "gone", err.Error()
	case last != "":
		g.word, g.more, _ = strings.Cut(last, " ")
	case exit.Signal != "":
		g.word = exit.Signal
	case strings.Contains(said, "Cannot fork"), strings.Contains(said, "temporarily unavailable"):
		g.word = "EAGAIN"
	default:
		g.word, g.more = fmt.Sprintf("exit-%d", exit.Code), exit.Error+said
	}
	g.more = fmt.Sprintf("%.200s", g.more)
	return g
}

// obituary is what is known of the end of a sandbox, or of a part of it.
func (f *field) obituary(t *testing.T, id string, ends bool) string {
	t.Helper()
	limit := time.Now().Add(hosttest.Patient(10 * time.Second))
	for {
		sb, err := f.api.Get(t.Context(), id)
		must(t, err)
		if ends && (sb.Status.State == wire.Running || sb.Status.State == wire.Stopping) && time.Now().Before(limit) {
			time.Sleep(10 * time.Millisecond) // the daemon notices within two seconds
			continue
		}
		said := cmp.Or(sb.Status.Reason, "none") + " " + sb.Status.Message
		if u, err := f.api.Stats(t.Context(), id); err == nil && u.OOMKills > 0 {
			said += " oom"
		}
		return said
	}
}

// flowsOfOne is more entries than one sandbox may have in the table of conntrack, and fewer
// than an attack tries to make.
const flowsOfOne = 4096 + 960

// unharmed: the daemon answers, a neighbour runs commands, a new sandbox comes up, and the
// host has room for connections.
func (f *field) unharmed(t *testing.T, runtime, neighbour string, flows int) {
	t.Helper()
	if _, err := f.api.List(t.Context(), client.Filter{}); err != nil {
		t.Errorf("afterwards the daemon does not answer: %v", err)
	}
	if g := f.exec(t, neighbour, 0, []string{"/attack", "nothing"}); g.word != "ok" {
		t.Errorf("afterwards the neighbour does not run commands: %s", g)
	}
	sb := f.create(t, runtime, nil)
	if g := f.exec(t, sb.ID, 0, []string{"/attack", "nothing"}); g.word != "ok" {
		t.Errorf("afterwards a new sandbox does not run commands: %s", g)
	}
	must(t, f.api.Delete(t.Context(), sb.ID))
	if now := conntrack(t); now > flows+flowsOfOne {
		t.Errorf("the host's table of flows grew from %d to %d", flows, now)
	}
}

// conntrack is how many entries the table of conntrack has.
func conntrack(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
	must(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	must(t, err)
	return n
}

func (f *field) deleteAll(t *testing.T) {
	t.Helper()
	every, err := f.api.List(context.Background(), client.Filter{})
	if err != nil {
		t.Error(err)
	}
	for _, sb := range every {
		if err := f.api.Delete(context.Background(), sb.ID); err != nil {
			t.Error(err)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func fromJSON(t testing.TB, b []byte, v any) {
	t.Helper()
	if err := json.Unmarshal(b, v); err != nil {
		t.Fatalf("%v in %.300s", err, b)
	}
}
