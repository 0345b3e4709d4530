package system

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newBackupsCheck(p *command.Program) *cobra.Command {
	var (
		o   command.Output
		all bool
	)
	cmd := &cobra.Command{
		Use:   "check NAME... | --all",
		Short: "Read every byte of backups on the target, and say what is damaged",
		Long: `Read every byte of backups on the target, and compare it with its checksums: each backup, its list of
packs, each pack, and, if this host has the key, each list of files and each piece of a file. Each damage
is a line: the backup, the volume, snapshot or layer, the file, and what is wrong. The command fails if
there is one.

NAME is that of a backup, or its owner for all of one state. --all are all on the target, those of other
hosts, too. Backups that this host has no key for are compared with their checksums alone. Backups are
taken meanwhile, and what was in bad packs of this host is sent again by the next one.`,
		Example: `  sandboxctl system backups check --all
  sandboxctl system backups check a-box-abcdefghijkl2345`,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if all == (len(args) > 0) {
				return errs.New(errs.Invalid, "check: want the names of backups, or --all; see sandboxctl system backups check --help")
			}
			return checkBackups(ctx, cl, &o, args)
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "check all backups on the target")
	o.Flags(cmd, true)
	return cmd
}

// checked is the answer as JSON.
type checked struct {
	wire.BackupCheck
	Damages []wire.BackupDamage `json:"damages"`
}

// checkBackups prints each damage as it is found.
func checkBackups(ctx context.Context, cl *client.Client, o *command.Output, names []string) error {
	var bar command.Bar
	if !o.Quiet && command.IsTerminal(os.Stderr) {
		bar.On = os.Stderr
	}
	out, last := checked{Damages: []wire.BackupDamage{}}, ""
	report, err := cl.System().CheckBackups(ctx, names, func(l wire.BackupCheckLine) {
		if l.Progress != nil {
			read := fmt.Sprintf("%s, %s", text.Bytes(l.Progress.Bytes), errs.Count(l.Progress.Packs, "pack", "packs"))
			bar.Count(read, l.Progress.Backups, l.Progress.Of)
			return
		}
		bar.Clear()
		switch {
		case o.Format == command.JSON:
			out.Damages = append(out.Damages, *l.Damage)
		case o.Format == command.Table:
			fmt.Println(damageText(*l.Damage))
		case l.Damage.Backup != last:
			last = l.Damage.Backup
			fmt.Println(text.Printable(last))
		}
	})
	bar.Clear()
	if err != nil {
		return err
	}
	out.BackupCheck = report
	switch o.Format {
	case command.JSON:
		err = text.JSON(os.Stdout, out)
	case command.Table:
		_, err = fmt.Println(reportText(report))
	}
	if err == nil && report.Damaged > 0 {
		err = errs.New(errs.WrongState, "%s damaged; take a new one now, `sandboxctl system backups now`: it sends what was in bad packs "+
			"of this host again; restore from one that is whole", errs.Count(report.Damaged, "backup is", "backups are"))
	}
	return err
}

// damageText is a damage in a line.
func damageText(d wire.BackupDamage) string {
	parts := []string{d.Backup}
	if d.Tree != "" {
		parts = append(parts, d.Tree)
	}
	if d.File != "" {
		parts = append(parts, fmt.Sprintf("%q", d.File))
	}
	return text.Printable(strings.Join(append(parts, d.Problem), ": "))
}

// reportText says what was read.
func reportText(r wire.BackupCheck) string {
	out := fmt.Sprintf("%s of %d and %s read, %s: %d damaged", errs.Count(r.Backups, "backup", "backups"), r.Of,
		errs.Count(r.Packs, "pack", "packs"), text.Bytes(r.Bytes), r.Damaged)
	for _, c := range []struct {
		n    int
		what string
	}{
		{r.Sealed, "compared with checksums alone: this host has no key for them"},
		{r.Partial, "cut short, or being stored now: they count for nothing"},
		{r.Removed, "removed meanwhile"},
	} {
		if c.n > 0 {
			out += fmt.Sprintf("\n%d %s", c.n, c.what)
		}
	}
	return out
}

func newBackupsRm(p *command.Program) *cobra.Command {
	var (
		o     command.Output
		force bool
	)
	cmd := &cobra.Command{
		Use:     "rm [-f] NAME...",
		Aliases: []string{"remove"},
		Short:   "Remove backups of this host from the target, and the data that only they need",
		Long: `Remove backups from the target, and the packs of data that no other backup needs. Only those that are
"own" or "adopted" can be removed, and one that is whole stays: take a new backup before you remove
the last. If one of them may not be removed, none is. A backup that is being taken is waited for.

rm asks before it removes anything. With -f, which it needs where nobody can be asked, it does not. A
target that is append-only (backup.append_only) loses nothing: its storage says how long files stay.`,
		Example: `  sandboxctl system backups rm -f sandboxd-a-box-abcdefghijkl2345-000007-20261127T120000Z.tar.gz`,
		Args:    cobra.MinimumNArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if !force {
				goes := make([]string, len(args))
				for i, name := range args {
					goes[i] = text.Printable(name) + ", and the data that only it needs"
				}
				if err := command.Confirm("sandboxctl system backups ls", goes, nil); err != nil {
					return err
				}
			}
			r, err := cl.System().RemoveBackups(ctx, args)
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, r)
			}
			for _, b := range r.Items {
				fmt.Println(text.Printable(b.Name))
			}
			if r.PacksKept != "" {
				fmt.Fprintln(os.Stderr, "sandboxctl: packs stay until the next backup: "+text.Printable(r.PacksKept))
			}
			return nil
		}),
	}
	o.Flags(cmd, true)
	cmd.Flags().BoolVarP(&force, "force", "f", false, "do not ask")
	return cmd
}
