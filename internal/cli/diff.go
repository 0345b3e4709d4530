package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

func newDiff(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:   "diff SANDBOX [SNAPSHOT]",
		Short: "List what was changed in the files of a sandbox or a snapshot",
		Long: `List what was changed in the files of a sandbox or a snapshot: A added, C
changed, D deleted. They are compared with those of a snapshot of the same
image, or without one with the image itself. Either may be a sandbox or a
snapshot. Contents are not read: what has kept its size, owner, mode and times
counts as unchanged.`,
		Example: `  sandboxctl diff lab
  sandboxctl diff lab before-upgrade
  sandboxctl diff -o json lab lab2`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			base := ""
			if len(args) == 2 {
				base = args[1]
			}
			out := changes{to: bufio.NewWriter(os.Stdout), format: o.format}
			if err = cl.Diff(cmd.Context(), args[0], base, out.add); err == nil {
				err = out.end()
			}
			return errors.Join(err, out.to.Flush())
		},
	}
	o.flags(cmd, true)
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
		err = writeJSON(&b, struct {
			Kind string `json:"kind"`
			Path string `json:"path"`
		}{kind, path}, "")
		if err == nil {
			_, err = fmt.Fprint(c.to, cmp.Or(c.before, "[\n  "), strings.TrimSpace(b.String()))
		}
		c.before = ",\n  "
	case "name":
		_, err = fmt.Fprintln(c.to, printable(path, false))
	default:
		_, err = fmt.Fprintln(c.to, printable(kind, false), printable(path, false))
	}
	return err
}

// end closes the array.
func (c *changes) end() error {
	text := ""
	switch {
	case c.format == "json" && c.before == "":
		text = "[]\n"
	case c.format == "json":
		text = "\n]\n"
	}
	_, err := c.to.WriteString(text)
	return err
}
