package api

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	openapi "github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/fork"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fake is a daemon without a host: sandboxes are records, the agent is a
// handler of the test. The real ones are tested end to end.
type fake struct {
	mu     sync.Mutex
	recs   map[string]record.Record
	hold   chan struct{}        // if set, creations last until it is closed
	held   chan struct{}        // if set, gets one for each Await that is held
	fail   error                // of the next Create, Pause, …
	failed bool                 // creations end as Failed
	end    func(*record.Record) // if set, creations end so
	queued bool                 // creations wait for their turn
	snaps  map[string]record.Snapshot
	used   map[string]int // snapshots
	made   map[string]record.Made
	keys   *fakeKeys

	volumes  *fakeVolumes
	policies *fakePolicies
	vaults   *fakeVaults
	denied   []wire.Denial // to every sandbox
	events   chan wire.Event
	since    string          // the cursor that was asked for
	from     time.Time       // for which events were asked for
	life     context.Context // of every sandbox; nil does not end

	renews atomic.Int64 // calls of Renew
	ooms   atomic.Int64 // OOM kills of every sandbox
	moved  atomic.Bool  // 192.0.2.99 is not an address of this host

	agent   http.Handler                              // what 44772 answers
	agentAt net.Listener                              // or what listens there, if set
	app     net.Listener                              // what every other port answers; nil: refused
	apps    func(id string, port uint16) net.Listener // or each its own, if set
	pipe    func() net.Conn                           // or a connection in memory, if set
	build   func(io.Writer) (record.Image, error)
	taken   bool // all names of images are those of others

	exportFails error
	pulled      []context.Context // of Pull
	asked       []context.Context // of Create
}

func (f *fake) get(idOrName string) (record.Record, bool) {
	for _, r := range f.recs {
		if r.ID == idOrName || r.Spec.Name == idOrName && idOrName != "" {
			return r, true
		}
	}
	return record.Record{}, false
}

func (f *fake) Create(ctx context.Context, s record.Spec) (record.Record, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		return record.Record{}, f.fail
	}
	if _, taken := f.get(s.Name); taken && s.Name != "" {
		return record.Record{}, errs.New(errs.Exists, "the name %s is taken; remove that sandbox or choose another", s.Name)
	}
	f.asked = append(f.asked, ctx)
	r := record.Record{
		ID: record.NewID('t'), State: record.Creating, Spec: s, Token: "agent-token", Created: time.Now(),
		Changed: time.Now(),
	}
	if s.Timeout > 0 {
		r.Expires = r.Created.Add(s.Timeout)
	}
	if key := s.Request.Key; key != "" {
		if _, taken := f.made[key]; taken {
			return record.Record{}, fmt.Errorf("create: %w", errs.Wire(errs.New(errs.Exists, "made already"), record.CodeRequestRace))
		}
		f.made[key] = record.Made{ID: r.ID, Body: s.Request.Body, At: r.Created}
	}
	f.recs[r.ID] = r
	if f.hold == nil {
		f.finishLocked(r.ID)
	}
	return r, nil
}

func (f *fake) finishLocked(id string) {
	r := f.recs[id]
	r.State = record.Running
	if f.failed {
		r.State, r.Reason, r.Message = record.Ended, record.CreateFailed, "entrypoint /nope: no such file or directory"
	}
	if f.end != nil {
		r.State = record.Ended
		f.end(&r)
	}
	f.recs[id] = r
}

func (f *fake) Await(ctx context.Context, id string) (record.Record, error) {
	f.mu.Lock()
	hold := f.hold
	f.mu.Unlock()
	if hold != nil {
		if f.held != nil {
			f.held <- struct{}{}
		}
		select {
		case <-ctx.Done():
			return record.Record{}, ctx.Err()
		case <-hold:
		}
		f.mu.Lock()
		f.finishLocked(id)
		f.mu.Unlock()
	}
	return f.Get(ctx, id)
}

func (f *fake) Queued(r *record.Record) bool { return f.queued || r.Spec.Away() }

