package config

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// A file is the text of a configuration while it is read. go-toml stops at the first
// value that does not fit, and names types of Go. So each key is decoded by itself first,
// and what does not fit is left out and reported.
type file struct {
	places   map[string]place // of keys as limits.max_sandboxes and registries[0].prefix
	problems []problem
	warnings []problem
	order    []string // the files, as place.file has them
}

// A place is a line of a file.
type place struct {
	file string // "" is that of the report
	line int    // 0: not known
}

type problem struct {
	place
	err error
}

// say is the error with its place.
func (p problem) say() error {
	if p.line > 0 {
		p.err = fmt.Errorf("line %d: %w", p.line, p.err)
	}
	if p.file != "" {
		p.err = fmt.Errorf("%s: %w", p.file, p.err)
	}
	return p.err
}

// decode reads the text of a configuration over c, as far as it fits. An error means
// that the text is no TOML.
func decode(b []byte, name string, c *Config) (*file, error) {
	doc := map[string]any{}
	if err := toml.Unmarshal(b, &doc); err != nil {
		if bad, ok := errors.AsType[*toml.DecodeError](err); ok {
			return nil, fmt.Errorf("configuration %s: it is not TOML:\n%s", name, bad.String())
		}
		return nil, fmt.Errorf("configuration %s: %w", name, err)
	}
	f := &file{places: map[string]place{}}
	for key, line := range Lines(b) {
		f.places[key] = place{line: line}
	}
	f.rename(doc)
	f.table(doc, reflect.TypeFor[Config](), "")
	fit, err := toml.Marshal(doc)
	if err == nil {
		err = toml.Unmarshal(fit, c)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration %s: %w", name, err)
	}
	return f, nil
}

func (f *file) bad(key, format string, args ...any) {
	f.problems = append(f.problems, problem{f.places[key], fmt.Errorf(format, args...)})
}

// table checks the keys of a table, which is of a struct type, and removes those that do
// not fit. at is the name of the table with a dot behind it, or empty.
func (f *file) table(t map[string]any, typ reflect.Type, at string) {
	for _, key := range slices.Sorted(maps.Keys(t)) {
		name, value := at+key, t[key]
		field, ok := fieldOf(typ, key)
		inner, isTable := value.(map[string]any)
		list, isList := value.([]any)
		switch {
		case !ok:
			f.bad(name, "unknown key %s%s; `sandboxd config init` prints all keys", name, guess(typ, at, key))
		case field.Kind() == reflect.Struct && isTable:
			f.table(inner, field, name+".")
			continue
		case field.Kind() == reflect.Slice && field.Elem().Kind() == reflect.Struct && isList && allTables(list):
			for i, v := range list {
				f.table(v.(map[string]any), field.Elem(), fmt.Sprintf("%s[%d].", name, i))
			}
			continue
		case field.Kind() == reflect.Map && field.Elem().Kind() == reflect.Struct && isTable:
			for k, v := range inner {
				if of, ok := v.(map[string]any); ok {
					f.table(of, field.Elem(), name+"."+k+".")
				} else {
					f.bad(name+"."+k, "%s.%s = %s: want a table, [%s.%s]", name, k, shown(v), name, k)
					delete(inner, k)
				}
			}
			continue
		case field.Kind() == reflect.Map && isTable:
			for k, v := range inner {
				if why := misfit(field.Elem(), v); why != "" {
					f.bad(name+"."+k, "%s.%s = %s: %s", name, k, shown(v), why)
					delete(inner, k)
				}
			}
			continue
		default:
			why := misfit(field, value)
			if why == "" {
				continue
			}
			f.bad(name, "%s = %s: %s", name, shown(value), why)
		}
		delete(t, key)
	}
}

func allTables(list []any) bool {
	return !slices.ContainsFunc(list, func(v any) bool { _, ok := v.(map[string]any); return !ok })
}

// fieldOf finds the type of a key.
func fieldOf(typ reflect.Type, key string) (reflect.Type, bool) {
	for i := range typ.NumField() {
		if f := typ.Field(i); f.Tag.Get("toml") == key && key != "-" {
			return f.Type, true
		}
	}
	return nil, false
}

