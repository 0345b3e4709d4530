package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newImagePull(c *cli) *cobra.Command {
	var o output
	var user string
	var stdin bool
	cmd := &cobra.Command{
		Use:   "pull NAME[:TAG|@DIGEST]",
		Short: "Get an image from the registry that is configured for its name",
		Long: `Get an image from the registry, or a mirror of it, that [[registries]] of the
daemon's configuration names for it, also if the image is here already: its tag
may have moved. Layers that are here are not downloaded again, and a pull that
was cut off goes on where it was.

A password is asked for on the terminal, or read from standard input. It is used
for this pull only and kept nowhere.`,
		Example: `  sandboxctl image pull registry.example.com/team/app:1
  sandboxctl image pull -u robot --password-stdin registry.example.com/team/app:1 <token`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			auth, err := readAuth(user, stdin)
			if err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			var show func(client.ImportProgress)
			if !o.quiet && isTerminal(os.Stderr) {
				bar := bar{w: os.Stderr}
				show = bar.show
				defer bar.clear()
			}
			im, err := cl.PullImage(cmd.Context(), args[0], auth, show)
			if err != nil {
				return err
			}
			if o.format == "json" {
				return printJSON(os.Stdout, im)
			}
			_, err = fmt.Println(printable(im.Name+":"+im.Tag, false))
			return err
		},
	}
	o.flags(cmd, true)
	cmd.Flags().StringVarP(&user, "username", "u", "", "user name for the registry")
	cmd.Flags().BoolVar(&stdin, "password-stdin", false, "read the password from standard input")
	return cmd
}

// maxPassword bounds what is read for a password; the daemon takes no longer ones.
const maxPassword = 16 << 10

// readAuth reads the password of user; without a user there is none.
func readAuth(user string, stdin bool) (*client.ImageAuth, error) {
	if user == "" {
		if stdin {
			return nil, errs.New(errs.Invalid, "--password-stdin needs the user name that the password is of: -u NAME")
		}
		return nil, nil
	}
	if !stdin {
		if !isTerminal(os.Stdin) {
			return nil, errs.New(errs.Invalid, "standard input is no terminal to ask for the password on: feed it there with --password-stdin")
		}
		fmt.Fprintf(os.Stderr, "Password of %s: ", printable(user, false))
		b, err := term.ReadPassword(int(os.Stdin.Fd()))
		fmt.Fprintln(os.Stderr)
		if err != nil {
			return nil, fmt.Errorf("read the password: %w", err)
		}
		return &client.ImageAuth{Username: user, Password: string(b)}, nil
	}
	line, err := bufio.NewReader(io.LimitReader(os.Stdin, maxPassword)).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read the password: %w", err)
	}
	if line = strings.TrimRight(line, "\r\n"); line == "" {
		return nil, errs.New(errs.Invalid, "standard input holds no password")
	}
	return &client.ImageAuth{Username: user, Password: line}, nil
}