func (f *fake) Get(_ context.Context, id string) (record.Record, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r, ok := f.get(id); ok && r.State != record.Deleting {
		return r, nil
	}
	return record.Record{}, errs.New(errs.NotFound, "no sandbox %s", id)
}

func (f *fake) List(context.Context) (all []*record.Record, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.recs {
		all = append(all, &r)
	}
	slices.SortFunc(all, func(a, b *record.Record) int {
		return cmp.Or(b.Created.Compare(a.Created), strings.Compare(a.ID, b.ID))
	})
	return all, nil
}

func (f *fake) Delete(_ context.Context, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.recs[id]; !ok {
		return errs.New(errs.NotFound, "no sandbox %s", id)
	}
	delete(f.recs, id)
	return nil
}

func (f *fake) Remove(ctx context.Context, id string) error {
	f.mu.Lock()
	r := f.recs[id]
	f.mu.Unlock()
	if r.State != record.Ended {
		return errs.New(errs.WrongState, "sandbox %s is %s", id, r.State)
	}
	return f.Delete(ctx, id)
}

func (f *fake) DeleteEnded(_ context.Context, id string) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.recs[id]; r.State != record.Ended {
		return false, f.fail
	}
	delete(f.recs, id)
	return true, nil
}

func (f *fake) change(id string, from, to record.State) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.recs[id]
	if r.State != from {
		return errs.New(errs.WrongState, "sandbox %s is %s, not %s", id, r.State, from)
	}
	r.State = to
	f.recs[id] = r
	return nil
}

func (f *fake) set(id string, change func(*record.Record)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.recs[id]
	change(&r)
	f.recs[id] = r
}

func (f *fake) Start(ctx context.Context, id string) (record.Record, error) {
	if err := f.change(id, record.Ended, record.Starting); err != nil {
		return record.Record{}, err
	}
	defer f.change(id, record.Starting, record.Running) //nolint:errcheck // it is Starting
	return f.Get(ctx, id)
}

func (f *fake) Stop(_ context.Context, id string, grace time.Duration) error {
	if grace != 10*time.Second {
		return fmt.Errorf("grace %s", grace)
	}
	defer f.set(id, func(r *record.Record) { r.Reason = record.Stopped })
	return f.change(id, record.Running, record.Ended)
}

func (f *fake) Pause(_ context.Context, id string) error {
	return f.change(id, record.Running, record.Paused)
}

func (f *fake) Hibernate(_ context.Context, id string) error {
	return f.change(id, record.Running, record.Hibernated)
}

func (f *fake) Resume(_ context.Context, id string) error {
	return f.change(id, record.Paused, record.Running)
}

func (f *fake) Renew(ctx context.Context, id string, t time.Time) (record.Record, error) {
	f.renews.Add(1)
	f.set(id, func(r *record.Record) { r.Expires = t })
	return f.Get(ctx, id)
}

func (f *fake) Update(_ context.Context, id string, change func(*record.Terms) error) (record.Record, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, ok := f.get(id)
	if !ok {
		return r, errs.New(errs.NotFound, "gone")
	}
	if f.fail != nil {
		return r, f.fail
	}
	if r.State != record.Running && r.State != record.Paused {
		return r, errs.New(errs.WrongState, "sandbox %s is %s, not running", id, r.State)
	}
	t := r.Spec.Terms()
	err := change(&t)
	if err == nil {
		err = r.Admits(t.Network) // as the Manager does
	}
	if err == nil {
		r.Spec.Limits, r.Spec.Network, r.Spec.NetworkPolicy = t.Limits, t.Network, t.NetworkPolicy
		f.recs[r.ID] = r
	}
	return r, err
}

func (f *fake) Promote(ctx context.Context, id string) (record.Record, error) {
	r, err := f.Get(ctx, id)
	if err != nil || r.Spec.Fork.ID == "" {
		return r, cmp.Or(err, error(errs.New(errs.WrongState, "sandbox %s is no copy", id)))
	}
	source, err := f.Get(ctx, r.Spec.Fork.Source)
	if err != nil {
		return r, err
	}
	f.set(id, func(r *record.Record) { r.Spec.Name, r.Expires = source.Spec.Name, source.Expires })
	f.set(source.ID, func(s *record.Record) { s.Spec.Name, s.Expires = r.Spec.Name, r.Expires })
	return f.Get(ctx, id)
}

