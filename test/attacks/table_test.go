// Package attacks_test attacks the product: from inside sandboxes of both runtimes, and
// from outside through the API.
//
// Each attack is one row of a table. TestAttacks runs them all against the daemon as it is
// built for users: each must be held. TestProofs runs them again with their walls taken
// down (internal/weak, make weak): there each must succeed. An attack without such a proof
// says why it has none.
//
// docs/design/hardening.md says what is covered, CONTRIBUTING.md how to add an attack.
package attacks_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// An attack is one row. It has either run or ask.
type attack struct {
	name string // unique
	wall string // what holds it

	// run are the arguments of the program guest, in a sandbox. These words are replaced:
	// MARKER (a file of the host), BOOTID and PID (of the host), GATEWAY (the address of the
	// host that guests see), LISTENER (a port that the host listens on), DATAGRAMS (one of
	// UDP), NEIGHBOUR (the address of another sandbox, which listens on 7000), PUBLISHED (the
	// port of the host that leads there), DNS, SHARED, OTHER and PRIVATE (addresses of
	// test/internet), UPLINK (an address of the host).
	run []string
	// named runs it in a sandbox whose policy names hosts (byName).
	named bool
	// vault runs it in a sandbox that has a credential, with its own words (vaulted). If a value
	// comes where it may not, the word is "leaked".
	vault bool
	// uid is who runs it inside.
	uid int64
	// own changes the sandbox. An attack with one has a sandbox for itself, and afterwards
	// the daemon, a neighbour and the host must be unharmed. Other attacks share sandboxes.
	own func(r *wire.CreateRequest)
	// says must be among what the agent and the record say about the end of the attack.
	says string

	// ask attacks by the API, and returns a word.
	ask func(t *testing.T, w *target) string

	held words // what it gets if it is held
	got  words // what it gets without its walls; "ok" if empty

	// One proof for each place where it runs; an attack that has ask runs on the daemon.
	runc, runsc, daemon *proof

	needs func(testing.TB) bool // reports whether this host has what is attacked; nil: each has
	all   bool                  // it takes long: make test-all and make test-attacks run it, make test does not
}

// A proof says how an attack is shown to succeed.
type proof struct {
	off      []weak.Wall // with these walls down
	unproven string      // or why it is not shown
}

func without(walls ...weak.Wall) *proof { return &proof{off: walls} }

func unproven(reason string) *proof { return &proof{unproven: reason} }

type words []string

func (w words) has(word string) bool { return slices.Contains(w, word) }

// refused is what the kernel, its filter and the sentry answer to what nobody may do. The
// sentry knows many calls by name only.
var refused = words{"EPERM", "EACCES", "ENOSYS", "EROFS", "ENOENT", "ENODEV", "ENOTSUP", "EOPNOTSUPP"}

// and adds words.
func (w words) and(more ...string) words { return append(slices.Clone(w), more...) }

// all is the table.
func all() []attack {
	return slices.Concat(kernelAttacks, escapes, agentAttacks, networkAttacks, nameAttacks, floods, apiAttacks, doorAttacks, archiveAttacks,
		registryAttacks, vaultAttacks, vaultDoors)
}

// places are where an attack runs, with its proof there.
func (a attack) places() map[string]*proof {
	places := map[string]*proof{}
	for name, p := range map[string]*proof{"runc": a.runc, "runsc": a.runsc, "api": a.daemon} {
		if p != nil {
			places[name] = p
		}
	}
	return places
}

// result is the word of success.
func (a attack) result() words {
	if len(a.got) == 0 {
		return words{"ok"}
	}
	return a.got
}

// TestTable: an attack that could not fail, or that nobody knows to succeed, is none.
func TestTable(t *testing.T) {
	seen := map[string]bool{}
	proven, total := 0, 0
	for _, a := range all() {
		if seen[a.name] || a.name == "" || a.wall == "" {
			t.Errorf("attack %q: a second one of that name, or no name or wall", a.name)
		}
		seen[a.name] = true
		if (a.ask == nil) == (a.run == nil) || (a.ask == nil) == (a.daemon != nil) || a.ask != nil && (a.runc != nil || a.runsc != nil) {
			t.Errorf("attack %q: want run for runtimes, or ask for the daemon", a.name)
		}
		if len(a.places()) == 0 || len(a.held) == 0 {
			t.Errorf("attack %q: it runs nowhere, or nothing holds it", a.name)
		}
		shown := false
		for place, p := range a.places() {
			if (len(p.off) == 0) == (p.unproven == "") {
				t.Errorf("attack %q on %s: want walls to take down, or why it is not proven", a.name, place)
			}
			shown = shown || len(p.off) > 0
		}
		if shown {
			proven++
			for _, w := range a.result() {
				if a.held.has(w) {
					t.Errorf("attack %q: %s is held, and success", a.name, w)
				}
			}
		}
		total++
	}
	if total < 80 {
		t.Errorf("%d attacks; want at least 80", total)
	}
	t.Logf("%d attacks, %d of them proven", total, proven)
}

// TestNamed: the attacks that the threat model names are in the table, and it names all.
func TestNamed(t *testing.T) {
	b, err := os.ReadFile("../../docs/design/threat-model.md")
	must(t, err)
	known := map[string]bool{}
	named := regexp.MustCompile("`attack ([^`]+)`").FindAllStringSubmatch(string(b), -1)
	for _, m := range named {
		name, many := strings.CutSuffix(m[1], "*")
		found := false
		for _, a := range all() {
			if a.name == name || many && strings.HasPrefix(a.name, name) {
				known[a.name], found = true, true
			}
		}
		if !found && name != "NAME" {
			t.Errorf("the threat model names %q: there is no such attack", m[1])
		}
	}
	for _, a := range all() {
		if !known[a.name] {
			t.Errorf("the threat model does not name %q in the row of what it tries", a.name)
		}
	}
}
