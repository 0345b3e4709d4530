package image

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newImagePull(p *command.Program) *cobra.Command {
	var o command.Output
	var user string
	var stdin bool
	cmd := &cobra.Command{
		Use:   "pull NAME[:TAG|@DIGEST]",
		Short: "Download an image from the registry that is configured for its name",
		Long: `Download an image from the registry, or a mirror of it, that [[registries]] in the
daemon's configuration names for it. The daemon asks the registry even if it has the
image, because the tag may have moved. It does not download layers again that it has,
and it resumes a pull that was cut off.

With -u, sandboxctl asks for the password on the terminal, or with --password-stdin
reads it from standard input. The password is used for this pull only and not stored.`,
		Example: `  sandboxctl image pull registry.example.com/team/app:1
  sandboxctl image pull -u robot --password-stdin registry.example.com/team/app:1 <token`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			auth, err := readAuth(user, stdin)
			if err != nil {
				return err
			}
			return comes(&o, func(progress func(wire.ImportProgress)) (wire.ImageInfo, error) {
				return cl.Images().Pull(ctx, args[0], auth, progress)
			})
		}),
	}
	o.Flags(cmd, true)
	cmd.Flags().StringVarP(&user, "username", "u", "", "user name for the registry")
	cmd.Flags().BoolVar(&stdin, "password-stdin", false, "read the password from standard input")
	return cmd
}

// maxPassword bounds what is read for a password; the daemon takes no longer ones.
const maxPassword = 16 << 10

// readAuth reads the password of user; without a user there is none.
func readAuth(user string, stdin bool) (*wire.ImageAuth, error) {
	if user == "" {
		if stdin {
			return nil, errs.New(errs.Invalid, "--password-stdin needs a user name: -u NAME")
		}
		return nil, nil
	}
	if !stdin {
		if !command.IsTerminal(os.Stdin) {
			return nil, errs.New(errs.Invalid,
				"standard input is not a terminal, so sandboxctl cannot ask for the password: pipe it in and use --password-stdin")
		}
		fmt.Fprintf(os.Stderr, "Password of %s: ", text.Printable(user))
		b, err := term.ReadPassword(int(os.Stdin.Fd()))
		fmt.Fprintln(os.Stderr)
		if err != nil {
			return nil, fmt.Errorf("read the password: %w", err)
		}
		return &wire.ImageAuth{Username: user, Password: string(b)}, nil
	}
	line, err := bufio.NewReader(io.LimitReader(os.Stdin, maxPassword)).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read the password: %w", err)
	}
	if line = strings.TrimRight(line, "\r\n"); line == "" {
		return nil, errs.New(errs.Invalid, "standard input contains no password")
	}
	return &wire.ImageAuth{Username: user, Password: line}, nil
}