func (f *fake) Relabel(ctx context.Context, id, name string, patch map[string]*string) (record.Record, error) {
	if r, err := f.Get(ctx, name); name != "" && err == nil && r.ID != id {
		return r, errs.New(errs.Exists, "the name %q belongs to sandbox %s", name, r.ID)
	}
	f.set(id, func(r *record.Record) {
		labels := map[string]string{}
		for k, v := range r.Spec.Labels {
			labels[k] = v
		}
		for k, v := range patch {
			if delete(labels, k); v != nil {
				labels[k] = *v
			}
		}
		r.Spec.Labels, r.Spec.Name = labels, cmp.Or(name, r.Spec.Name)
	})
	return f.Get(ctx, id)
}

func (f *fake) Steps(string) []Step {
	return []Step{{"rootfs", 1500 * time.Microsecond}, {"runtime", 20 * time.Millisecond}}
}

func (f *fake) Life(string) context.Context {
	if f.life == nil {
		return context.Background()
	}
	return f.life
}

func (f *fake) EventsSince(_ context.Context, cursor string, at time.Time) <-chan wire.Event {
	f.mu.Lock() // several streams may begin at once
	defer f.mu.Unlock()
	f.since, f.from = cursor, at
	return f.events
}

// forks are the real ones, of the sandboxes and snapshots of fake.
func (f *fake) forks(t testing.TB, log io.Writer) *fork.Forks {
	ctx, cancel := context.WithCancel(context.Background())
	forks := fork.New(ctx, fork.Config{
		Instance: 't', Sandboxes: f, Snapshots: fakeSnapshots{f}, Log: slog.New(slog.NewJSONHandler(log, nil)),
		Fits: func(_ context.Context, _ string, _ int64, count int) error {
			if count > 200 {
				return errs.New(errs.Exhausted, "no room for %d more sandboxes: 200 would fit", count)
			}
			return nil
		},
	})
	t.Cleanup(func() {
		cancel()
		forks.Close()
	})
	return forks
}

// fakeImages is the images of fake.
type fakeImages struct{ *fake }

func pythonImage() record.Image {
	return record.Image{
		Name: "python", Tag: "latest", Digest: "sha256:" + strings.Repeat("a", 64),
		Layers: []string{"sha256:" + strings.Repeat("b", 64)}, Bytes: 1 << 27, Created: time.Now(),
		Config: record.ImageConfig{Entrypoint: []string{"/entry"}, Cmd: []string{"serve"}},
	}
}

func (f fakeImages) Resolve(_ context.Context, ref image.Reference) (record.Image, error) {
	uri := ref.URI
	if uri != "python" && uri != "python:latest" && uri != "python:3.11-slim" && uri != "python:3.13" {
		return record.Image{}, errs.New(errs.NotFound, "image %q is not on this host; `sandboxctl image ls` lists what is", uri)
	}
	return pythonImage(), nil
}

func (f fakeImages) Note(ref image.Reference, i record.Image) string {
	if ref.Tag != "3.13" {
		return ""
	}
	return "image " + ref.URI + " is " + i.Ref() + " (python 3.11.2)"
}

func (f fakeImages) Aliases(record.Image) []string { return []string{"python:3*"} }

func (f fakeImages) List(context.Context) ([]record.Image, error) {
	return []record.Image{pythonImage()}, nil
}

// replaced refuses as a store in which another image has each name.
func (f fakeImages) replaced(name string, replace bool) error {
	if f.taken && !replace {
		return record.NotReplaced(record.Image{Name: name, Tag: "latest"}, "digest sha256:0")
	}
	return nil
}

func (f fakeImages) Build(_ context.Context, name string, replace bool, w io.Writer) (record.Image, error) {
	if err := f.replaced(name, replace); err != nil {
		return record.Image{}, err
	}
	if name != "python" {
		return record.Image{}, errs.New(errs.NotFound, "there is no recipe %q", name)
	}
	return f.build(w)
}

