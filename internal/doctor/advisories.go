package doctor

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/sandboxd/sandboxd/internal/config"
)

// AdvisoriesFile replaces the built-in table of flaws, if it exists.
const AdvisoriesFile = "/etc/sandboxd/advisories.toml"

// advisoriesOld is half a year. The built-in table gets that old only on a host whose
// sandboxd was not upgraded for as long.
const advisoriesOld = 183 * 24 * time.Hour

const advisoriesMost = 1 << 20 // bytes of a table

//go:embed advisories.toml
var builtIn []byte

// advisories is a table of known flaws. The file advisories.toml describes its form.
type advisories struct {
	Date  toml.LocalDate `toml:"date"`
	Flaws []flaw         `toml:"flaw"`
}

// The parts of a host that may have flaws, and who brings a newer version of each.
var parts = map[string]string{
	"kernel": "upgrade the kernel",
	"runc":   "upgrade sandboxd, which links runc's libcontainer",
	"gvisor": "upgrade sandboxd, which pins gVisor",
}

// A flaw is a known flaw and the versions that mend it. Versions have the flaw from Since
// on. It is mended from the entry of Fixed that has the same first two numbers on;
// without such an entry, from the last entry on.
type flaw struct {
	Part   string    `toml:"part"`
	ID     string    `toml:"id"`
	What   string    `toml:"what"`
	Since  version   `toml:"since"`
	Fixed  []version `toml:"fixed"`  // ascending
	Source string    `toml:"source"` // of the versions
}

var strictVersion = regexp.MustCompile(`^\d{1,9}(\.\d{1,9}){1,2}$`)

// UnmarshalText reads two or three numbers: 6.8, 6.1.76.
func (v *version) UnmarshalText(text []byte) error {
	if !strictVersion.Match(text) {
		return fmt.Errorf("%.40q is not a version: want two or three numbers, such as 6.8 or 6.1.76", text)
	}
	*v, _ = parseVersion(string(text))
	return nil
}

// parseAdvisories reads a table. Its error names every line that is wrong, as far as the
// text is TOML.
func parseAdvisories(b []byte) (*advisories, error) {
	if len(b) > advisoriesMost {
		return nil, fmt.Errorf("it is larger than %d bytes", advisoriesMost)
	}
	table := &advisories{}
	err := toml.NewDecoder(bytes.NewReader(b)).DisallowUnknownFields().Decode(table)
	if unknown, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		var all []error
		for _, e := range unknown.Errors {
			line, _ := e.Position()
			all = append(all, fmt.Errorf("line %d: unknown key %s", line, strings.Join(e.Key(), ".")))
		}
		return nil, errors.Join(all...)
	}
	if bad, ok := errors.AsType[*toml.DecodeError](err); ok {
		line, _ := bad.Position()
		why := strings.TrimPrefix(bad.Error(), "toml: ")
		if strings.Contains(why, "into struct field") { // it goes on with names of Go
			why = strings.Join(bad.Key(), ".") + " does not fit: see the form of the table"
		}
		return nil, fmt.Errorf("line %d: %s", line, why)
	}
	if err != nil {
		return nil, err
	}
	return table, table.validate(config.Lines(b))
}

// validate reports every entry that is not complete, by the lines of the keys.
func (a *advisories) validate(lines map[string]int) error {
	var all []error
	if a.Date == (toml.LocalDate{}) {
		all = append(all, errors.New("line 1: there is no date; begin with a line such as date = 2026-11-21"))
	}
	if len(a.Flaws) == 0 {
		all = append(all, errors.New("line 1: there is no [[flaw]]"))
	}
	for i, f := range a.Flaws {
		at := fmt.Sprintf("flaw[%d]", i)
		bad := func(key, format string, args ...any) {
			line := lines[at+"."+key]
			if line == 0 {
				line = lines[at]
			}
			all = append(all, fmt.Errorf("line %d: %s", line, fmt.Sprintf(format, args...)))
		}
		for key, value := range map[string]string{"id": f.ID, "what": f.What, "source": f.Source} {
			if strings.TrimSpace(value) == "" {
				bad(key, "the flaw has no %s", key)
			}
		}
		if parts[f.Part] == "" {
			bad("part", "part %.40q: want kernel, runc or gvisor", f.Part)
		}
		if !slices.IsSortedFunc(f.Fixed, func(x, y version) int { return x.compare(y) }) {
			bad("fixed", "the versions do not ascend")
		}
	}
	return errors.Join(all...)
}

