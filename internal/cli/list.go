package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

// A listing is how things of one kind are printed.
type listing[T any] struct {
	name   func(T) string // what -o name prints, and other commands take
	header []string
	row    func(T) []string
}

// show prints a list: as JSON an array, also of nothing; one name a line; or a table.
func (l listing[T]) show(w io.Writer, o *output, list []T) error {
	switch o.format {
	case "json":
		if list == nil {
			list = []T{}
		}
		if o.lines {
			return writeJSON(w, list, "")
		}
		return printJSON(w, list)
	case "name":
		for _, v := range list {
			if _, err := fmt.Fprintln(w, printable(l.name(v), false)); err != nil {
				return err
			}
		}
		return nil
	}
	rows := make([][]string, 0, len(list))
	for _, v := range list {
		rows = append(rows, l.row(v))
	}
	return table(w, l.header, rows)
}

// of is what a command does that fetches a list and prints it.
func (l listing[T]) of(c *cli, o *output, fetch func(ctx context.Context, cl *client.Client, args []string) ([]T, error)) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if err := o.check(); err != nil {
			return err
		}
		cl, err := c.connect()
		if err != nil {
			return err
		}
		list, err := fetch(cmd.Context(), cl, args)
		if err != nil {
			return err
		}
		return l.show(os.Stdout, o, list)
	}
}

// inspecting is what a command does that prints all there is to know of things,
// as one array of JSON. What can not be had is told of, and the rest is printed.
func inspecting[T any](c *cli, one func(*client.Client, context.Context, string) (T, error)) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		cl, err := c.connect()
		if err != nil {
			return err
		}
		all := []T{}
		err = each(args, func(name string) error {
			v, err := one(cl, cmd.Context(), name)
			if err == nil {
				all = append(all, v)
			}
			return err
		})
		return cmp.Or(err, printJSON(os.Stdout, all))
	}
}
