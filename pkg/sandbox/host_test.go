package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// host is a whole fake machine: what survives when the daemon dies.
type host struct {
	mu      sync.Mutex
	things  map[string]bool // "cgroup/daaaaaaaaaaa", and "process/…", "frozen/…"
	dead    map[string]chan struct{}
	records map[string]record.Record
	free    []int // slots, least recently used first
	deaths  map[string]Obituary
	ooms    map[string]uint64
	short   bool             // of memory: no sandbox has hit its own limit
	cpu     map[string]int64 // limits, in thousandths
	limits  map[string]CgroupLimits
	held    map[string]int64 // memory in use
	refused map[string]uint64
	slow    map[string]bool // killed, they die when shot
	// of disks, in bytes
	diskUsed, diskLimit map[string]int64
	strays              []string // disks in lost+found
	bad                 []string // unreadable records

	images       map[string]bool // memory images that can be restored, by directory
	pauses       map[string]int  // how often each guest is paused
	synced       map[string]bool // disks that were synced while their guest stood still
	volatile     map[string]bool // disks that do not survive a crash of the host
	panics       []string        // sandboxes whose sentries panicked
	snapshots    map[string]record.Snapshot
	badSnapshots []string
	volumes      map[string]record.Volume // by name
	policies     map[string]record.Policy // by name
	pools        map[string]record.Pool   // by name
	agents       map[string]guest         // what the agent of each sandbox knows
	warmed       map[string]int           // commands that warmed a member
	named        int                      // volumes ever
	taken        int                      // snapshots ever

	bootID string
	last   *incarnation
	born   int // sandboxes ever

	early []string // things seen on the host without a record
	calls []string // names of all calls so far, "cgroup.Create a"
	fault fault
	// failAll is the name of calls that all do nothing and fail, for whichever sandbox.
	failAll  string
	failWith error                    // in place of errInjected
	block    map[string]chan struct{} // calls that wait until it is closed, or ctx ends
}

// guest is what an agent and its guest know.
type guest struct {
	token, hostname string
	env             map[string]string
}

// A fault strikes at one call.
type fault struct {
	call string
	mode mode
	hit  bool
}

type mode int

const (
	errBefore   mode = iota // the call does nothing and fails
	errAfter                // the call works, yet reports failure
	crashBefore             // the daemon dies before the call
	crashAfter              // the daemon dies after the call
)

func (m mode) String() string {
	return [...]string{"error before", "error after", "death before", "death after"}[m]
}

var (
	errInjected = errors.New("injected")
	errDead     = errors.New("this daemon is dead")
)

func newHost() *host {
	h := &host{
		things:    map[string]bool{},
		dead:      map[string]chan struct{}{},
		records:   map[string]record.Record{},
		snapshots: map[string]record.Snapshot{},
		images:    map[string]bool{},
		pauses:    map[string]int{},
		synced:    map[string]bool{},
		volatile:  map[string]bool{},
		volumes:   map[string]record.Volume{},
		policies:  map[string]record.Policy{},
		pools:     map[string]record.Pool{},
		agents:    map[string]guest{},
		warmed:    map[string]int{},
		deaths:    map[string]Obituary{},
		ooms:      map[string]uint64{},
		cpu:       map[string]int64{},
		limits:    map[string]CgroupLimits{},
		held:      map[string]int64{},
		refused:   map[string]uint64{},
		slow:      map[string]bool{},

		diskUsed:  map[string]int64{},
		diskLimit: map[string]int64{},

		block:  map[string]chan struct{}{},
		bootID: "boot-1",
	}
	for i := range 100 {
		h.free = append(h.free, i)
	}
	return h
}

// incarnation is one daemon on the host. Once dead, whatever it still does has
// no effect and fails: just as if it were not there.
type incarnation struct {
	*host
	dead       bool                      // guarded by host.mu
	still      map[string]bool           // whose guests stand still for a checkpoint of this daemon; guarded by host.mu
	registered map[string]record.Network // what this daemon's egress has in memory
	published  map[string]bool           // whose ports this daemon serves
}

