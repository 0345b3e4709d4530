package secrets

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

const (
	box   = "daaaaaaaaaaa"
	value = "sEcr3T-token-of-the-test"
)

// killed is the environment of the process that TestKilled has killed: the directory of its state.
const killed = "SECRETS_TEST_KILLED"

func TestMain(m *testing.M) {
	if dir := os.Getenv(killed); dir != "" {
		patchAndDie(dir)
		return
	}
	os.Exit(m.Run())
}

// A world is a Keeper on a store and a key of its own.
type world struct {
	*Keeper
	t     *testing.T
	dir   string
	db    *store.DB
	box   *record.Record
	log   bytes.Buffer
	clock struct {
		sync.Mutex
		fixed time.Time // the host's when the test began: it moves by later alone
		ahead time.Duration
	}
	// apply is what Config.Apply does; nil: nothing.
	apply func(ctx context.Context, id string) error
}

func openStore(t *testing.T, dir string) *store.DB {
	t.Helper()
	db, err := store.Open(filepath.Join(dir, "sandboxd.db"), store.Options{Reserve: -1, Slots: 16, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() }) //nolint:errcheck // some tests close it
	return db
}

func openKey(t *testing.T, dir string) *sealed.Key {
	t.Helper()
	if err := os.Chmod(dir, 0o700); err != nil { // whatever the umask
		t.Fatal(err)
	}
	key, err := sealed.Open("", filepath.Join(dir, "secrets.key"), true)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir()}
	w.clock.fixed = time.Now()
	w.db = openStore(t, w.dir)
	w.box = w.insert(box, true)
	w.open(func(*Config) {})
	return w
}

// insert adds a sandbox that may reach api.example.com.
func (w *world) insert(id string, inspect bool) *record.Record {
	w.t.Helper()
	r := &record.Record{ID: id, State: record.Creating, Spec: record.Spec{
		Inspect: inspect, Network: network(w.t, record.NetworkRules, "api.example.com:443"),
	}}
	if err := w.db.Insert(w.t.Context(), r); err != nil {
		w.t.Fatal(err)
	}
	return r
}

func network(t *testing.T, mode record.NetworkMode, rules ...string) record.Network {
	t.Helper()
	n := record.Network{Mode: mode}
	for _, s := range rules {
		spec, deny := strings.CutPrefix(s, "!")
		r, err := policy.ParseRule(spec)
		if err != nil {
			t.Fatal(err)
		}
		r.Allow = !deny
		n.Rules = append(n.Rules, r)
	}
	return n
}

// open makes the Keeper anew, as a daemon that starts does.
func (w *world) open(edit func(*Config)) {
	w.t.Helper()
	c := Config{
		Store: w.db, Key: openKey(w.t, w.dir), Logger: slog.New(slog.NewTextHandler(&w.log, nil)),
		Apply: func(ctx context.Context, id string) error {
			if w.apply == nil {
				return nil
			}
			return w.apply(ctx, id)
		},
		Now: func() time.Time {
			w.clock.Lock()
			defer w.clock.Unlock()
			return w.clock.fixed.Add(w.clock.ahead)
		},
	}
	edit(&c)
	w.Keeper = New(c)
	w.limit, w.grace = time.Minute, time.Minute // the host may be busy
}

// later moves the clock of the Keeper.
func (w *world) later(d time.Duration) {
	w.clock.Lock()
	defer w.clock.Unlock()
	w.clock.ahead += d
}

// restart closes and opens the state.
func (w *world) restart() {
	w.t.Helper()
	if err := w.db.Close(); err != nil {
		w.t.Fatal(err)
	}
	w.db = openStore(w.t, w.dir)
	w.open(func(*Config) {})
}

