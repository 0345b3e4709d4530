package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"text/template"
	"text/template/parse"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Fields are what docker's names of a thing's properties stand for in a template of
// --format, such as {{.Names}}. Beside them a template may use what -o json prints, such
// as {{.status.state}}: those names begin with a small letter.
type Fields map[string]any

// format is the value of --format, docker's way to say how a command prints.
type format struct {
	asked   string
	lines   bool // json: each thing is a line
	table   bool // the template is that of a table's rows
	columns Fields
	*template.Template
}

// FormatFlag adds --format to cmd. fields has a value for each of docker's names. It is
// called after Flags, if that is called.
func (o *Output) FormatFlag(cmd *cobra.Command, fields Fields) { o.formatFlag(cmd, "", fields) }

func (o *Output) formatFlag(cmd *cobra.Command, short string, fields Fields) {
	cmd.Flags().StringVarP(&o.format.asked, "format", short, "", "output format as docker's: json, table, or a Go template such as "+
		"'{{.id}}' with the names of -o json and of docker; 'table TEMPLATE' for columns")
	Choices(cmd, "format", "json", "table")
	check := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		if check != nil {
			if err := check(cmd, args); err != nil {
				return err
			}
		}
		if !cmd.Flags().Changed("format") {
			return nil
		}
		for _, other := range []string{"output", "quiet"} {
			if cmd.Flags().Changed(other) {
				return errs.New(errs.Invalid, "--format and --%s exclude each other; leave one out", other)
			}
		}
		return o.parse(fields)
	}
}

// functions are docker's, for templates.
var functions = template.FuncMap{
	"json": jsonOf, "index": index,
	"split": split, "join": join, "lower": strings.ToLower, "upper": strings.ToUpper,
	"title": func(s string) string {
		r := []rune(s)
		if len(r) > 0 {
			r[0] = unicode.ToTitle(r[0])
		}
		return string(r)
	},
	"pad": func(s string, before, after int) string {
		return strings.Repeat(" ", max(0, before)) + s + strings.Repeat(" ", max(0, after))
	},
	"truncate": func(s string, n int) string {
		r := []rune(s)
		return string(r[:max(0, min(n, len(r)))])
	},
}

// headings take the place of functions where a template gets the titles of columns, as in
// docker: a title stays what it is.
var headings = template.FuncMap{
	"json": heading, "index": heading, "split": heading, "join": heading, "lower": heading, "upper": heading, "title": heading,
	"pad": heading, "truncate": heading,
}

func heading(column any, _ ...any) any { return column }

// index is that of templates, but nothing is in what is absent.
func index(v any, keys ...any) (any, error) {
	for _, key := range keys {
		switch of := v.(type) {
		case nil:
			return "", nil
		case Fields:
			v = of[fmt.Sprint(key)]
		case map[string]any:
			v = of[fmt.Sprint(key)]
		case []any:
			i, ok := key.(int)
			if !ok || i < 0 || i >= len(of) {
				return nil, fmt.Errorf("there is no element %v in a list of %d", key, len(of))
			}
			v = of[i]
		default:
			return nil, fmt.Errorf("%v is neither a list nor a map", v)
		}
	}
	if v == nil {
		return "", nil
	}
	return v, nil
}

// split makes a list as it comes out of JSON, which index and join take.
func split(s, sep string) []any {
	var list []any
	for _, word := range strings.Split(s, sep) {
		list = append(list, word)
	}
	return list
}

// join takes lists as they come out of JSON.
func join(list []any, sep string) string {
	words := make([]string, len(list))
	for i, v := range list {
		words[i] = fmt.Sprint(v)
	}
	return strings.Join(words, sep)
}

// jsonOf leaves docker's names out: they repeat what is there.
func jsonOf(v any) (string, error) {
	if f, ok := v.(Fields); ok {
		f = maps.Clone(f)
		maps.DeleteFunc(f, func(name string, _ any) bool { return !inJSON(name) })
		v = f
	}
	var b strings.Builder
	err := text.JSONLine(&b, v)
	return strings.TrimSuffix(b.String(), "\n"), err
}

// inJSON reports whether a name is one of -o json, and not docker's.
func inJSON(name string) bool { return unicode.IsLower([]rune(name)[0]) }

// parse reads --format.
func (o *Output) parse(fields Fields) error {
	f := &o.format
	asked := strings.NewReplacer(`\t`, "\t", `\n`, "\n").Replace(f.asked) // as docker does
	rest, table := strings.CutPrefix(asked, "table")
	switch {
	case asked == "json":
		o.Format, f.lines = JSON, true
		return nil
	case asked == "table":
		return nil
	case table && strings.TrimLeft(rest, " \t") != rest:
		f.table, asked = true, strings.TrimLeft(rest, " \t")
	case !strings.Contains(asked, "{{"):
		return errs.New(errs.Invalid, "--format %q: want json, table or a template such as '{{.id}}'", text.Clip(f.asked, 60))
	}
	t, err := template.New("--format").Funcs(functions).Parse(asked)
	if err != nil {
		return errs.New(errs.Invalid, "%s", strings.TrimPrefix(err.Error(), "template: "))
	}
	f.Template, f.columns = t, Fields{}
	for _, path := range paths(t.Root) {
		if _, ok := fields[path[0]]; !ok && !inJSON(path[0]) {
			return errs.New(errs.Invalid, "--format: there is no .%s; there are the names of -o json, such as .id, and %s",
				text.Clip(path[0], 40), strings.Join(slices.Sorted(maps.Keys(fields)), ", "))
		}
		f.columns.add(path)
	}
	return nil
}

