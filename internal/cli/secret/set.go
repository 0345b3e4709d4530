package secret

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// sourceFlags say where the value of a secret is.
type sourceFlags struct {
	file        string
	fromFile    string
	fromCommand bool
	cache       time.Duration
	env         string
	given       func(string) bool
}

func newSet(p *command.Program) *cobra.Command {
	var (
		o command.Output
		s sourceFlags
	)
	cmd := &cobra.Command{
		Use:   "set [flags] SANDBOX SECRET [-- COMMAND [ARG...]]",
		Short: "Give a sandbox a secret, or replace its value, and print its name",
		Long: `Give a sandbox a secret, or replace its value, and print its name. A replaced value is used
from the next request on; bindings and placeholder stay.

The value is read from standard input, or from a file of this machine (--file), and not
from an argument, which other users could see. A line end at its end is left out. On a
terminal it is asked for and not shown. No command prints it again.

With --env, commands of the sandbox have the placeholder of the secret in that variable,
from the next command on, so programs that want a key there start and send it. Another
value does not change the variable; --env '' removes it.

With --from-file or --from-command the value stays on the daemon's host: it is read there
when it is needed. Only the administrator of that host, who uses the Unix socket, can name
its files and commands.`,
		Example: `  sandboxctl secret set lab token < token.txt
  sandboxctl secret set lab deploy-key --file id_ed25519
  sandboxctl secret set lab github --env GITHUB_TOKEN < token.txt
  sandboxctl secret set lab token --from-file /etc/sandboxd/tokens/api
  sandboxctl secret set lab token --from-command --cache 5m -- /usr/local/bin/new-token --short`,
		Args: cobra.MinimumNArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			source, err := s.source(args[1], args[2:])
			if err != nil {
				return err
			}
			c := wire.NewCredential{Name: args[1], Source: source}
			if s.given("env") {
				c.Env = &s.env
			}
			v, err := put(ctx, cl.Vault(args[0]), c)
			if err != nil {
				return err
			}
			return o.One(v, args[1])
		}),
	}
	o.Flags(cmd, true)
	f := cmd.Flags()
	f.StringVar(&s.file, "file", "", "file of this machine with the value, or - for standard input (default -)")
	f.StringVar(&s.fromFile, "from-file", "", "absolute path of a file of the daemon's host, which is read when the secret is used")
	f.BoolVar(&s.fromCommand, "from-command", false, "COMMAND of the daemon's host prints the value; it runs as root, without a shell")
	command.DurationFlag(f, &s.cache, "cache", "", time.Minute,
		"with --from-file and --from-command: how long a value is used before it is read again")
	f.StringVar(&s.env, "env", "", "variable of the sandbox's commands that has the placeholder, such as API_TOKEN")
	s.given = f.Changed
	return cmd
}

// source reads the value, or says where the daemon is to read it.
func (s *sourceFlags) source(name string, argv []string) (out wire.CredentialSource, err error) {
	ways := 0
	for _, on := range []bool{s.file != "", s.fromFile != "", s.fromCommand} {
		if on {
			ways++
		}
	}
	switch {
	case ways > 1:
		return out, errs.New(errs.Invalid, "--file, --from-file and --from-command exclude each other")
	case s.fromCommand && len(argv) == 0:
		return out, errs.New(errs.Invalid, "--from-command needs a command after --, such as: sandboxctl secret set --from-command lab "+
			"token -- /usr/local/bin/new-token")
	case !s.fromCommand && len(argv) > 0: // a value, perhaps: it is not repeated
		return out, errs.New(errs.Invalid, "an argument follows the name of the secret; a value is not given as an argument, where other "+
			"users see it: write it to standard input, or use --file")
	case s.given("cache") && s.fromFile == "" && !s.fromCommand:
		return out, errs.New(errs.Invalid, "--cache is for --from-file and --from-command")
	case s.cache < 0 || s.cache%time.Second != 0:
		return out, errs.New(errs.Invalid, "--cache %s: want whole seconds, such as 30s or 5m", s.cache)
	}
	seconds := int64(s.cache / time.Second)
	switch {
	case s.fromFile != "":
		return wire.CredentialSource{Type: "file", Path: s.fromFile, CacheSeconds: &seconds}, nil
	case s.fromCommand:
		return wire.CredentialSource{Type: "command", Argv: argv, CacheSeconds: &seconds}, nil
	}
	value, err := s.read(name)
	return wire.CredentialSource{Type: "inline", Value: value}, err
}

// maxValue is how long a value may be, in bytes. The daemon holds it; this one bounds what is
// read here.
const maxValue = 64 << 10

// read reads the value from standard input, a terminal or a file. Its errors have none of it.
func (s *sourceFlags) read(name string) (string, error) {
	in, from := os.Stdin, "standard input"
	if s.file != "" && s.file != "-" {
		f, err := os.Open(s.file)
		if err != nil {
			return "", errs.Wrap(err, errs.Invalid, "--file: %s", err)
		}
		defer f.Close()
		in, from = f, text.Clip(s.file, 80)
	}
	b, err := readValue(in, name)
	if err != nil {
		return "", errs.Wrap(err, errs.Invalid, "read the value of secret %s from %s: %s", text.Clip(name, 80), from, err)
	}
	if len(b) > maxValue+len("\r\n") {
		return "", errs.New(errs.Invalid, "%s has more than %s; no secret is that long", from, text.Bytes(maxValue))
	}
	b = bytes.TrimSuffix(bytes.TrimSuffix(b, []byte("\n")), []byte("\r"))
	switch {
	case len(b) == 0:
		return "", errs.New(errs.Invalid, "%s has no value for secret %s: it is empty", from, text.Clip(name, 80))
	case !utf8.Valid(b):
		return "", errs.New(errs.Invalid, "%s is not UTF-8 text, which a secret is; encode it, for example as base64", from)
	}
	return string(b), nil
}

// readValue reads a little more than a value may have; on a terminal a line that is not shown.
func readValue(in *os.File, name string) ([]byte, error) {
	if !command.IsTerminal(in) {
		return io.ReadAll(io.LimitReader(in, maxValue+3))
	}
	fmt.Fprintf(os.Stderr, "Value of %s: ", text.Printable(name))
	b, err := term.ReadPassword(int(in.Fd()))
	fmt.Fprintln(os.Stderr)
	return b, err
}

// put adds or replaces a credential, in a vault that it makes if there is none.
func put(ctx context.Context, v client.Vault, c wire.NewCredential) (wire.CredentialVault, error) {
	change := func(now wire.CredentialVault) wire.CredentialVaultPatch {
		if slices.ContainsFunc(now.Credentials, func(o wire.Credential) bool { return o.Name == c.Name }) {
			return wire.CredentialVaultPatch{Credentials: &wire.CredentialChanges{Replace: []wire.NewCredential{c}}}
		}
		return wire.CredentialVaultPatch{Credentials: &wire.CredentialChanges{Add: []wire.NewCredential{c}}}
	}
	out, err := edit(ctx, v, change)
	if !client.NoVault(err) {
		return out, err
	}
	out, err = v.Create(ctx, wire.CredentialVaultRequest{Credentials: []wire.NewCredential{c}, Bindings: []wire.NewBinding{}})
	if errs.Is(err, errs.Exists) { // somebody else has made it
		return edit(ctx, v, change)
	}
	return out, err
}
