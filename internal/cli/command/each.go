package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

// ErrNothing is returned by the function that Each calls when there was nothing to
// do: that is no failure, and the name is not printed.
var ErrNothing = errors.New("nothing done")

// Each does f to every name and prints those that it was done to, as docker
// does. It goes on after an error, prints all errors and returns the last.
func Each(names []string, f func(name string) error) error {
	return Every(names, func(name string) error {
		switch err := f(name); {
		case errors.Is(err, ErrNothing):
			return nil
		case err != nil:
			return err
		}
		_, err := fmt.Println(name)
		return err
	})
}

// Every does f to every name. It prints all errors but the last, which it returns.
func Every(names []string, f func(name string) error) error {
	var last error
	for _, name := range names {
		if err := f(name); err != nil {
			if last != nil {
				Complain(last)
			}
			last = err
		}
	}
	return last
}

// Verb completes cmd, which has the texts, to a command that does f to Each of its
// arguments.
func (p *Program) Verb(cmd *cobra.Command, f func(ctx context.Context, cl *client.Client, name string) error) *cobra.Command {
	cmd.Args = cobra.MinimumNArgs(1)
	cmd.RunE = p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
		return Each(args, func(name string) error { return f(ctx, cl, name) })
	})
	return cmd
}
