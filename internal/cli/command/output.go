package command

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// The formats of -o.
const (
	JSON  = "json"
	Table = "table"
	Name  = "name"
)

// Output is how a command prints: -o json, table or name, and docker's --format.
type Output struct {
	Format string
	Quiet  bool // -q, which is -o name
	Full   bool // columns are not shortened
	Lines  bool // more than one answer comes: as JSON each is a line
	Width  int  // of tables; 0: of the terminal

	format format
}

// Flags adds -o, and with quiet also -q, to cmd. They are checked before cmd runs.
func (o *Output) Flags(cmd *cobra.Command, quiet bool) {
	cmd.Flags().StringVarP(&o.Format, "output", "o", Table, "output format: table, json or name")
	Choices(cmd, "output", Table, JSON, Name)
	if quiet {
		cmd.Flags().BoolVarP(&o.Quiet, "quiet", "q", false, "print names only, the same as -o name")
	}
	cmd.PreRunE = func(*cobra.Command, []string) error { return o.check() }
}

func (o *Output) check() error {
	switch o.Format {
	case JSON, Table, Name:
	default:
		return errs.New(errs.Invalid, "--output %q: want table, json or name", o.Format)
	}
	if o.Quiet {
		o.Format = Name
	}
	return nil
}

// NameOf returns the name of a sandbox, or "".
func NameOf(sb wire.Sandbox) string {
	if sb.Sandboxd == nil {
		return ""
	}
	return sb.Sandboxd.Name
}

// One prints one thing: as JSON all of it, else its name.
func (o *Output) One(v any, name string) error {
	if o.Format == JSON {
		return text.JSON(os.Stdout, v)
	}
	_, err := fmt.Println(text.Printable(name))
	return err
}

// A Listing is how things of one kind are printed.
type Listing[T any] struct {
	Name   func(T) string // is printed by -o name, and accepted by other commands
	Header []string
	Row    func(T) []string
	Docker func(T) Fields // what docker calls its properties; may be nil
	Drop   []string       // columns that a narrow terminal does not show, the least important one first
	State  func(T) string // gives the column STATE a colour on a terminal; may be nil
}

// FormatFlag adds --format to the command that shows the list.
func (l Listing[T]) FormatFlag(cmd *cobra.Command, o *Output) {
	var none T
	o.FormatFlag(cmd, l.docker(none))
}

func (l Listing[T]) docker(v T) Fields {
	if l.Docker == nil {
		return nil
	}
	return l.Docker(v)
}

// Show prints a list: as JSON an array, also of nothing; one name a line; or a table. With
// --format each element is a line, except in docker's tables.
func (l Listing[T]) Show(w io.Writer, o *Output, list []T) error {
	switch {
	case o.format.Template != nil:
		all := make([]Fields, len(list))
		for i, v := range list {
			var err error
			if all[i], err = fieldsOf(v, l.docker(v)); err != nil {
				return err
			}
		}
		return o.format.print(w, all)
	case o.format.lines:
		for _, v := range list {
			if err := text.JSONLine(w, v); err != nil {
				return err
			}
		}
		return nil
	}
	switch o.Format {
	case JSON:
		if list == nil {
			list = []T{}
		}
		if o.Lines {
			return text.JSONLine(w, list)
		}
		return text.JSON(w, list)
	case Name:
		for _, v := range list {
			if _, err := fmt.Fprintln(w, text.Printable(l.Name(v))); err != nil {
				return err
			}
		}
		return nil
	}
	rows := make([][]string, 0, len(list))
	for _, v := range list {
		rows = append(rows, l.Row(v))
	}
	grid := text.Grid{Header: l.Header, Rows: rows, Width: o.Width, Drop: l.Drop}
	if f, ok := w.(*os.File); ok && IsTerminal(f) {
		l.onTerminal(&grid, f, o, list)
	}
	return grid.Write(w)
}

// onTerminal makes a table fit to a terminal, and colours the states in it (https://no-color.org).
func (l Listing[T]) onTerminal(grid *text.Grid, f *os.File, o *Output, list []T) {
	if width, _, err := term.GetSize(int(f.Fd())); err == nil && !o.Full && grid.Width == 0 {
		grid.Width = width
	}
	if l.State == nil || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return
	}
	grid.Colour = func(row int, column string) string {
		if column != "STATE" {
			return ""
		}
		return stateColours[l.State(list[row])]
	}
}

// stateColours are green for what runs, yellow for what rests or changes, red for what failed.
var stateColours = map[string]string{
	wire.Running: "32", wire.Failed: "31",
	wire.Pending: "33", wire.Pausing: "33", wire.Paused: "33", wire.Resuming: "33", wire.Stopping: "33",
}

// Of returns the function that cobra runs for a command that fetches and shows a
// list.
func (l Listing[T]) Of(
	p *Program, o *Output, fetch func(ctx context.Context, cl *client.Client, args []string) ([]T, error),
) func(*cobra.Command, []string) error {
	return p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
		list, err := fetch(ctx, cl, args)
		if err != nil {
			return err
		}
		return l.Show(os.Stdout, o, list)
	})
}

// Inspect completes cmd, which has the texts, to a command that prints everything about
// the things it names: as one array of JSON, or each by --format. Errors go to standard
// error, and the rest is printed. docker may be nil; see Fields.
func Inspect[T any](
	p *Program, cmd *cobra.Command, docker func(T) Fields,
	one func(ctx context.Context, cl *client.Client, name string) (T, error),
) *cobra.Command {
	var o Output
	l := Listing[T]{Docker: docker}
	cmd.Args = cobra.MinimumNArgs(1)
	cmd.RunE = p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
		all := []T{}
		err := Every(args, func(name string) error {
			v, err := one(ctx, cl, name)
			if err == nil {
				all = append(all, v)
			}
			return err
		})
		if o.format.Template == nil {
			return cmp.Or(err, text.JSON(os.Stdout, all))
		}
		return cmp.Or(err, l.Show(os.Stdout, &o, all))
	})
	var none T
	o.formatFlag(cmd, "f", l.docker(none))
	return cmd
}
