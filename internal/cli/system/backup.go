package system

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newSystemBackup(p *command.Program) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Write the state of the daemon to a file, while it runs",
		Long: `Write the daemon's state (sandboxes, names, images) to a file, as of one moment, while the
daemon runs. The file contains no files of sandboxes and no image layers. Keep it secret: it
contains the environment of every sandbox. Restore it with "sandboxctl system restore" on the
daemon's host.`,
		Example: `  sandboxctl system backup -o /root/sandboxd-$(date +%F).tar.gz`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			if file == "-" {
				if command.IsTerminal(os.Stdout) {
					return errs.New(errs.Invalid, "--output -: a backup cannot be written to a terminal; use a file or a pipe")
				}
				return cl.System().Backup(ctx, os.Stdout)
			}
			if file == "" {
				file = "sandboxd-backup-" + time.Now().UTC().Format("20060102T150405Z") + ".tar.gz"
			}
			if err := command.WriteFile(file, 0o600, func(w io.Writer) error { return cl.System().Backup(ctx, w) }); err != nil {
				return err
			}
			_, err := fmt.Println(file)
			return err
		}),
	}
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write, - for stdout (default sandboxd-backup-TIME.tar.gz)")
	return cmd
}

// newSystemRestore runs `sandboxd restore`: the daemon is stopped for it, so there
// is nothing to connect to.
func newSystemRestore() *cobra.Command {
	var (
		accept, check          bool
		config, from, identity string
	)
	cmd := &cobra.Command{
		Use:   "restore [FILE]",
		Short: `Restore the state from a backup (runs "sandboxd restore" on this host)`,
		Example: `  sandboxctl system restore /root/sandboxd-2026-11-21.tar.gz
  sandboxctl system restore --from latest --identity /root/backup.key`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for flag, given := range map[string]bool{"--accept": accept, "--check": check} {
				if given {
					args = append(args, flag)
				}
			}
			for flag, value := range map[string]string{"--config": config, "--from": from, "--identity": identity} {
				if value != "" {
					args = append(args, flag, value)
				}
			}
			program, err := exec.LookPath("sandboxd")
			if err != nil {
				return errs.New(errs.Unavailable,
					"sandboxd is not in the PATH of this host; run sandboxd restore FILE on the host of the daemon")
			}
			run := exec.CommandContext(cmd.Context(), program, append([]string{"restore"}, args...)...)
			run.Stdin, run.Stdout, run.Stderr = os.Stdin, os.Stdout, os.Stderr
			err = run.Run()
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				return command.Status{Code: max(exit.ExitCode(), 1)} // it has said why
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&accept, "accept", false, "let the next daemon remove what the restored state does not know")
	cmd.Flags().BoolVar(&check, "check", false, "only try whether the backup can be restored; replace nothing")
	cmd.Flags().StringVar(&from, "from", "", `"latest", or the name of a backup on the target of the configuration`)
	cmd.Flags().StringVar(&identity, "identity", "", "file with a private key of age that opens an encrypted backup")
	cmd.Flags().StringVar(&config, "config", "", "configuration file of the daemon")
	return cmd
}
