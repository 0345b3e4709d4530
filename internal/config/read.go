package config

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

//go:embed default.toml
var defaults []byte

// Default returns the text of the default configuration.
func Default() []byte { return defaults }

var keyLine = regexp.MustCompile(`(?m)^["a-z].* = `)

// Commented returns the default configuration with each key commented out. So a file that was made of it has
// no value that nobody has chosen, and the next release may change a default.
func Commented() []byte { return keyLine.ReplaceAll(defaults, []byte("#$0")) }

// Load reads path over the defaults, and then its drop-ins; an empty path is the defaults alone.
// The error names every problem at once.
func Load(path string) (*Config, error) {
	c, f, err := read(path)
	if err == nil {
		c.File = path
		err = f.report(path)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Check reads path as Load does, and then the files that it names: keys and
// certificates. The error names every problem of all of them. What it returns are warnings.
func Check(path string) ([]string, error) {
	c, f, err := read(path)
	if err != nil {
		return nil, err
	}
	c.checkFiles(func(format string, args ...any) { f.add(fmt.Errorf(format, args...)) })
	return c.Warnings, f.report(path)
}

// DropIns are the files that are read after path, in this order: those of the directory NAME.d beside
// NAME.toml whose names end in .toml.
func DropIns(path string) ([]string, error) {
	dir := strings.TrimSuffix(path, ".toml") + ".d"
	entries, err := os.ReadDir(dir) // sorted
	if errors.Is(err, fs.ErrNotExist) || path == "" {
		return nil, nil
	}
	var all []string
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".toml" {
			all = append(all, filepath.Join(dir, e.Name()))
		}
	}
	return all, err
}

// read reads path and its drop-ins over the defaults, as far as they fit.
func read(path string) (*Config, *file, error) {
	c := &Config{}
	f, err := decode(defaults, "default.toml", c)
	if err != nil {
		return nil, nil, err
	}
	more, err := DropIns(path)
	if err != nil {
		return nil, nil, fmt.Errorf("read configuration: %w", err)
	}
	for i, name := range append([]string{path}, more...) {
		if name == "" {
			continue
		}
		b, err := os.ReadFile(name)
		if i == 0 && len(more) > 0 && errors.Is(err, fs.ErrNotExist) {
			continue // the drop-ins are all there is
		}
		if err != nil {
			return nil, nil, fmt.Errorf("read configuration: %w", err)
		}
		if err := f.over(b, name, path, c); err != nil {
			return nil, nil, err
		}
	}
	c.validate(func(format string, args ...any) { f.add(fmt.Errorf(format, args...)) })
	return c, f, nil
}

// over reads one more file over c. Its values take the place of earlier ones; tables are merged; tables in
// double brackets are added to those of earlier files.
func (f *file) over(b []byte, name, path string, c *Config) error {
	registries, pools := c.Registries, c.Pools
	c.Registries, c.Pools = nil, nil
	g, err := decode(b, name, c)
	if err != nil {
		return err
	}
	c.Registries, c.Pools = append(registries, c.Registries...), append(pools, c.Pools...)
	if name == path {
		name = ""
	}
	f.order = append(f.order, name)
	for key, p := range g.places {
		p.file = name
		f.places[key] = p
	}
	for _, p := range g.problems {
		p.file = name
		f.problems = append(f.problems, p)
	}
	for _, p := range g.warnings {
		p.file = name
		c.Warnings = append(c.Warnings, p.say().Error())
	}
	return nil
}

// A former is what became of a key of an older release.
type former struct {
	now string // the key that has taken its place, and its value; "": none
	say string // what is to be known
}

// formerly has the keys of older releases that are no more. Such a key is a warning, so that an upgrade
// does not stop at it. A key stays here for as long as configurations with it are read (docs/support.md).
var formerly = map[string]former{}

// rename moves the values of former keys to where they are now.
func (f *file) rename(doc map[string]any) {
	for _, key := range slices.Sorted(maps.Keys(formerly)) {
		was := formerly[key]
		value, ok := take(doc, strings.Split(key, "."))
		if !ok {
			continue
		}
		text := key + " is a key of an older release: " + was.say + "; remove the line"
		if was.now != "" {
			text = key + " is a key of an older release, and is now " + was.now + ": " + was.say + "; rename it"
			if !give(doc, strings.Split(was.now, "."), value) {
				text += "; it has no effect beside " + was.now
			} else {
				f.places[was.now] = f.places[key]
			}
		}
		f.warnings = append(f.warnings, problem{f.places[key], errors.New(text)})
	}
}

// take removes a key from the tables of doc.
func take(doc map[string]any, path []string) (any, bool) {
	for ; len(path) > 1; path = path[1:] {
		inner, ok := doc[path[0]].(map[string]any)
		if !ok {
			return nil, false
		}
		doc = inner
	}
	value, ok := doc[path[0]]
	delete(doc, path[0])
	return value, ok
}

// give sets a key, unless it is set.
func give(doc map[string]any, path []string, value any) bool {
	for ; len(path) > 1; path = path[1:] {
		if doc[path[0]] == nil {
			doc[path[0]] = map[string]any{}
		}
		inner, ok := doc[path[0]].(map[string]any)
		if !ok {
			return false
		}
		doc = inner
	}
	if _, set := doc[path[0]]; set {
		return false
	}
	doc[path[0]] = value
	return true
}