// paths are the fields that a template takes of what it is given, each as its names. It
// does not look into range and with, which change what a field is taken of.
func paths(n parse.Node) (all [][]string) {
	pipe := func(p *parse.PipeNode) {
		if p == nil {
			return
		}
		for _, c := range p.Cmds {
			for _, arg := range c.Args {
				all = append(all, paths(arg)...)
			}
		}
	}
	branch := func(b *parse.BranchNode, inside bool) {
		pipe(b.Pipe)
		if inside {
			all = append(all, paths(b.List)...)
		}
		all = append(all, paths(b.ElseList)...)
	}
	switch n := n.(type) {
	case *parse.ListNode:
		if n == nil {
			return nil
		}
		for _, sub := range n.Nodes {
			all = append(all, paths(sub)...)
		}
	case *parse.ActionNode:
		pipe(n.Pipe)
	case *parse.PipeNode:
		pipe(n)
	case *parse.IfNode:
		branch(&n.BranchNode, true)
	case *parse.RangeNode:
		branch(&n.BranchNode, false)
	case *parse.WithNode:
		branch(&n.BranchNode, false)
	case *parse.FieldNode:
		all = append(all, n.Ident)
	}
	return all
}

// add puts the title of a column where the template looks for its value: CREATED AT for
// CreatedAt.
func (f Fields) add(path []string) {
	last := path[len(path)-1]
	for _, name := range path[:len(path)-1] {
		sub, ok := f[name].(Fields)
		if !ok {
			sub = Fields{}
			f[name] = sub
		}
		f = sub
	}
	var title strings.Builder
	was := 'A'
	for _, r := range last {
		if unicode.IsUpper(r) && unicode.IsLower(was) {
			title.WriteByte(' ')
		}
		title.WriteRune(unicode.ToUpper(r))
		was = r
	}
	f[last] = title.String()
}

// print prints things by the template, each a line.
func (f *format) print(w io.Writer, all []Fields) error {
	var b bytes.Buffer
	out := io.Writer(&b)
	tw := tabwriter.NewWriter(&b, 0, 8, 3, ' ', 0)
	row := func(t *template.Template, v Fields) error {
		var line bytes.Buffer
		if err := t.Execute(&line, v); err != nil {
			return errs.New(errs.Invalid, "%s", strings.TrimPrefix(err.Error(), "template: "))
		}
		fmt.Fprintln(out, text.Tabbed(line.String())) // a guest may have written some of it
		return nil
	}
	if f.table {
		out = tw
		titles, err := f.Clone()
		if err == nil {
			err = row(titles.Funcs(headings), f.columns)
		}
		if err != nil {
			return err
		}
	}
	for _, v := range all {
		if err := row(f.Template, v); err != nil {
			return err
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := w.Write(b.Bytes())
	return err
}

// fieldsOf are the fields of v: docker's, and those of its JSON.
func fieldsOf(v any, docker Fields) (Fields, error) {
	fields, err := decoded(v)
	if err != nil {
		return nil, err
	}
	more, err := decoded(docker)
	for name, value := range more {
		if s, ok := value.(string); ok {
			value = text.Printable(s)
		}
		fields[name] = value
	}
	return fields, err
}

// decoded is v as JSON has it, so that all lists and maps are of one kind.
func decoded(v any) (fields Fields, err error) {
	b, err := json.Marshal(v)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		err = d.Decode(&fields)
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.Internal, "the answer cannot be printed as JSON")
	}
	for name, value := range fields {
		fields[name] = plain(value)
	}
	return fields, nil
}

// plain makes numbers of the numbers of JSON, so that they can be compared and large
// ones are printed whole.
func plain(v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		n, _ := v.Float64()
		return n
	case map[string]any:
		for name, value := range v {
			v[name] = plain(value)
		}
	case []any:
		for i, value := range v {
			v[i] = plain(value)
		}
	}
	return v
}

// Value prints one thing as JSON or by a template, if that was asked for; else done is
// false, and the command prints it for people.
func (o *Output) Value(w io.Writer, v any, docker Fields) (done bool, err error) {
	switch {
	case o.format.Template != nil:
		fields, err := fieldsOf(v, docker)
		if err != nil {
			return true, err
		}
		return true, o.format.print(w, []Fields{fields})
	case o.format.lines:
		return true, text.JSONLine(w, v)
	case o.Format == JSON && o.Lines:
		return true, text.JSONLine(w, v)
	case o.Format == JSON:
		return true, text.JSON(w, v)
	}
	return false, nil
}