// do is every call a daemon makes to the outside.
func (d *incarnation) do(ctx context.Context, name, id string, effect func() error) error {
	h := d.host
	h.mu.Lock()
	call := strings.TrimSpace(name + " " + id)
	if gate := h.block[call]; gate != nil {
		h.mu.Unlock()
		select {
		case <-gate:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		h.mu.Lock()
	}
	defer h.mu.Unlock()
	if d.dead {
		return errDead
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	h.calls = append(h.calls, call)
	defer h.checkWriteAhead()
	if name == h.failAll {
		return cmp.Or(h.failWith, errInjected)
	}
	if !strings.HasPrefix(h.fault.call, call+" #") || h.fault.call != fmt.Sprintf("%s #%d", call, times(call, h.calls)) {
		return effect()
	}
	h.fault.hit = true
	switch h.fault.mode {
	case errBefore:
		return errInjected
	case errAfter:
		return errors.Join(effect(), errInjected)
	case crashBefore:
		d.dead = true
	default:
		effect() //nolint:errcheck // nobody is there to hear
		d.dead = true
	}
	return errDead
}

// times is how often calls has call.
func times(call string, calls []string) (n int) {
	for _, c := range calls {
		if c == call {
			n++
		}
	}
	return n
}

// checkWriteAhead holds at every moment, not only after recovery.
func (h *host) checkWriteAhead() {
	for t := range h.things {
		_, id, _ := strings.Cut(t, "/")
		_, ok := h.records[id]
		if strings.HasPrefix(id, "vol-") && !slices.ContainsFunc(slices.Collect(maps.Values(h.volumes)),
			func(v record.Volume) bool { return v.ID == id }) {
			h.early = append(h.early, t)
		}
		if _, snap := h.snapshots[id]; !ok && !snap && !strings.Contains(id, "ghost") &&
			(strings.HasPrefix(id, "d") || strings.HasPrefix(id, "snap-d")) {
			h.early = append(h.early, t)
		}
	}
}

// make and unmake are the effects of all resources. unmake refuses what cannot
// be taken from under a living process.
func (d *incarnation) make(ctx context.Context, kind, id string) error {
	return d.do(ctx, kind+".make", id, func() error {
		d.things[kind+"/"+id] = true
		return nil
	})
}

func (d *incarnation) unmake(ctx context.Context, kind, id string) error {
	return d.do(ctx, kind+".unmake", id, func() error {
		if d.things["process/"+id] {
			return fmt.Errorf("%s of %s is busy", kind, id)
		}
		delete(d.things, kind+"/"+id)
		return nil
	})
}

func (d *incarnation) list(ctx context.Context, kind string) (ids []string, err error) {
	err = d.do(ctx, kind+".list", "", func() error {
		for t := range d.things {
			if id, ok := strings.CutPrefix(t, kind+"/"); ok {
				ids = append(ids, id)
			}
		}
		return nil
	})
	return ids, err
}

// die ends the processes of id, with mu held.
func (h *host) die(id string) {
	if !h.things["process/"+id] {
		return
	}
	delete(h.things, "process/"+id)
	delete(h.things, "frozen/"+id)
	delete(h.pauses, id)
	close(h.dead[id])
	delete(h.dead, id)
}

// exit has the sandbox end by itself.
func (h *host) exit(id string, o Obituary) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.things["process/"+id] {
		h.deaths[id] = o
		h.die(id)
	}
}

// shoot kills the sandbox from outside: nobody writes an obituary.
func (h *host) shoot(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.die(id)
}

// reboot leaves what is on disks.
func (h *host) reboot() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for t := range h.things {
		kind, _, _ := strings.Cut(t, "/")
		if !slices.Contains([]string{"disk", "snapshot", "memory", "volume", "vault"}, kind) {
			delete(h.things, t)
		}
	}
	clear(h.dead)
	clear(h.pauses)
	h.bootID = "boot-2"
}

func runtimes(d *incarnation) map[string]RuntimeKind {
	return map[string]RuntimeKind{
		"runsc": {
			Runtime: fakeRuntime{d, "runsc"}, Memory: fakeMemory{d}, HoldsLink: true, OOMGroup: true, HeadroomBytes: 64 << 20,
			HostPids: 4096,
		},
		"runc": {Runtime: fakeRuntime{d, "runc"}, OwnUsers: true, Rename: fakeRuntime{d, "runc"}.rename},
	}
}

func (h *host) has(thing string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.things[thing]
}

// plant puts a thing on the host that no daemon made.
func (h *host) plant(thing string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.things[thing] = true
}

func (h *host) remove(thing string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.things, thing)
}

func (h *host) record(id string) (record.Record, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r, ok := h.records[id]
	return r, ok
}

