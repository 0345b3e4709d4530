package system

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newSystemBackups(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "backups",
		Short: "Show and take the backups that the daemon keeps on a timer",
		Long: `Show and take the backups of the daemon's state that it keeps where its configuration says
(backup.target): in a directory, or in S3-compatible storage. "sandboxctl system backup" writes
one to a file, without a target.`,
		Example: `  sandboxctl system backups ls
  sandboxctl system backups now`,
	}
	cmd.AddCommand(newBackupsLs(p), newBackupsNow(p), newBackupsDrill(p), newBackupsStatus(p), newBackupsAdopt(p),
		newBackupsCheck(p), newBackupsRm(p))
	return cmd
}

func newBackupsLs(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the backups on the target, of all hosts that share it",
		Long: `List the backups on the target, of all hosts that share it. Those that are "own" or "adopted" are
counted and removed as the configuration says. "Unknown" are those under the name of this host that
another state has written: see "sandboxctl system backups adopt". "Other" are those of other hosts.`,
		Example: `  sandboxctl system backups ls
  sandboxctl system backups ls -o name | tail -1`,
		Args: cobra.NoArgs,
		RunE: backups.Of(p, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]wire.Backup, error) {
			return cl.System().Backups(ctx)
		}),
	}
	o.Flags(cmd, true)
	return cmd
}

var backups = command.Listing[wire.Backup]{
	Name:   func(b wire.Backup) string { return b.Name },
	Header: []string{"NAME", "TAKEN", "SIZE", "VERIFIED", "WHOSE"},
	Row: func(b wire.Backup) []string {
		verified := "yes"
		if !b.Verified {
			verified = "no"
		}
		return []string{b.Name, text.Ago(b.TakenAt), text.Bytes(max(0, b.Bytes)), verified, b.Whose}
	},
}

func newBackupsNow(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "now",
		Short: "Take a backup now, and print its name",
		Long: `Take a backup now, and print its name. The command returns when the target has stored it, and
it was read back and compared. Old ones are then removed, as backup.keep and backup.max_age say.`,
		Example: `  sandboxctl system backups now`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			b, err := cl.System().BackupNow(ctx)
			if err != nil {
				return err
			}
			return o.One(b, b.Name)
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

func newBackupsDrill(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "drill",
		Short: "Try whether the newest backup can be restored",
		Long: `Restore the newest backup of this host into a directory of its own, open it, and remove it
again. The state of the daemon is not touched. The command fails, and says why, if the backup
cannot be restored, or if this host lacks a key of the secrets in it.`,
		Example: `  sandboxctl system backups drill`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			d, err := cl.System().BackupDrill(ctx)
			if err != nil {
				return err
			}
			return o.One(d, fmt.Sprintf("%s can be restored: sandboxes %d, images %d, secrets %d", d.Backup.Name, d.Sandboxes, d.Images,
				d.Secrets))
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

func newBackupsAdopt(p *command.Program) *cobra.Command {
	var (
		o   command.Output
		all bool
	)
	cmd := &cobra.Command{
		Use:   "adopt NAME... | --all",
		Short: "Make backups that another state has written count as this one's",
		Long: `Make backups that another state has written count as this one's. A state counts and removes only the
backups that it has written itself. After a host was installed again, the backups of its old life
are unknown to the new state: they stay, and "ls" and "status" show them.

NAME is that of a backup, or its owner for all of one state: what is between "sandboxd-" and the number.
--all are all that are unknown. The next backup then rotates them with its own. Do not adopt what another
host still writes, as one that has the same name: restore or copy what is worth keeping before.`,
		Example: `  sandboxctl system backups adopt --all
  sandboxctl system backups adopt a-box-abcdefghijkl2345`,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if all == (len(args) > 0) {
				return errs.New(errs.Invalid, "adopt: want the names of backups, or --all; see sandboxctl system backups adopt --help")
			}
			adopted, err := cl.System().AdoptBackups(ctx, args)
			if err != nil {
				return err
			}
			return backups.Show(os.Stdout, &o, adopted)
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "adopt all that are unknown")
	o.Flags(cmd, true)
	return cmd
}

func newBackupsStatus(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show where backups go, and how the last ones went",
		Example: `  sandboxctl system backups status`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			s, err := cl.System().BackupStatus(ctx)
			if err != nil {
				return err
			}
			if done, err := o.Value(os.Stdout, s, nil); done {
				return err
			}
			_, err = fmt.Println(text.Lines(statusText(s)))
			return err
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

// statusText is a status for people.
func statusText(s wire.BackupStatus) string {
	every := func(seconds int64) string {
		if seconds == 0 {
			return "on request"
		}
		return "every " + (time.Duration(seconds) * time.Second).String()
	}
	out := fmt.Sprintf("target  %s\nowner   %s\nbackup  %s; %s\ndrill   %s; %s", s.Target, s.Owner, every(s.EverySeconds),
		runText(s.Backup), every(s.DrillSeconds), runText(s.Drill))
	if s.AppendOnly {
		out += "\nold     this daemon removes none (backup.append_only): the storage says how long they stay"
	}
	if s.RemovalRefused != "" {
		out += "\nold     none is removed: " + s.RemovalRefused
	}
	if s.PacksKept != "" {
		out += "\npacks   " + s.PacksKept
	}
	if s.Unknown > 0 {
		out += fmt.Sprintf("\nunknown %s under the name of this host that this state has not written:\n"+
			"        not counted, never removed; if no other host writes them: sandboxctl system backups adopt --all",
			errs.Count(s.Unknown, "backup", "backups"))
	}
	if d := s.Data; d != nil {
		out += fmt.Sprintf("\ndata    %s in %s, of which the last backup sent %s", text.Bytes(d.Bytes),
			errs.Count(d.Packs, "pack", "packs"), text.Bytes(d.SentBytes))
		if d.LeftOut > 0 {
			out += fmt.Sprintf("\n        %s could not be read: see the log of sandboxd", errs.Count(d.LeftOut, "volume or snapshot",
				"volumes and snapshots"))
		}
		out += "\ncheck   packs, all within 30 days; " + runText(d.Check)
	}
	return out
}

// runText is how a task has gone.
func runText(r wire.BackupRun) string {
	out := "none yet"
	if r.LastGood != nil {
		out = text.Ago(*r.LastGood)
		if r.Name != "" { // a check of packs has none
			out += ", " + r.Name
		}
	}
	if r.FailingSince != nil {
		out += fmt.Sprintf("\n        fails since %s: %s", r.FailingSince.Local().Format(time.RFC3339), r.Error)
	}
	return out
}