// tell says how far it is, and returns when that was sent.
func tell(ctx context.Context, progress func(image.Progress), p image.Progress) {
	progress(p)
	<-ctx.Value(flushes{}).(flushes).ch
}

// flushes tells ch of each flush of an answer. It is in the context of its request.
type flushes struct {
	http.ResponseWriter
	ch chan struct{}
}

func (f flushes) Unwrap() http.ResponseWriter { return f.ResponseWriter }

func (f flushes) FlushError() error {
	err := http.NewResponseController(f.ResponseWriter).Flush()
	select {
	case f.ch <- struct{}{}:
	default:
	}
	return err
}

// Import takes a body that says what is to happen.
func (f fakeImages) Import(ctx context.Context, a image.Archive, r io.Reader, progress func(image.Progress)) (record.Image, error) {
	if err := f.replaced(a.Ref.Name, a.Replace); err != nil {
		return record.Image{}, err
	}
	if a.Format == "zip" {
		return record.Image{}, errs.New(errs.Invalid, "image %q, format %q: want others", a.Ref.URI, a.Format)
	}
	var b [4]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return record.Image{}, err
	}
	switch p := (image.Progress{Stage: "receive", Bytes: 4}); string(b[:]) {
	case "slow":
		tell(ctx, progress, p)
		_, err := io.Copy(io.Discard, r)
		return pythonImage(), err
	case "late":
		tell(ctx, progress, p)
		return record.Image{}, errs.New(errs.Invalid, "layer 3 is bad")
	case "full":
		progress(p)
		return record.Image{}, errs.New(errs.Exhausted, "the disk is full")
	}
	_, err := io.Copy(io.Discard, r)
	return pythonImage(), err
}

// CanPull knows one registry; Pull also does what the name says.
func (f fakeImages) CanPull(ref image.Reference) bool {
	return strings.HasPrefix(ref.Name, "registry.example.com/")
}

func (f fakeImages) Pull(ctx context.Context, p image.Pull, progress func(image.Progress)) (record.Image, error) {
	if !f.CanPull(p.Ref) {
		return record.Image{}, errs.New(errs.NotFound, "no registry is configured for %q", p.Ref.URI)
	}
	if err := f.replaced(p.Ref.Name, p.Replace); err != nil {
		return record.Image{}, err
	}
	f.pulled = append(f.pulled, ctx)
	if !strings.HasSuffix(p.Ref.URI, "denied") {
		tell(ctx, progress, image.Progress{Stage: image.StageDownload, Bytes: 1, Total: 2})
	}
	if strings.HasSuffix(p.Ref.URI, "late") || strings.HasSuffix(p.Ref.URI, "denied") {
		return record.Image{}, errs.New(errs.Denied, "the registry refuses the password")
	}
	return pythonImage(), nil
}

func (f fakeImages) Export(_ context.Context, i record.Image, w io.Writer) error {
	if _, err := io.WriteString(w, "a tar of "+i.Ref()); err != nil || f.exportFails == nil {
		return err
	}
	w.(http.Flusher).Flush()
	return f.exportFails
}

func (f fakeImages) Prune(_ context.Context, all bool, _ time.Time) (image.Pruned, error) {
	p := image.Pruned{Layers: []string{"sha256:1"}, Bytes: 7}
	if all {
		p.Images = []string{"python:latest"}
	}
	return p, nil
}

func (f fakeImages) Remove(_ context.Context, ref image.Reference) (p image.Pruned, err error) {
	if ref.URI != "python:latest" {
		return p, errs.New(errs.NotFound, "image %q is not on this host", ref.URI)
	}
	return image.Pruned{Images: []string{ref.URI}, Layers: []string{"sha256:1"}, Bytes: 7}, nil
}

func (f fakeImages) Commit(_ context.Context, base record.Image, as image.Reference, _ bool, tar io.Reader) (record.Image, error) {
	b, err := io.ReadAll(tar)
	if err == nil && as.Name == "refused" {
		err = errs.New(errs.Exhausted, "refused with %s over %s", b, base.Ref())
	}
	base.Name, base.Tag = as.Name, as.Tag
	return base, err
}

