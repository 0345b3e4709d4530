package target

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A Backup is one that a target has. Its name is
//
//	sandboxd-<instance>-<host>-<id>-<number>-<time>.tar.gz[.age]
//
// The id is that of the state that wrote it (store.BackupIdentity); earlier releases wrote none. The
// numbers of a state count up. They, and not the times, say which backup is newer: a clock may have
// been wrong.
type Backup struct {
	Name      string
	Owner     string // <instance>-<host>-<id>
	Label     string // <instance>-<host>: for people, and no identity
	ID        string // empty: an earlier release wrote it
	Number    int
	Taken     time.Time // by the clock of that host, in seconds
	Encrypted bool
	Bytes     int64
	// Whole is whether it was read back and compared after it was stored.
	Whole bool
}

const (
	nameTime  = "20060102T150405Z"
	sealedEnd = ".age"
)

var (
	nameForm = regexp.MustCompile(`^sandboxd-([a-z]-[a-z0-9.-]+)-(\d{6,9})-(\d{8}T\d{6}Z)\.tar\.gz(\.age)?$`)
	packForm = regexp.MustCompile(`^sandboxd-([a-z]-[a-z0-9.-]+)-pack-([0-9a-f]{64})(\.age)?$`)
	notHost  = regexp.MustCompile(`[^a-z0-9.]+`)
)

// Label returns what the backups of an instance of a host are called.
func Label(instance, host string) string {
	host = strings.Trim(notHost.ReplaceAllString(strings.ToLower(host), "-"), "-.")
	return instance + "-" + cmp.Or(host, "localhost")
}

// Owner returns the owner of what a state writes. Without an ID it is that of earlier releases.
func Owner(label, id string) string {
	if id == "" {
		return label
	}
	return label + "-" + id
}

// Name returns the name of a backup.
func Name(owner string, number int, taken time.Time, encrypted bool) string {
	name := fmt.Sprintf("sandboxd-%s-%06d-%s.tar.gz", owner, number, taken.UTC().Format(nameTime))
	if encrypted {
		name += sealedEnd
	}
	return name
}

// ParseName reads the name of a backup; false: it is none.
func ParseName(name string) (b Backup, ok bool) {
	m := nameForm.FindStringSubmatch(name)
	if m == nil {
		return b, false
	}
	taken, err := time.Parse(nameTime, m[3])
	number, nerr := strconv.Atoi(m[2])
	if err != nil || nerr != nil {
		return b, false
	}
	b = Backup{Name: name, Owner: m[1], Number: number, Taken: taken, Encrypted: m[4] != ""}
	b.Label, b.ID = split(b.Owner)
	return b, true
}

// A Pack is a file with data of backups. Its name is
//
//	sandboxd-<instance>-<host>-<id>-pack-<sha256 of the file>[.age]
type Pack struct {
	Owner, Sum string
	Encrypted  bool
}

// ID is that of the state that wrote it; empty: an earlier release did.
func (p Pack) ID() string {
	_, id := split(p.Owner)
	return id
}

// PackName returns the name of a pack.
func PackName(owner, sum string, encrypted bool) string {
	name := fmt.Sprintf("sandboxd-%s-pack-%s", owner, sum)
	if encrypted {
		name += sealedEnd
	}
	return name
}

// ParsePack reads the name of a pack; false: it is none.
func ParsePack(name string) (p Pack, ok bool) {
	m := packForm.FindStringSubmatch(name)
	if m == nil {
		return p, false
	}
	return Pack{m[1], m[2], m[3] != ""}, true
}

// Backups lists the backups of a target, those of each owner from the oldest to the newest.
// It leaves out all other files. One of which only the mark or the list is left has -1 bytes.
func Backups(ctx context.Context, t Target) ([]Backup, error) {
	files, err := t.List(ctx)
	if err != nil {
		return nil, err
	}
	all := map[string]Backup{}
	for _, f := range files {
		name, mark := strings.CutSuffix(f.Name, Suffix)
		name, list := strings.CutSuffix(name, ListSuffix)
		b, ok := ParseName(name)
		if !ok || mark && list {
			continue
		}
		was, known := all[name]
		b.Whole, b.Bytes = was.Whole || mark, f.Bytes
		if mark || list {
			b.Bytes = -1
			if known {
				b.Bytes = was.Bytes
			}
		}
		all[name] = b
	}
	list := make([]Backup, 0, len(all))
	for _, b := range all {
		b.Whole = b.Whole && b.Bytes >= 0
		list = append(list, b)
	}
	slices.SortFunc(list, func(a, b Backup) int {
		return cmp.Or(cmp.Compare(a.Owner, b.Owner), a.Number-b.Number, cmp.Compare(a.Name, b.Name))
	})
	return list, nil
}

// Latest is the name for the newest whole backup, in Find.
const Latest = "latest"

// Find finds a backup by its name, or the newest whole one of a state as Latest.
func Find(ctx context.Context, t Target, w Whose, name string) (b Backup, err error) {
	all, err := Backups(ctx, t)
	if err != nil {
		return b, err
	}
	if name != Latest {
		if i := slices.IndexFunc(all, func(b Backup) bool { return b.Name == name }); i >= 0 {
			return all[i], nil
		}
		return b, errs.New(errs.NotFound, "%s has no backup %q; `sandboxctl system backups ls` lists them", t, name)
	}
	for _, one := range slices.Backward(w.Select(all)) {
		if one.Whole {
			return one, nil
		}
	}
	var others []string
	for _, one := range slices.Backward(all) {
		if one.Whole {
			others = append(others, one.Name)
		}
	}
	hint := ""
	if len(others) > 0 {
		hint = fmt.Sprintf("; it has %s of others, such as %s: name the one to use", errs.Count(len(others), "backup", "backups"),
			others[0])
	}
	return b, errs.New(errs.NotFound, "%s has no whole backup of %s%s", t, w.Owner(), hint)
}
