package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/daemon"
)

// A restoring is what an operator asks of "sandboxd restore".
type restoring struct {
	accept, check  bool
	acceptPool     bool
	noData         bool
	from, identity string
}

func restoreCommand() *cobra.Command {
	var r restoring
	cmd := &cobra.Command{
		Use:   "restore [FILE]",
		Short: "Restore the state from a backup while the daemon is stopped",
		Long: `Replace the present state with the state that "sandboxctl system backup" wrote. The present
state is kept beside it. FILE may be - for standard input. The daemon must be stopped;
sandboxes keep running.

With --from, the backup is read from the target of the configuration (backup.target): "latest"
is the newest of this host, and other names are those of "sandboxctl system backups ls". If the
target has backups of several states under the name of this host, as after it was installed again,
"latest" is refused, and the error names the newest of each. An encrypted backup needs the private key of one of its recipients, with --identity, or that of
backup.identity.

A backup with data (backup.data) also brings back volumes, files of snapshots, and layers of images,
from the target of the configuration. What is on the host already stays as it is. If a part cannot
be restored, the error says which and why; the same command goes on where it was.

With --check, nothing is replaced: the backup is restored into a temporary directory ($TMPDIR),
opened, and removed again. The daemon may run meanwhile. It needs no daemon and no state, so a
machine that has the private key can do it. Of data, the index, the lists of files and a sample are
read, if the configuration names the target.

After a restore, the daemon removes nothing from the host that the backup does not know. While
the host has sandboxes that the backup does not know, the daemon creates no sandbox. Both hold
until "sandboxd restore --accept".

With --accept-pool, the storage pool that is there becomes that of the state, whose own is lost.
Sandboxes whose disks are gone end as disk_lost, snapshots fail, and volumes are named.`,
		Example: `  systemctl stop sandboxd.socket sandboxd
  sandboxd restore --from latest --identity /root/backup.key
  systemctl start sandboxd
  sandboxctl system info`,
		Args: func(_ *cobra.Command, args []string) error {
			return r.validate(args)
		},
	}
	path := configFlag(cmd)
	cmd.Flags().BoolVar(&r.accept, "accept", false, "let the next daemon remove what the restored state does not know")
	cmd.Flags().BoolVar(&r.acceptPool, "accept-pool", false, "give up the lost storage pool of the state for the one that is there")
	cmd.Flags().BoolVar(&r.check, "check", false, "only try whether the backup can be restored; replace nothing")
	cmd.Flags().BoolVar(&r.noData, "no-data", false, "restore the records alone, of a backup with data, too")
	cmd.Flags().StringVar(&r.from, "from", "", `"latest", or the name of a backup on the target of the configuration`)
	cmd.Flags().StringVar(&r.identity, "identity", "", "file with a private key of age (mode 0600) that opens an encrypted backup")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := config.Load(*path)
		if err != nil {
			return err
		}
		if r.accept {
			return daemon.AcceptRestored(cmd.Context(), cfg, cmd.OutOrStdout())
		}
		if r.acceptPool {
			return daemon.AcceptPool(cmd.Context(), cfg, cmd.OutOrStdout())
		}
		return r.run(cmd.Context(), cfg, args, cmd.OutOrStdout())
	}
	return cmd
}

func (r *restoring) validate(args []string) error {
	ways := len(args)
	for _, given := range []bool{r.accept, r.acceptPool, r.from != ""} {
		if given {
			ways++
		}
	}
	if ways == 1 && !((r.accept || r.acceptPool) && (r.check || r.identity != "")) {
		return nil
	}
	return usageError{fmt.Errorf("restore: want FILE, --from, --accept or --accept-pool; see sandboxd restore --help")}
}

// run restores, or tries whether it could.
func (r *restoring) run(ctx context.Context, cfg *config.Config, args []string, out io.Writer) error {
	ids, err := identitiesOf(cfg, r.identity)
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	in := io.ReadCloser(os.Stdin)
	switch {
	case r.from != "":
		var name string
		if in, name, err = daemon.OpenBackup(ctx, cfg, ids, r.from); err == nil {
			fmt.Fprintf(out, "reading %s from %s\n", name, cfg.Backup.Target)
		}
	case args[0] != "-":
		in, err = os.Open(args[0])
	}
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	defer in.Close() //nolint:errcheck // read only
	if r.check {
		return daemon.CheckBackup(ctx, cfg, in, ids, out)
	}
	return daemon.Restore(ctx, cfg, in, ids, r.noData, out)
}

// identitiesOf reads the private keys for encrypted backups: those of the flag, or else those of
// the configuration, if this process can read them.
func identitiesOf(cfg *config.Config, flag string) (backup.Identities, error) {
	switch {
	case flag != "":
		return backup.ReadIdentities(flag)
	case cfg.Backup.Identity == config.Identity: // it is the service's
		return nil, nil
	}
	return cfg.Backup.Identities()
}