func (f fakeImages) Tag(ctx context.Context, ref, as image.Reference, replace bool) (record.Image, error) {
	i, err := f.Resolve(ctx, ref)
	if err == nil && as.Name == "taken" && !replace {
		err = errs.New(errs.Denied, "taken is another image")
	}
	i.Name, i.Tag = as.Name, as.Tag
	return i, err
}

// fakeAgents reaches the handlers of fake.
type fakeAgents struct{ *fake }

func (f fakeAgents) Transport(r *record.Record) http.RoundTripper {
	if f.agentAt != nil {
		return &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", f.agentAt.Addr().String())
		}}
	}
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		req = req.Clone(req.Context())
		req.Header.Set(wire.HeaderAgentToken, r.Token)
		if req.Body == nil { // as a server gives it to a handler
			req.Body = http.NoBody
		}
		w := httptest.NewRecorder()
		f.agent.ServeHTTP(w, req)
		return w.Result(), nil
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (f fakeAgents) Dial(ctx context.Context, r record.Record, port uint16) (net.Conn, error) {
	var d net.Dialer
	if f.pipe != nil {
		return f.pipe(), nil
	}
	if f.apps != nil {
		return d.DialContext(ctx, "tcp", f.apps(r.ID, port).Addr().String())
	}
	if f.app == nil {
		return nil, &net.OpError{Op: "dial", Err: fmt.Errorf("connection refused at 10.163.0.4")}
	}
	return d.DialContext(ctx, "tcp", f.app.Addr().String())
}

type fakeStats struct{ *fake }

func (f fakeStats) OOMKills(string) (int64, error) { return f.ooms.Load(), nil }

func (fakeStats) Usage(_ context.Context, r *record.Record) (wire.Usage, error) {
	u := wire.Usage{MemoryBytes: 1 << 20, CPUMicros: 12345}
	if r.State == record.Running {
		u.Pids = new(int64(3))
	}
	return u, nil
}

// fakeFlows has the same for every sandbox.
type fakeFlows struct{}

func (fakeFlows) Flows(id string) wire.NetworkFlows {
	at := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	n := wire.Connections{Allowed: 3, Denied: 1, FirstSeen: at, LastSeen: at.Add(time.Minute)}
	return wire.NetworkFlows{Since: &at, Other: &n, Flows: []wire.Flow{
		{Destination: "pypi.org", Port: 443, Protocol: "tcp", Connections: n},
		{Destination: "203.0.113.9", Protocol: "icmp", Connections: n},
	}}
}

func (fakeFlows) Traffic(string) wire.NetworkStats {
	return wire.NetworkStats{Time: time.Now(), RxBytes: 4, TxBytes: 3, RxPackets: 2, TxPackets: 1, Allowed: 6, Denied: 5}
}

const testKey = "key-of-a-test"

