package target

import (
	"cmp"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/store"
)

// Whose says which backups and packs of a target a state has written, or adopted.
type Whose struct {
	Label string // of the instance and the host, for people (Label)
	store.BackupIdentity
}

// A Standing is what a backup is to a state.
type Standing string

// The standings. Only backups of the first two are counted, and removed.
const (
	Own     Standing = "own"     // the state has written it
	Adopted Standing = "adopted" // an operator has said that it counts
	// Unknown has the name of this instance and host, but another state has written it: the one before
	// the host was installed again, or that of another host with this name.
	Unknown Standing = "unknown"
	Other   Standing = "other" // of another host or instance
)

// Of says what a backup is to the state.
func (w Whose) Of(b Backup) Standing {
	switch {
	case w.ID != "" && b.ID == w.ID:
		return Own
	case slices.Contains(w.Adopted, b.Name):
		return Adopted
	case b.Label == w.Label:
		return Unknown
	}
	return Other
}

// Mine reports whether a backup counts.
func (w Whose) Mine(b Backup) bool {
	s := w.Of(b)
	return s == Own || s == Adopted
}

// Owner is the owner of what the state writes.
func (w Whose) Owner() string { return Owner(w.Label, w.ID) }

// UsesPacks reports whether new backups of the state may use packs of an owner: only of its own ID, though it may
// own others. Those of a common past are also the packs of a copy of this state, which does not look at what this
// one needs. Those without an ID are of a release that counts only the backups that have none: started again after a
// rollback, it would remove what it takes for packs that nobody needs.
func (w Whose) UsesPacks(owner string) bool {
	_, id := split(owner)
	return id != "" && id == w.ID
}

// OwnsPacks reports whether packs of an owner are the state's to remove. The host may have had another
// name when it wrote them.
func (w Whose) OwnsPacks(owner string) bool {
	_, id := split(owner)
	return w.ID != "" && id == w.ID || slices.Contains(w.Packs, owner)
}

// Select returns those of all that count, from the oldest to the newest: adopted ones are from before.
func (w Whose) Select(all []Backup) []Backup {
	mine := slices.DeleteFunc(slices.Clone(all), func(b Backup) bool { return !w.Mine(b) })
	slices.SortStableFunc(mine, func(a, b Backup) int {
		if a, b := w.Of(a), w.Of(b); a != b {
			return cmp.Compare(a, b) // "own" comes after "adopted"
		}
		return cmp.Or(a.Number-b.Number, cmp.Compare(a.Name, b.Name))
	})
	return mine
}

// Next is the number of the next backup. It is more than that of any backup of this host's name:
// people compare them.
func (w Whose) Next(all []Backup) int {
	n := 0
	for _, b := range all {
		if w.Mine(b) || b.Label == w.Label {
			n = max(n, b.Number)
		}
	}
	return n + 1
}

// idChars is how many characters the ID of a state has.
const idChars = 16

// split cuts an owner into the label and the ID, which is empty in names of earlier releases.
func split(owner string) (label, id string) {
	at := len(owner) - idChars
	if at < 2 || owner[at-1] != '-' || strings.ContainsFunc(owner[at:], notID) {
		return owner, ""
	}
	return owner[:at-1], owner[at:]
}

func notID(r rune) bool { return (r < 'a' || r > 'z') && (r < '2' || r > '7') }
