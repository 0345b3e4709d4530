package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/daemon"
)

func restoreCommand() *cobra.Command {
	var accept bool
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Restore the state from a backup while the daemon is stopped",
		Long: `Replace the present state with the state that "sandboxctl system backup" wrote. The present
state is kept beside it. FILE may be - for standard input. The daemon must be stopped;
sandboxes keep running.

After a restore, the daemon removes nothing from the host that the backup does not know. While
the host has sandboxes that the backup does not know, the daemon creates no sandbox. Both hold
until "sandboxd restore --accept".`,
		Example: `  systemctl stop sandboxd.socket sandboxd
  sandboxd restore sandboxd-backup.tar.gz
  systemctl start sandboxd
  sandboxctl system info`,
		Args: func(cmd *cobra.Command, args []string) error {
			if accept == (len(args) == 0) && len(args) <= 1 {
				return nil
			}
			return usageError{fmt.Errorf("restore: want FILE, or --accept; see sandboxd restore --help")}
		},
	}
	path := configFlag(cmd)
	cmd.Flags().BoolVar(&accept, "accept", false, "let the next daemon remove what the restored state does not know")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := config.Load(*path)
		if err != nil {
			return err
		}
		if accept {
			return daemon.AcceptRestored(cmd.Context(), cfg, cmd.OutOrStdout())
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
		return daemon.Restore(cmd.Context(), cfg, in, cmd.OutOrStdout())
	}
	return cmd
}