// world is a server on a socket and the fake behind it.
type world struct {
	*fake
	t   testing.TB
	s   *Server
	url string
	log *syncBuffer
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func newWorld(t testing.TB, change ...func(*Config)) *world {
	t.Helper()
	f := &fake{
		recs: map[string]record.Record{}, snaps: map[string]record.Snapshot{}, used: map[string]int{},
		made: map[string]record.Made{}, keys: &fakeKeys{},
		volumes: &fakeVolumes{}, policies: &fakePolicies{}, vaults: &fakeVaults{all: map[string]*vault.Vault{}},
		events: make(chan wire.Event, 8),
	}
	f.agent = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Seen-Token", r.Header.Get(wire.HeaderAgentToken))
		w.Header().Set("Content-Length", "0")
	})
	w := &world{fake: f, t: t, log: &syncBuffer{}}
	cfg := Config{
		APIKeys: []string{testKey}, Keys: f.keys, Volumes: f.volumes, Policies: f.policies, Vaults: f.vaults, Secret: []byte("secret"),
		Log:     slog.New(slog.NewJSONHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Version: wire.Version{Version: "1", Go: "go1.26", Instance: instance.Instance('t').String(), Runtimes: []string{"runsc", "runc"}},
		OpenAPI: openapi.JSON,
		Docs:    openapi.Docs,
		Network: fakeNetwork{f},
		Offer: spec.Offer{
			ParseRule: policy.ParseRule, ParsePolicy: policy.FromJSON, NormalName: policy.NormalName,
			HostAddress: func(a netip.Addr) bool { return a == netip.MustParseAddr("192.0.2.99") && !f.moved.Load() },
		},
		Forks: f.forks(t, w.log), KeepsMemory: func(runtime string) bool { return runtime == "runsc" },
		Flows: fakeFlows{},
		Host:  func(r record.Record) map[string]string { return map[string]string{"link": "sb-" + r.ID} },
	}
	for _, c := range change {
		c(&cfg)
	}
	var err error
	if w.s, err = New(cfg, f, fakeSnapshots{f}, fakeDiffs{}, fakeImages{f}, fakeAgents{f}, fakeStats{f}); err != nil {
		t.Fatal(err)
	}
	w.url = w.serve("tcp", "127.0.0.1:0", auth.Listener{})
	t.Cleanup(w.s.Close)
	return w
}

// serve opens another listener on the same server.
func (w *world) serve(network, addr string, l auth.Listener) string {
	w.t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		w.t.Fatal(err)
	}
	return w.serveOn(ln, l)
}

func (w *world) serveOn(ln net.Listener, l auth.Listener) string {
	hs := w.s.HTTPServer(l)
	handler := hs.Handler
	hs.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		f := flushes{rw, make(chan struct{}, 1)}
		handler.ServeHTTP(f, r.WithContext(context.WithValue(r.Context(), flushes{}, f)))
	})
	go hs.Serve(ln) //nolint:errcheck // ends with Close
	w.t.Cleanup(func() { hs.Close() })
	return "http://" + ln.Addr().String()
}

// answer is a response read to its end.
type answer struct {
	*http.Response
	body []byte
}

func (a answer) error(t testing.TB) wire.Error {
	t.Helper()
	var e wire.Error
	if err := json.Unmarshal(a.body, &e); err != nil || e.Code == "" || e.Message == "" {
		t.Fatalf("status %d without an error body: %q", a.StatusCode, a.body)
	}
	return e
}

func (a answer) sandbox(t testing.TB) (sb wire.Sandbox) {
	t.Helper()
	if err := json.Unmarshal(a.body, &sb); err != nil {
		t.Fatalf("%v in %s", err, a.body)
	}
	return sb
}

// do sends a request with the API key (unless headers hold another) and
// validates what goes and comes against the documents.
func (w *world) do(method, path, body string, headers ...string) answer {
	w.t.Helper()
	var rd io.Reader
	if body != "" {
		rd = strings.NewReader(body)
	}
	req, err := http.NewRequest(method, w.url+path, rd)
	if err != nil {
		w.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set(wire.HeaderAPIKey, testKey)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
		if headers[i+1] == "" {
			req.Header.Del(headers[i])
		}
	}
	resp, err := noRedirect.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	if resp.Header.Get(wire.HeaderRequestID) == "" {
		w.t.Errorf("%s %s: no %s", method, path, wire.HeaderRequestID)
	}
	validate(w.t, req, body, resp, b)
	return answer{resp, b}
}

var noRedirect = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

const createBody = `{"image":{"uri":"python"},"entrypoint":["tail","-f","/dev/null"],"timeout":600,"env":{},` +
	`"resourceLimits":{"cpu":"1","memory":"2Gi"},"metadata":{"team":"t1"},"extensions":{},"secureAccess":false}`

// create makes a sandbox from createBody.
func (w *world) create() wire.Sandbox {
	w.t.Helper()
	a := w.do("POST", "/v1/sandboxes", createBody)
	if a.StatusCode != http.StatusAccepted {
		w.t.Fatalf("create: %d %s", a.StatusCode, a.body)
	}
	return a.sandbox(w.t)
}
