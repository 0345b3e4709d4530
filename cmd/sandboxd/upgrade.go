package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/appliance"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/internal/systemd"
	"github.com/sandboxd/sandboxd/internal/upgrade"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// changing are the flags of commands that change the version.
type changing struct {
	config, root, restart string
	limit, soak           time.Duration

	given func(flag string) bool
}

// changeFlags adds the flags. Without --gate and --soak the configuration counts.
func changeFlags(cmd *cobra.Command) *changing {
	c := &changing{given: cmd.Flags().Changed}
	f := cmd.Flags()
	path := "/etc/sandboxd/config.toml"
	if _, err := os.Stat(path); err != nil {
		path = ""
	}
	f.StringVar(&c.config, "config", path, "configuration file of the daemon")
	f.StringVar(&c.root, "root", string(versions.Default), "directory with the versions")
	f.StringVar(&c.restart, "restart", "", "shell command that restarts the daemon and returns when it serves "+
		"(default: systemctl, if systemd is init)")
	f.DurationVar(&c.limit, "gate", 0, "how long the new version may take to start and to be found good "+
		"(default: upgrade.gate of the configuration)")
	f.DurationVar(&c.soak, "soak", 0, "for how long after that a crash of the new version still goes back; 0: not at all "+
		"(default: upgrade.soak of the configuration; a rollback has none)")
	return c
}

// change is the change that the flags and the configuration describe.
func (c *changing) change(cfg *config.Config, out io.Writer) (ch upgrade.Change, err error) {
	ch = upgrade.Change{
		Root: versions.Root(c.root), Config: c.config, Limit: time.Duration(cfg.Upgrade.Gate), Soak: time.Duration(cfg.Upgrade.Soak),
		Out: out,
	}
	if c.given("gate") {
		ch.Limit = c.limit
	}
	if c.given("soak") {
		ch.Soak = c.soak
	}
	if ch.Client, err = client.New("unix://"+cfg.Listen.Socket, ""); err != nil {
		return ch, err
	}
	switch {
	case c.restart != "":
		ch.Restart = func(ctx context.Context) error {
			_, err := shell(ctx, c.restart)
			return err
		}
	case systemd.Booted():
		ch.Units = "/usr/lib/systemd/system"
		ch.Restart = restartService
	default:
		return ch, usageError{errors.New("systemd is not init here, so it is not known how the daemon is restarted: " +
			"give the command with --restart")}
	}
	return ch, nil
}

// restartService has systemd restart the daemon. If ctx ends, systemd goes on with that until it is
// asked again, which makes it give up the daemon that does not come up.
func restartService(ctx context.Context) error {
	// A service that systemd has given up does not start before that is reset.
	_, err := shell(ctx, "systemctl daemon-reload && { systemctl reset-failed sandboxd.socket sandboxd.service 2>/dev/null; "+
		"systemctl restart sandboxd.service; }")
	if err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	said, noLog := shell(ctx, "journalctl --unit sandboxd.service --lines 5 --output cat --no-pager")
	return errors.Join(fmt.Errorf("%w; the service's log ends with:\n%s", err, said), noLog)
}

// shell runs a command, and returns what it says. When ctx ends, the command does, with all that it has
// started in its process group.
func shell(ctx context.Context, command string) (said string, err error) {
	// No pipe: what the command leaves running may have its output open.
	fd, err := unix.MemfdCreate("output", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return "", os.NewSyscallError("memfd_create", err)
	}
	output := os.NewFile(uintptr(fd), "output")
	defer output.Close()
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Stdout, cmd.Stderr = output, output
	// What reads the terminal's Control-C is this process: it goes back in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error {
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); err != syscall.ESRCH {
			return err
		}
		return os.ErrProcessDone
	}
	err = cmd.Run()
	// What is left running cannot write more.
	_, sealErr := unix.FcntlInt(output.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	b, readErr := io.ReadAll(io.NewSectionReader(output, 0, maxSaid))
	said = strings.TrimSpace(string(b))
	if err != nil {
		return said, fmt.Errorf("%s: %w: %s", command, err, said)
	}
	return said, errors.Join(os.NewSyscallError("F_ADD_SEALS", sealErr), readErr)
}