// misfit says in words why a value cannot be one of a type; "" if it can.
func misfit(typ reflect.Type, value any) string {
	into := reflect.New(reflect.StructOf([]reflect.StructField{{Name: "V", Type: typ, Tag: `toml:"v"`}}))
	b, err := toml.Marshal(map[string]any{"v": value})
	if err == nil {
		err = toml.Unmarshal(b, into.Interface())
	}
	if err == nil {
		return ""
	}
	if u, ok := reflect.New(typ).Interface().(encoding.TextUnmarshaler); ok {
		switch v := value.(type) {
		case string, int64, float64:
			if err := u.UnmarshalText(fmt.Append(nil, v)); err != nil {
				return err.Error()
			}
		}
		return "want text in quotes"
	}
	switch typ.Kind() {
	case reflect.String:
		return "want text in quotes"
	case reflect.Bool:
		return "want true or false"
	case reflect.Int, reflect.Int64:
		return "want a whole number, without quotes"
	case reflect.Slice:
		if typ.Elem().Kind() == reflect.Struct {
			return "want tables, each with its name in double brackets before it"
		}
		return `want a list of texts, such as ["one", "two"]`
	case reflect.Struct, reflect.Map:
		return "want a table, with its name in brackets before it"
	}
	return "it does not fit"
}

// shown is a value as a message shows it.
func shown(value any) string {
	if s, ok := value.(string); ok {
		return fmt.Sprintf("%.60q", s)
	}
	return fmt.Sprintf("%.60s", fmt.Sprint(value))
}

// guess is the key that somebody may have meant: the same one of another table, or one of
// this table that differs a little.
func guess(typ reflect.Type, at, key string) string {
	config := reflect.TypeFor[Config]()
	if _, ok := fieldOf(config, key); ok {
		return "; did you mean " + key + ", before the first table?"
	}
	for i := range config.NumField() {
		if f := config.Field(i); f.Type.Kind() == reflect.Struct && f.Tag.Get("toml") != "-" {
			if _, ok := fieldOf(f.Type, key); ok {
				return "; did you mean " + f.Tag.Get("toml") + "." + key + "?"
			}
		}
	}
	for i := range typ.NumField() {
		if known := typ.Field(i).Tag.Get("toml"); known != "-" && distance(known, key) <= 2 {
			return "; did you mean " + at + known + "?"
		}
	}
	return ""
}

// distance is how many letters must be added, removed or replaced to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		last := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := last
			if a[i] != b[j] {
				cost++
			}
			last = row[j+1]
			row[j+1] = min(cost, last+1, row[j]+1)
		}
	}
	return row[len(b)]
}

// Lines finds the line of each key and each table of a TOML text, counted from 1. Keys are
// named as limits.max_sandboxes and registries[0].prefix, tables as limits and registries[0].
func Lines(b []byte) map[string]int {
	lines, tables, table := map[string]int{}, map[string]int{}, ""
	var p unstable.Parser
	p.Reset(b)
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind != unstable.Table && e.Kind != unstable.ArrayTable && e.Kind != unstable.KeyValue {
			continue
		}
		var parts []string
		line := 0
		for keys := e.Key(); keys.Next(); {
			parts = append(parts, string(keys.Node().Data))
			line = p.Shape(keys.Node().Raw).Start.Line
		}
		name := strings.Join(parts, ".")
		switch e.Kind {
		case unstable.ArrayTable:
			table = fmt.Sprintf("%s[%d].", name, tables[name])
			tables[name]++
			lines[strings.TrimSuffix(table, ".")] = line
		case unstable.Table:
			lines[name] = line
			table = name + "."
		default:
			lines[table+name] = line
		}
	}
	return lines
}

// add reports a problem that validation has found: its text begins with the key.
func (f *file) add(err error) {
	key, _, _ := strings.Cut(err.Error(), " ")
	f.problems = append(f.problems, problem{f.places[strings.TrimSuffix(key, ":")], err})
}

// report is the error that names all problems, by line; nil if there is none.
func (f *file) report(path string) error {
	if len(f.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(f.problems, func(a, b problem) int {
		return cmp.Or(slices.Index(f.order, a.file)-slices.Index(f.order, b.file), a.line-b.line)
	})
	var all []error
	for _, p := range f.problems {
		all = append(all, p.say())
	}
	return fmt.Errorf("configuration %s:\n%w", cmp.Or(path, "default.toml"), errors.Join(all...))
}
