package files

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newDiff(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "diff SANDBOX [SNAPSHOT]",
		Short: "List the changed files of a sandbox or a snapshot",
		Long: `List the changed files of a sandbox or a snapshot: A added, C changed, D deleted. The
files are compared with those of SNAPSHOT, which must have the same image. Without
SNAPSHOT they are compared with the image. Either argument may be a sandbox or a
snapshot. diff does not read contents: a file that has kept its size, owner, mode and
times counts as unchanged.`,
		Example: `  sandboxctl diff lab
  sandboxctl diff lab before-upgrade
  sandboxctl diff -o json lab lab2`,
		Args: cobra.RangeArgs(1, 2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			base := ""
			if len(args) == 2 {
				base = args[1]
			}
			out := changes{to: bufio.NewWriter(os.Stdout), format: o.Format}
			err := cl.Snapshots().Diff(ctx, args[0], base, out.add)
			if err == nil {
				err = out.end()
			}
			return errors.Join(err, out.to.Flush())
		}),
	}
	o.Flags(cmd, true)
	return cmd
}

// changes prints changes as they come; as JSON they are one array, whose end is
// missing if the list broke off.
type changes struct {
	to     *bufio.Writer
	format string
	before string // the next change, in JSON
}

func (c *changes) add(kind, path string) error {
	var err error
	switch c.format {
	case "json":
		var b bytes.Buffer
		err = text.JSONLine(&b, struct {
			Kind string `json:"kind"`
			Path string `json:"path"`
		}{kind, path})
		if err == nil {
			_, err = fmt.Fprint(c.to, cmp.Or(c.before, "[\n  "), strings.TrimSpace(b.String()))
		}
		c.before = ",\n  "
	case command.Name:
		_, err = fmt.Fprintln(c.to, text.Printable(path))
	default:
		_, err = fmt.Fprintln(c.to, text.Printable(kind), text.Printable(path))
	}
	return err
}

// end closes the array.
func (c *changes) end() error {
	closing := ""
	switch {
	case c.format == command.JSON && c.before == "":
		closing = "[]\n"
	case c.format == command.JSON:
		closing = "\n]\n"
	}
	_, err := c.to.WriteString(closing)
	return err
}