func (w *world) create(body string) vault.State {
	w.t.Helper()
	s, err := w.Create(w.t.Context(), w.box, []byte(body))
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// wants fails unless err has that code and text, and shows no value.
func wants(t *testing.T, what string, err error, code errs.Code, text string) {
	t.Helper()
	if !errs.Is(err, code) || !strings.Contains(fmt.Sprint(err), text) || strings.Contains(fmt.Sprint(err), value) {
		t.Errorf("%s: %v (%s); want %s, %q", what, err, errs.CodeOf(err), code, text)
	}
}

// body is a vault with one credential, which is bound to a host.
func body(host string) string {
	return `{"credentials":[{"name":"token","source":{"type":"inline","value":"` + value + `"}}],"bindings":[` + binding("b", host) + `]}`
}

func binding(name, host string) string {
	return `{"name":"` + name + `","match":{"hosts":["` + host + `"]},"auth":{"type":"bearer","credential":"token"}}`
}

// TestVault takes a vault through its life, as OpenSandbox's client sees it.
func TestVault(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	const shown = `"match":{"schemes":["https"],"hosts":["api.example.com"],"methods":["GET","POST","PUT","PATCH","DELETE"],"paths":["/*"]},` +
		`"auth":{"type":"bearer"}}`
	is := func(what string, got any, err error, want string) {
		t.Helper()
		text, _ := json.Marshal(got)
		if err != nil || string(text) != want {
			t.Errorf("%s is %s, %v; want %s", what, text, err, want)
		}
	}
	absent := func() {
		t.Helper()
		_, err := w.Get(ctx, w.box)
		wants(t, "get", err, errs.NotFound, "has no credential vault")
		_, err = w.Patch(ctx, w.box, []byte(`{}`))
		wants(t, "patch", err, errs.NotFound, "has no credential vault")
		wants(t, "delete", w.Delete(ctx, w.box), errs.NotFound, "has no credential vault")
	}
	absent()
	first := w.create(body("api.example.com"))
	is("the vault", first, nil, `{"revision":1,"credentials":[{"name":"token","sourceType":"inline","revision":1}],`+
		`"bindings":[{"name":"b","revision":1,`+shown+`]}`)
	_, err := w.Create(ctx, w.box, []byte(body("api.example.com")))
	wants(t, "create again", err, errs.Exists, "has a credential vault already")

	placeholder := first.Credentials[0].Placeholder
	if !strings.HasPrefix(placeholder, vault.PlaceholderPrefix) {
		t.Errorf("placeholder %q", placeholder)
	}
	patch := `{"expectedRevision":1,"credentials":{"add":[{"name":"other","source":{"value":"x"}}]}}`
	second, err := w.Patch(ctx, w.box, []byte(patch))
	if err != nil || second.Revision != 2 {
		t.Fatalf("%+v, %v", second, err)
	}
	_, err = w.Patch(ctx, w.box, []byte(patch))
	wants(t, "a patch of an old revision", err, errs.WrongState, "its revision is 2, not 1")

	for range 2 {
		got, err := w.Get(ctx, w.box)
		is("the vault", got, err, string(must(json.Marshal(second))))
		if p := got.Credentials; len(p) != 2 || p[1].Placeholder != placeholder || p[0].Placeholder == placeholder {
			t.Errorf("placeholders %v", p)
		}
		w.restart()
	}
	if err := w.Delete(ctx, w.box); err != nil {
		t.Fatal(err)
	}
	absent()
	if again := w.create(`{}`); again.Revision != 1 {
		t.Errorf("%+v", again)
	}
	if strings.Contains(w.log.String(), value) {
		t.Errorf("the log: %s", &w.log)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestRefused: what is refused changes nothing, and says why.
func TestRefused(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.apply = func(context.Context, string) error {
		t.Error("applied")
		return nil
	}
	off := w.insert("dbbbbbbbbbbb", false)
	_, err := w.Create(ctx, off, []byte(body("api.example.com")))
	wants(t, "without inspection", err, errs.WrongState, "credentialProxy.enabled = true")
	if !errors.Is(err, ErrOff) {
		t.Errorf("%v is not ErrOff", err)
	}
	if _, err = w.Patch(ctx, off, []byte(`{}`)); !errors.Is(err, ErrOff) {
		t.Errorf("%v is not ErrOff", err)
	}
	if _, err = w.Authority(ctx, off, true); !errors.Is(err, ErrOff) {
		t.Errorf("%v is not ErrOff", err)
	}
	if i, err := w.Inspection(ctx, off); i != nil || err != nil {
		t.Errorf("%v, %v", i, err)
	}
	if err := w.CheckPolicy(off, record.Network{Mode: record.NetworkNone}); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct {
		body string
		code errs.Code
		text string
	}{
		"another host":  {body("other.example.com"), errs.Invalid, `does not allow other.example.com:443 of binding "b"; allow it first`},
		"a wildcard":    {body("*.example.com"), errs.Invalid, `does not allow *.example.com:443`},
		"no vault":      {`{"credentials":1}`, errs.Invalid, "want an array"},
		"a file":        {`{"credentials":[{"name":"f","source":{"type":"file","path":"/etc/hostname"}}]}`, errs.Invalid, "only the administrator"},
		"a variable":    {`{"credentials":[{"name":"f","env":"A B","source":{"value":"x"}}]}`, errs.Invalid, "no name of a variable"},
		"another field": {`{"values":[]}`, errs.Invalid, `unknown field "values"`},
	} {
		_, err := w.Create(ctx, w.box, []byte(c.body))
		wants(t, name, err, c.code, c.text)
	}
	gone := *w.box
	gone.ID = "dnnnnnnnnnnn"
	_, err = w.Create(ctx, &gone, []byte(body("api.example.com")))
	wants(t, "no sandbox", err, errs.NotFound, "no sandbox dnnnnnnnnnnn")
	canceled, cancel := context.WithCancel(ctx)
	unlock, err := w.lock(ctx, box, record.Vault)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := w.Create(canceled, w.box, []byte(`{}`)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	unlock()
	if all, bad, err := w.db.Secrets(ctx); len(all)+len(bad) != 0 || err != nil {
		t.Errorf("%v %v %v", all, bad, err)
	}
}

// TestPolicy: a vault and a policy that do not fit are refused, whichever comes last.
func TestPolicy(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.open(func(c *Config) { c.Host.Deny = network(t, record.NetworkRules, "blocked.example.com").Rules })
	w.create(body("api.example.com"))
	for name, c := range map[string]struct {
		n    record.Network
		want string
	}{
		"the same":     {w.box.Spec.Network, ""},
		"open":         {network(t, record.NetworkOpen), ""},
		"open but it":  {network(t, record.NetworkOpen, "!*.example.com"), "does not allow api.example.com:443"},
		"another port": {network(t, record.NetworkRules, "api.example.com:80"), "does not allow api.example.com:443"},
		"none":         {network(t, record.NetworkNone), `of binding "b"; allow it, or change the credential vault first`},
		"no policy":    {record.Network{Mode: "x"}, "want none, rules or open"},
	} {
		err := w.CheckPolicy(w.box, c.n)
		if c.want == "" && err != nil {
			t.Errorf("%s: %v", name, err)
		} else if c.want != "" {
			wants(t, name, err, errs.Invalid, c.want)
		}
	}
	w.box.Spec.Network = network(t, record.NetworkOpen)
	_, err := w.Patch(ctx, w.box, []byte(`{"bindings":{"add":[`+binding("x", "blocked.example.com")+`]}}`))
	wants(t, "a host that the operator blocks", err, errs.Invalid, "does not allow blocked.example.com:443")
	var many []string
	for i := range 6 {
		many = append(many, binding(fmt.Sprint(i), fmt.Sprintf("h%d.example.org", i)))
	}
	w.box.Spec.Network = network(t, record.NetworkRules, "api.example.com")
	_, err = w.Patch(ctx, w.box, []byte(`{"bindings":{"add":[`+strings.Join(many, ",")+`]}}`))
	wants(t, "many hosts", err, errs.Invalid, `h2.example.org:443 of binding "2", 3 more; allow`)
	if err := w.Delete(ctx, w.box); err != nil {
		t.Fatal(err)
	}
	if err := w.CheckPolicy(w.box, network(t, record.NetworkNone)); err != nil {
		t.Error(err)
	}
}

// TestDeniedLater: a host that the operator blocks when it is bound already blocks no change that
// has nothing to do with it.
func TestDeniedLater(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.box.Spec.Network = network(t, record.NetworkRules, "*.example.com")
	w.create(`{"credentials":[{"name":"token","source":{"value":"` + value + `"}}],"bindings":[` + binding("b", "api.example.com") + `,` +
		binding("c", "late.example.com") + `]}`)
	w.open(func(c *Config) { c.Host.Deny = network(t, record.NetworkRules, "late.example.com").Rules })
	patch := func(body string) error {
		_, err := w.Patch(ctx, w.box, []byte(body))
		return err
	}
	for name, c := range map[string]struct {
		n    record.Network
		want string
	}{
		"the same":            {w.box.Spec.Network, ""},
		"less":                {network(t, record.NetworkRules, "api.example.com"), ""},
		"more":                {network(t, record.NetworkRules, "*.example.com", "example.net"), ""},
		"without the other":   {network(t, record.NetworkRules, "late.example.com"), `allow api.example.com:443 of binding "b"; allow it`},
		"one that is invalid": {record.Network{Mode: "x"}, "want none, rules or open"},
	} {
		if err := w.CheckPolicy(w.box, c.n); c.want != "" {
			wants(t, name, err, errs.Invalid, c.want)
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	bad := *w.box
	bad.Spec.Network = record.Network{Mode: "x"}
	err := w.CheckPolicy(&bad, w.box.Spec.Network)
	wants(t, "a policy in place of one that is invalid", err, errs.Invalid, "does not allow late.example.com:443")
	if err := patch(`{"credentials":{"replace":[{"name":"token","source":{"value":"rotated"}}]}}`); err != nil {
		t.Errorf("a rotation: %v", err)
	}
	tighter := strings.Replace(binding("b", "api.example.com"), `"match":{`, `"match":{"paths":["/v1/*"],`, 1)
	if err := patch(`{"bindings":{"replace":[` + tighter + `]}}`); err != nil {
		t.Errorf("a tighter binding: %v", err)
	}
	for what, body := range map[string]string{
		"replaced": `{"bindings":{"replace":[` + binding("c", "late.example.com") + `]}}`,
		"added":    `{"bindings":{"add":[` + strings.Replace(binding("d", "late.example.com"), `"match":{`, `"match":{"methods":["HEAD"],`, 1) + `]}}`,
	} {
		wants(t, what, patch(body), errs.Invalid, "does not allow late.example.com:443 of binding")
	}
	if err := patch(`{"bindings":{"delete":["c"]}}`); err != nil {
		t.Errorf("unbound: %v", err)
	}
	if got, err := w.Get(ctx, w.box); err != nil || got.Revision != 4 || len(got.Bindings) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}

// revision is that of the vault that a registration would get now; 0: none.
func (w *world) revision() int64 {
	w.t.Helper()
	i, err := w.Inspection(context.Background(), w.box)
	if err != nil {
		w.t.Error(err)
		return -1
	}
	if i.Vault == nil {
		return 0
	}
	v, err := vault.Decode(i.Vault)
	if err != nil {
		w.t.Error(err)
		return -1
	}
	return v.Revision()
}

// TestApply: a change is durable when it is applied. If that fails it stays, and is tried again.
func TestApply(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	client, hangUp := context.WithCancel(ctx)
	var applied []int64
	fault := error(nil)
	w.apply = func(ctx context.Context, id string) error {
		hangUp()
		if id != box || ctx.Err() != nil {
			t.Errorf("apply %s, %v", id, ctx.Err())
		}
		applied = append(applied, w.revision())
		return fault
	}
	if _, err := w.Create(client, w.box, []byte(body("api.example.com"))); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Patch(ctx, w.box, []byte(`{}`)); err != nil {
		t.Fatal(err)
	}
	fault = errors.New("iptables is away")
	_, err := w.Patch(ctx, w.box, []byte(`{"expectedRevision":2}`))
	wants(t, "a patch that is not applied", err, errs.Internal, "is kept, as revision 3, but the sandbox still uses what was before")
	if e, ok := errors.AsType[*errs.Error](err); !ok || strings.Contains(e.Text, "iptables") {
		t.Errorf("the client reads %v", err)
	}
	if got, err := w.Get(ctx, w.box); err != nil || got.Revision != 3 {
		t.Errorf("%+v, %v", got, err)
	}
	if err := w.Reapply(ctx); err == nil || !strings.Contains(err.Error(), "iptables is away") {
		t.Error(err)
	}
	fault = nil
	for range 2 { // the second time there is nothing to do
		if err := w.Reapply(ctx); err != nil {
			t.Error(err)
		}
	}
	fault = errors.New("iptables is away")
	wants(t, "a delete that is not applied", w.Delete(ctx, w.box), errs.Internal, "is deleted, but the sandbox still uses")
	fault = nil
	if err := w.Delete(ctx, w.box); err != nil {
		t.Errorf("the delete, repeated: %v", err)
	}
	wants(t, "the delete, once more", w.Delete(ctx, w.box), errs.NotFound, "has no credential vault")
	if want := []int64{1, 2, 3, 3, 3, 0, 0}; !slices.Equal(applied, want) {
		t.Errorf("applied %v; want %v", applied, want)
	}
	// A sandbox that goes away is not tried for ever.
	fault = errs.New(errs.NotFound, "no sandbox")
	if _, err := w.Create(ctx, w.box, []byte(`{}`)); !errs.Is(err, errs.NotFound) {
		t.Error(err)
	}
	if err := w.Reapply(ctx); err != nil {
		t.Error(err)
	}
	if _, pending := w.isPending(box); pending {
		t.Error("it is tried again")
	}
}

// TestReapply: the sweep waits for no change and no operation, and says once what does not work.
func TestReapply(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.create(body("api.example.com"))
	other := w.insert("dbbbbbbbbbbb", true)
	fault, tried, busy := errors.New("iptables is away"), 0, false
	w.apply = func(context.Context, string) error { return fault }
	w.open(func(c *Config) {
		apply := c.Apply
		c.Try = func(ctx context.Context, id string) (bool, error) {
			if tried++; busy {
				return false, nil
			}
			return true, apply(ctx, id)
		}
	})
	sweep := func(what string, tries int, want string) {
		t.Helper()
		before := tried
		err := w.Reapply(ctx)
		if tried-before != tries || (err == nil) != (want == "") || !strings.Contains(fmt.Sprint(err), cmp.Or(want, "<nil>")) {
			t.Errorf("%s: %v after %d tries; want %q after %d", what, err, tried-before, want, tries)
		}
	}
	sweep("nothing has failed", 0, "")
	fail := func(r *record.Record, patch func() error) {
		t.Helper()
		if err := patch(); err == nil || !strings.Contains(err.Error(), "tries again") {
			t.Errorf("%s: %v", r.ID, err)
		}
	}
	patch := func() error { _, err := w.Patch(ctx, w.box, []byte(`{}`)); return err }
	fail(w.box, patch)
	sweep("the first time", 1, "sandbox "+box+" again: iptables is away")
	sweep("the same", 1, "")
	fault = errors.New("nft is away")
	sweep("another error", 1, "nft is away")
	sweep("the same", 1, "")
	fail(w.box, patch)
	sweep("a change since then", 1, "nft is away")
	fail(other, func() error { _, err := w.Create(ctx, other, []byte(`{}`)); return err })
	sweep("another sandbox", 2, "sandbox "+other.ID+" again: nft is away")
	if err := w.Delete(ctx, other); err == nil { // it stays pending
		t.Error("deleted")
	}
	sweep("both", 2, "sandbox "+other.ID)

	// A change of a sandbox that is busy holds the lock of the vault as long as Apply waits.
	began, end, answer := make(chan struct{}), make(chan error), make(chan error)
	w.apply = func(context.Context, string) error { close(began); return <-end }
	go func() { answer <- patch() }()
	<-began
	w.apply = func(_ context.Context, id string) error {
		if id == box {
			t.Error("it was applied beside the change")
		}
		return nil
	}
	sweep("while a change waits", 1, "")
	end <- fault
	if err := <-answer; err == nil {
		t.Error("the change was applied")
	}
	busy = true
	sweep("a busy sandbox", 1, "")
	busy, w.apply = false, nil
	sweep("at last", 1, "")
	sweep("nothing is left", 0, "")
	w.apply = func(context.Context, string) error {
		if _, pending := w.isPending(box); pending {
			t.Error("a change counts as failed while it is applied")
		}
		return nil
	}
	if err := patch(); err != nil {
		t.Error(err)
	}
}

// TestMany: changes of one sandbox at once come one after the other, and each is applied in turn.
func TestMany(t *testing.T) {
	const clients, each = 5, 3
	w, ctx := newWorld(t), t.Context()
	var applied, answered []int64
	w.apply = func(context.Context, string) error {
		applied = append(applied, w.revision()) // the race detector sees calls at once
		return nil
	}
	w.create(`{}`)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := range each {
				s, err := w.Patch(ctx, w.box, fmt.Appendf(nil, `{"credentials":{"add":[{"name":"%d-%d","source":{"value":"x"}}]}}`, c, i))
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				answered = append(answered, s.Revision)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	slices.Sort(answered)
	for i, r := range answered {
		if r != int64(i)+2 {
			t.Fatalf("revisions %v have a gap", answered)
		}
	}
	if !slices.IsSorted(applied) || len(applied) != clients*each+1 || applied[len(applied)-1] != clients*each+1 {
		t.Errorf("applied %v", applied)
	}
	if got, err := w.Get(ctx, w.box); err != nil || len(got.Credentials) != clients*each {
		t.Errorf("%d credentials, %v", len(got.Credentials), err)
	}
}

// TestKilled: a daemon that is killed when a change is durable and not applied leaves it to the
// next one.
func TestKilled(t *testing.T) {
	w := newWorld(t)
	w.create(body("api.example.com"))
	if err := w.db.Close(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), killed+"="+w.dir, failpoint.Env+"="+Kept+"=kill")
	out, err := cmd.CombinedOutput()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("%v: %s", err, out)
	}
	w.db = openStore(t, w.dir)
	w.open(func(*Config) {})
	if r := w.revision(); r != 2 {
		t.Errorf("the next daemon registers revision %d", r)
	}
}

// patchAndDie is the process of TestKilled.
func patchAndDie(dir string) {
	ctx := context.Background()
	db := must(store.Open(filepath.Join(dir, "sandboxd.db"), store.Options{Reserve: -1, Slots: 16}))
	key := must(sealed.Open("", filepath.Join(dir, "secrets.key"), false))
	k := New(Config{Store: db, Key: key, Apply: func(context.Context, string) error { panic("applied") }})
	r, _, err := db.Get(ctx, box)
	if err != nil {
		panic(err)
	}
	must(k.Patch(ctx, &r, []byte(`{"expectedRevision":1}`)))
}

// TestSealed: neither the state file nor the log has a value, or the key of an authority.
func TestSealed(t *testing.T) {
	w := newWorld(t)
	w.create(body("api.example.com"))
	a, err := w.Authority(t.Context(), w.box, true)
	if err != nil {
		t.Fatal(err)
	}
	private := must(a.Encode())
	if err := w.db.Close(); err != nil {
		t.Fatal(err)
	}
	file := must(os.ReadFile(filepath.Join(w.dir, "sandboxd.db")))
	if !bytes.Contains(file, []byte(box+"/vault")) {
		t.Fatal("the state file has no vault")
	}
	for what, text := range map[string][]byte{
		"the value": []byte(value), "the key": private[len(private)-100:],
		"a block of PEM": []byte("PRIVATE KEY"),
	} {
		for shift := range 3 { // JSON keeps what is sealed as base64
			encoded := base64.StdEncoding.EncodeToString(slices.Concat(make([]byte, shift), text))
			if bytes.Contains(file, text) || bytes.Contains(file, []byte(encoded[4:len(encoded)-4])) {
				t.Errorf("the state file has %s", what)
			}
		}
	}
	if strings.Contains(w.log.String(), value) {
		t.Errorf("the log: %s", &w.log)
	}
}

// A rotating store seals the vault anew, as a rotation of the key does, before a change is written.
type rotating struct {
	*store.DB
	w     *world
	times int
}

func (s *rotating) PutSecret(ctx context.Context, v, was record.Secret) error {
	if s.times--; s.times >= 0 {
		now, _, err := s.DB.Secret(ctx, v.Sandbox, v.Kind)
		if err != nil {
			return err
		}
		text, err := s.w.c.Key.Unseal(now.Name(), now.Sealed)
		if err != nil {
			return err
		}
		anew := now
		anew.Sealed = s.w.c.Key.Seal(now.Name(), text)
		if err := s.DB.PutSecret(ctx, anew, now); err != nil {
			return err
		}
	}
	return s.DB.PutSecret(ctx, v, was)
}

// TestRotation: a change that meets a rotation of the key is tried again, and not for ever.
func TestRotation(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.create(`{}`)
	w.open(func(c *Config) { c.Store = &rotating{w.db, w, 1} })
	if s, err := w.Patch(ctx, w.box, []byte(`{}`)); err != nil || s.Revision != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	w.open(func(c *Config) { c.Store = &rotating{w.db, w, 100} })
	_, err := w.Patch(ctx, w.box, []byte(`{}`))
	wants(t, "a store that always rotates", err, errs.WrongState, "was changed meanwhile")
}