// boot starts a daemon on h. It is closed, not killed, when t ends.
func (h *host) boot(t testing.TB, change ...func(*Config)) (*Manager, *incarnation) {
	t.Helper()
	d := &incarnation{host: h, still: map[string]bool{}, registered: map[string]record.Network{}, published: map[string]bool{}}
	if h.last != nil {
		clear(h.last.published) // they ended with it
	}
	h.last = d
	c := Config{
		Instance: instance.Instance('d'),
		Addr:     func(slot int) netip.Addr { return netip.AddrFrom4([4]byte{10, 163, 0, byte(slot)}) },
		BootID:   h.bootID,
		Log:      slog.New(slog.DiscardHandler),
		NewToken: func() string { return "token" },
		Fetch: func(_ context.Context, r *record.Record, _ func(string)) (record.Image, error) {
			if r.Spec.ImageURI == "nowhere:1" {
				return record.Image{}, errs.New(errs.NotFound, "there is none")
			}
			return record.Image{Name: "far", Tag: "1", Layers: []string{"sha256:far"}}, nil
		},
	}
	for _, f := range change {
		f(&c)
	}
	m, err := New(Deps{
		Namespaces: fakeNamespaces{d}, Disks: fakeDisks{d}, Frozen: fakeFrozen{d}, Rootfs: fakeRootfs{d}, Cgroups: fakeCgroups{d},
		Network: fakeNetwork{d}, Egress: fakeEgress{d}, Ports: fakePorts{d}, Bundles: fakeBundles{d}, Agents: fakeAgents{d},
		Vaults: fakeVaults{d}, Store: fakeStore{d}, Volumes: fakeVolumes{d},
		Runtimes: runtimes(d),
	}, c)
	if err != nil {
		t.Fatal(err)
	}
	m.newID = func() string { // so that calls have the same names in every history
		h.mu.Lock()
		defer h.mu.Unlock()
		h.born++
		return "d" + strings.Repeat(string(rune('a'+h.born-1)), record.IDLen-1)
	}
	m.volID = func() string {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.named++
		return "vol-d" + strings.Repeat(string(rune('a'+h.named-1)), record.IDLen-1)
	}
	m.snapshots.newID = func() string {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.taken++
		return "snap-d" + strings.Repeat(string(rune('a'+h.taken-1)), record.IDLen-1)
	}
	return m, d
}

func stop(t testing.TB, m *Manager) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if err := m.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

var kinds = []string{"namespaces", "disk", "rootfs", "cgroup", "network", "egress", "bundle", "process"}