func (a *advisories) day() time.Time { return a.Date.AsTime(time.UTC) }

// advisories reads the table of this host, and the file that it comes from; empty if that
// is the built-in table. With an error it is the built-in table, too.
func (h *host) advisories() (table *advisories, path string, err error) {
	own, err := parseAdvisories(builtIn)
	if err != nil {
		return &advisories{}, "", fmt.Errorf("the built-in table: %w", err)
	}
	path = h.advisoriesFile
	if path == "" {
		path = filepath.Join(h.root, AdvisoriesFile)
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) && h.advisoriesFile == "" {
		return own, "", nil
	}
	if err != nil {
		return own, path, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, advisoriesMost+1))
	if err != nil {
		return own, path, err
	}
	table, err = parseAdvisories(b)
	if err == nil && table.day().After(h.now().AddDate(0, 0, 1)) {
		err = fmt.Errorf("its date, %s, is in the future", table.Date)
	}
	if err != nil {
		return own, path, err
	}
	return table, path, nil
}

var advisoriesCheck = check{
	name: "advisories", protects: "the checks of versions below, which know the flaws of a table and no others",
	run: func(_ context.Context, h *host) Finding {
		table, path, err := h.advisories()
		if err != nil {
			return fail(fmt.Sprintf("correct or remove %s; docs/operations.md describes its form", path),
				"%s is not used: %s; the built-in table of %s is", path, strings.ReplaceAll(err.Error(), "\n", "; "), table.Date)
		}
		text := fmt.Sprintf("the built-in table of %s, %d flaws", table.Date, len(table.Flaws))
		renew := "upgrade sandboxd, or write a newer table to " + AdvisoriesFile
		if path != "" {
			text = fmt.Sprintf("the table of %s in %s, %d flaws", table.Date, path, len(table.Flaws))
			renew = "write a newer table to " + path + ", or remove it"
			if own, err := parseAdvisories(builtIn); err == nil && table.day().Before(own.day()) {
				return warn(renew, "%s: it is older than the built-in table of %s, which it replaces", text, own.Date)
			}
		}
		if age := h.now().Sub(table.day()); age > advisoriesOld {
			return warn(renew, "%s: it is %d days old, and does not know what was found since", text, int(age.Hours()/24))
		}
		return ok("%s", text)
	},
}

// affects reports whether v has the flaw.
func (f *flaw) affects(v version) bool {
	if v.before(f.Since) {
		return false
	}
	for _, mended := range f.Fixed {
		if v[0] == mended[0] && v[1] == mended[1] {
			return v.before(mended)
		}
	}
	return len(f.Fixed) == 0 || v.before(f.Fixed[len(f.Fixed)-1])
}

// flawsOf compares a version of a part with the table of this host.
func (h *host) flawsOf(part string, v version) Finding {
	table, _, _ := h.advisories() // advisoriesCheck tells the error
	var has, fixed []string
	for i := range table.Flaws {
		f := &table.Flaws[i]
		if f.Part != part || !f.affects(v) {
			continue
		}
		has = append(has, fmt.Sprintf("%s (%s; %s)", f.ID, f.What, f.Source))
		versions := make([]string, len(f.Fixed))
		for i, m := range f.Fixed {
			versions[i] = m.String()
		}
		if len(versions) == 0 {
			versions = []string{"no version yet"}
		}
		fixed = append(fixed, fmt.Sprintf("%s is fixed in %s", f.ID, strings.Join(versions, ", ")))
	}
	if has == nil {
		return ok("%s %s: no flaw of the table of %s", part, v, table.Date)
	}
	return warn(parts[part]+": "+strings.Join(fixed, "; "), "%s %s has %s", part, v, strings.Join(has, " and "))
}
