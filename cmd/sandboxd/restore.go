package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/daemon"
)

func restoreCommand() *cobra.Command {
	var (
		accept         bool
		from, identity string
	)
	cmd := &cobra.Command{
		Use:   "restore [FILE]",
		Short: "Restore the state from a backup while the daemon is stopped",
		Long: `Replace the present state with the state that "sandboxctl system backup" wrote. The present
state is kept beside it. FILE may be - for standard input. The daemon must be stopped;
sandboxes keep running.

With --from, the backup is read from the target of the configuration (backup.target): "latest"
is the newest of this host, and other names are those of "sandboxctl system backups ls". An
encrypted backup needs the private key of one of its recipients, with --identity.

After a restore, the daemon removes nothing from the host that the backup does not know. While
the host has sandboxes that the backup does not know, the daemon creates no sandbox. Both hold
until "sandboxd restore --accept".`,
		Example: `  systemctl stop sandboxd.socket sandboxd
  sandboxd restore --from latest --identity /root/backup.key
  systemctl start sandboxd
  sandboxctl system info`,
		Args: func(cmd *cobra.Command, args []string) error {
			ways := len(args)
			for _, given := range []bool{accept, from != ""} {
				if given {
					ways++
				}
			}
			if ways == 1 && (identity == "" || !accept) {
				return nil
			}
			return usageError{fmt.Errorf("restore: want FILE, --from or --accept; see sandboxd restore --help")}
		},
	}
	path := configFlag(cmd)
	cmd.Flags().BoolVar(&accept, "accept", false, "let the next daemon remove what the restored state does not know")
	cmd.Flags().StringVar(&from, "from", "", `"latest", or the name of a backup on the target of the configuration`)
	cmd.Flags().StringVar(&identity, "identity", "", "file with a private key of age (mode 0600) that opens an encrypted backup")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := config.Load(*path)
		if err != nil {
			return err
		}
		if accept {
			return daemon.AcceptRestored(cmd.Context(), cfg, cmd.OutOrStdout())
		}
		var ids backup.Identities
		if identity != "" {
			if ids, err = backup.ReadIdentities(identity); err != nil {
				return fmt.Errorf("restore: %w", err)
			}
		}
		if from != "" {
			return daemon.RestoreFrom(cmd.Context(), cfg, from, ids, cmd.OutOrStdout())
		}
		in := io.Reader(os.Stdin)
		if args[0] != "-" {
			f, err := os.Open(args[0])
			if err != nil {
				return fmt.Errorf("restore: %w", err)
			}
			defer f.Close()
			in = f
		}
		return daemon.Restore(cmd.Context(), cfg, in, ids, cmd.OutOrStdout())
	}
	return cmd
}