// maxSaid is how much of what a command says is shown, in bytes.
const maxSaid = 64 << 10

func upgradeCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "upgrade FILE",
		Short: "Change to the release of a bundle; sandboxes run on, and a release that is not good is undone",
		Long: `Check the bundle as "sandboxd bundle verify" does, put its release beside the present one, and let
the new release check the configuration, the host and a copy of the state. Nothing has changed
until here. Then restart the daemon as the new release. It is good if it is healthy, if each
sandbox that answered before answers again, and if a new sandbox comes up on each runtime. If not,
or if it takes longer than --gate, the release of before runs again, with its state. It does so, too,
if the new one crashes within --soak after that. A release that has brought the state forward to a
newer schema has no such time: to go back would lose what was changed since.

Sandboxes and their commands run on meanwhile. A power cut or a kill at any moment leads to one of
both releases, and the next start of the service finishes it.

At the end the packages and images of the bundle are installed. "sandboxd rollback" goes back.`,
		Example: `  sandboxd upgrade sandboxd-1.3.0.bundle
  sandboxd versions`,
		Args: cobra.ExactArgs(1),
	}
	c := changeFlags(cmd)
	keys := keyFlag(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "accept a version older than the present one")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		trusted, err := readKeys(*keys)
		if err != nil {
			return fmt.Errorf("upgrade: %w", err)
		}
		cfg, err := config.Load(c.config)
		if err != nil {
			return fmt.Errorf("upgrade: %w", err)
		}
		change, err := c.change(cfg, cmd.OutOrStdout())
		if err != nil {
			return fmt.Errorf("upgrade: %w", err)
		}
		err = appliance.Upgrade(cmd.Context(), appliance.Order{
			File: args[0], Keys: trusted, Force: force, Lacks: func(context.Context) []string { return nil }, Out: cmd.OutOrStdout(),
			Work: cmp.Or(os.Getenv("TMPDIR"), "/var/tmp"),
		}, change)
		if err != nil {
			return fmt.Errorf("upgrade: %w", err)
		}
		return nil
	}
	return cmd
}

// tryCommand is what the scripts of the packages call, by the program of the new version.
func tryCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "try VERSION", Short: "Change to a version that a package has put there; the packages call it", Hidden: true,
		Args: cobra.ExactArgs(1),
	}
	c := changeFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := config.Load(c.config)
		if err != nil {
			return fmt.Errorf("try: nothing was changed: %w", err)
		}
		change, err := c.change(cfg, cmd.OutOrStdout())
		if err != nil {
			return fmt.Errorf("try: %w", err)
		}
		change.To = args[0]
		do := change.Run
		if !cfg.Upgrade.Packages {
			do = change.Take
		}
		if err := change.Root.WaitFor(cmd.Context(), lockLimit); err != nil {
			return fmt.Errorf("try: nothing was changed: %w", err)
		}
		if err := do(cmd.Context()); err != nil {
			return fmt.Errorf("try: %w", err)
		}
		return nil
	}
	return cmd
}

// lockLimit is how long a trial waits for the lock: a daemon has it while it removes versions.
var lockLimit = 30 * time.Second

func rollbackCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rollback [VERSION]",
		Short: "Change to the version that ran before",
		Long: `Change to the version that ran before, or to another one that "sandboxd versions" lists, as "sandboxd
upgrade" changes to a new one: sandboxes run on, and a version that is not good is undone.

A version that cannot read the present state is refused. The package manager keeps its record of
the newer package; installing that again changes to it again.`,
		Example: `  sandboxd rollback`,
		Args:    cobra.MaximumNArgs(1),
	}
	c := changeFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := config.Load(c.config)
		if err != nil {
			return fmt.Errorf("rollback: %w", err)
		}
		cfg.Upgrade.Soak = 0
		change, err := c.change(cfg, cmd.OutOrStdout())
		if err != nil {
			return fmt.Errorf("rollback: %w", err)
		}
		if len(args) == 1 {
			change.To = args[0]
		} else if change.To, err = change.Root.Named(versions.Previous); err != nil {
			return fmt.Errorf("rollback: %w", err)
		}
		if change.To == "" {
			return errors.New("rollback: no version ran before the present one; sandboxd versions lists those that are there")
		}
		if err := change.Run(cmd.Context()); err != nil {
			return fmt.Errorf("rollback: %w", err)
		}
		return nil
	}
	return cmd
}

// listed is a version in JSON.
type listed struct {
	Version string `json:"version"`
	Schema  int    `json:"schema"` // newest schema of the state that it reads; 0: unknown
	Role    string `json:"role"`   // "current", "previous" or ""
}

func versionsCommand() *cobra.Command {
	var root, format string
	cmd := &cobra.Command{
		Use:   "versions",
		Short: "List the versions of sandboxd that are on this host",
		Long: `List the versions that are on this host: the current one, the one before, and those that running
sandboxes or kept memory need. The form of the JSON is stable.`,
		Example: `  sandboxd versions`,
		Args:    cobra.NoArgs,
	}
	cmd.Flags().StringVar(&root, "root", string(versions.Default), "directory with the versions")
	cmd.Flags().StringVarP(&format, "output", "o", "table", "output format: table or json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := knownFormat(format); err != nil {
			return err
		}
		all, last, err := list(versions.Root(root))
		if err != nil {
			return fmt.Errorf("versions: %w", err)
		}
		if format == "json" {
			return text.JSON(cmd.OutOrStdout(), all)
		}
		if len(all) == 0 {
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s has no versions: this sandboxd was not installed by a package\n", root)
			return err
		}
		var rows [][]string
		for _, v := range all {
			rows = append(rows, []string{v.Version, cmp.Or(v.Role, "-"), fmt.Sprint(v.Schema)})
		}
		if err := text.Table(cmd.OutOrStdout(), []string{"VERSION", "ROLE", "SCHEMA"}, rows); err != nil {
			return err
		}
		if last.Soaks(time.Now()) {
			fmt.Fprintf(cmd.OutOrStdout(), "\nif %s crashes before %s, %s runs again by itself\n",
				last.To, last.SoakUntil.Format(time.RFC3339), last.From)
		}
		if last != nil && last.Step == versions.Undone {
			fmt.Fprintf(cmd.OutOrStdout(), "\nthe change to %s was undone at %s: %s\n",
				last.To, last.Ended.Format(time.RFC3339), last.Reason)
		}
		return nil
	}
	return cmd
}

func list(r versions.Root) (all []listed, last *versions.Journal, err error) {
	there, err := r.List()
	if err != nil {
		return nil, nil, err
	}
	roles := map[string]string{}
	for _, l := range []versions.Link{versions.Previous, versions.Current} {
		version, err := r.Named(l)
		if err != nil {
			return nil, nil, err
		}
		roles[version] = string(l)
	}
	all = []listed{}
	for _, v := range there {
		all = append(all, listed{v.Name, v.Schema, roles[v.Name]})
	}
	last, err = r.Journal()
	return all, last, err
}

// settleCommand is what the service's unit calls before each start, by the program of the version
// that ran before the one on trial.
func settleCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "settle", Short: "Undo a change of the version that was interrupted; the service calls it", Hidden: true,
		Args: cobra.NoArgs,
	}
	path := configFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := config.Load(*path)
		if err != nil {
			return err
		}
		return daemon.Settle(cmd.Context(), cfg)
	}
	return cmd
}