// wrong says in what host and store do not agree, or nothing. It holds after
// every recovery.
func (h *host) wrong(d *incarnation) (out []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.early {
		out = append(out, "held without a record: "+e)
	}
	if len(h.panics) > 0 {
		out = append(out, fmt.Sprintf("resumed once too often: %v", h.panics))
	}
	want, slots := map[string]bool{}, map[int]string{}
	for id, r := range h.records {
		if slots[r.Slot] != "" || slices.Contains(h.free, r.Slot) {
			out = append(out, fmt.Sprintf("slot %d belongs to %s and another", r.Slot, id))
		}
		slots[r.Slot] = id
		if h.wantsVault(id, &r) {
			want["vault/"+id] = true
		}
		if p, ok := h.policies[r.Spec.Policy.Name]; ok && r.Spec.Policy.Follows() {
			if v := p.Newest(); r.Spec.Policy.Version != v.Number || !reflect.DeepEqual(r.Spec.Network, v.Network) {
				out = append(out, fmt.Sprintf("%s, which is %s, has %+v as version %d of its policy, which is %+v", id, r.State,
					r.Spec.Network, r.Spec.Policy.Version, v))
			}
		}
		switch r.State {
		case record.Running, record.Paused:
			for _, k := range kinds {
				want[k+"/"+id] = true
			}
			want[r.Spec.Runtime+"/"+id] = true
			if len(r.Spec.Volumes) > 0 {
				want["volumes/"+id] = true
			}
			if r.Spec.Inspect {
				want["trust/"+id] = true
			}
			if r.State == record.Paused {
				want["frozen/"+id] = true
			}
			// Who paused it is known, whatever happened: in the stories, only "mine" is paused by both.
			policy := r.State == record.Paused && r.Spec.Idle.Given()
			if asleep := r.Reason == record.ReasonIdle; asleep != policy && r.Spec.Name != "mine" {
				out = append(out, fmt.Sprintf("%s is %s, with the reason %q", id, r.State, r.Reason))
			}
			if g := h.agents[id]; g.token != r.Token || !maps.Equal(g.env, r.Spec.Env) {
				out = append(out, fmt.Sprintf("the agent of %s has token %q and environment %v, not %q and %v", id, g.token, g.env, r.Token,
					r.Spec.Env))
			}
			if h.cpu[id] != r.Spec.CPUMillis {
				out = append(out, fmt.Sprintf("%s may use %d thousandths of a CPU, not %d", id, h.cpu[id], r.Spec.CPUMillis))
			}
			if got, want := h.limits[id], cgroupLimits(Deps{Runtimes: runtimes(d)}, &r); got != want {
				out = append(out, fmt.Sprintf("%s has the limits %+v, not %+v", id, got, want))
			}
			if h.diskLimit[id] != r.Spec.DiskBytes {
				out = append(out, fmt.Sprintf("the disk of %s may hold %d bytes, not %d", id, h.diskLimit[id], r.Spec.DiskBytes))
			}
			if !d.published[id] {
				out = append(out, "this daemon does not serve the ports of "+id)
			}
			if h.pauses[id] > 0 || r.Hibernation != nil {
				out = append(out, fmt.Sprintf("%s is %s, paused %d times, with the image %v", id, r.State, h.pauses[id], r.Hibernation))
			}
			if n, ok := d.registered[id]; !ok || n.Mode != r.Spec.Network.Mode || len(n.Rules) != len(r.Spec.Network.Rules) {
				out = append(out, fmt.Sprintf("this daemon's egress has %s as %+v, not %+v", id, n, r.Spec.Network))
			}
		case record.Hibernated:
			want["disk/"+id], want["memory/"+id] = true, true
			if !h.images["dir/"+id] || r.Hibernation == nil || len(r.Hibernation.Files) == 0 {
				out = append(out, fmt.Sprintf("%s hibernates, and its image %+v is no good", id, r.Hibernation))
			}
			if h.volatile[id] || !h.synced[id] {
				out = append(out, fmt.Sprintf("%s hibernates, and a crash of the host takes its disk", id))
			}
			if !d.published[id] {
				out = append(out, "this daemon does not serve the ports of "+id)
			}
		case record.Ended:
			want["disk/"+id] = true
			if r.Reason == "" || r.Message == "" {
				out = append(out, fmt.Sprintf("%s ended with reason %q, message %q", id, r.Reason, r.Message))
			}
		default:
			out = append(out, fmt.Sprintf("%s is still %s", id, r.State))
		}
	}
	for id := range d.published {
		if s := h.records[id].State; s != record.Running && s != record.Paused && s != record.Hibernated {
			out = append(out, "this daemon serves the ports of "+id)
		}
	}
	for id, s := range h.snapshots {
		switch {
		case s.State == record.SnapshotReady && s.Bytes > 0:
			want["snapshot/"+id] = true
			if s.Memory != nil {
				want["memory/"+id] = true
				if len(s.Memory.Files) == 0 || s.Memory.Needs.Build == "" {
					out = append(out, fmt.Sprintf("snapshot %s is ready, and its memory %+v", id, s.Memory))
				}
			}
		case s.State == record.SnapshotFailed && s.Message != "":
		default:
			out = append(out, fmt.Sprintf("snapshot %s is %s, with %d bytes and message %q", id, s.State, s.Bytes, s.Message))
		}
	}
	for _, v := range h.volumes {
		if v.State != record.VolumeReady {
			out = append(out, fmt.Sprintf("volume %s is still %s", v.Name, v.State))
		}
		if _, ok := h.records[v.Owner]; v.Owner != "" && !ok {
			out = append(out, fmt.Sprintf("volume %s goes with %s, which is gone", v.Name, v.Owner))
		}
		if v.Made || h.things["volume/"+v.ID] { // made, and not noted yet
			want["volume/"+v.ID] = true
		}
	}
	for k := range want {
		_, id, _ := strings.Cut(k, "/")
		failed := h.records[id].Reason == record.CreateFailed || h.records[id].Reason == record.Timeout // may have failed before the disk
		if !h.things[k] && !(failed && strings.HasPrefix(k, "disk/")) {
			out = append(out, "missing "+k)
		}
	}
	for k := range h.things {
		if !want[k] {
			out = append(out, "leaked "+k)
		}
	}
	slices.Sort(out)
	return out
}

// wantsVault reports whether a sandbox is to have a vault: one that was given one, by its label, and
// each copy of it but those that never ran. The caller holds mu.
func (h *host) wantsVault(id string, r *record.Record) bool {
	if r.Spec.Fork.Vault {
		return r.State != record.Ended || !r.NeverRan()
	}
	return r.Spec.Labels["vault"] != "" && h.things["vault/"+id]
}

func (h *host) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var s []string
	for id, r := range h.records {
		s = append(s, fmt.Sprintf("%s: %s %s", id, r.State, r.Reason))
	}
	for id, snap := range h.snapshots {
		s = append(s, fmt.Sprintf("%s: %s", id, snap.State))
	}
	for name, v := range h.volumes {
		s = append(s, fmt.Sprintf("%s: %s %s", name, v.ID, v.State))
	}
	for t := range h.things {
		s = append(s, t)
	}
	slices.Sort(s)
	return strings.Join(s, "\n")
}
