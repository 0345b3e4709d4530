// Command sandboxd is the daemon. It runs untrusted code in sandboxes on one
// Linux host and serves the OpenSandbox API; see ARCHITECTURE.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/cli/group"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/internal/release"
	"github.com/sandboxd/sandboxd/internal/sbom"
	"github.com/sandboxd/sandboxd/internal/systemd"
)

func main() {
	verbs := daemon.Confined()
	verbs[sbom.ReadVerb] = sbom.Read
	confine.Main(verbs)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := command()
	group.Strict(root)
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd:", err)
		if errors.As(err, new(usageError)) || errors.As(err, new(*group.Unknown)) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

type usageError struct{ error }

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "sandboxd",
		Short: "Run untrusted code in sandboxes on this host",
		Example: `  sandboxd config init /etc/sandboxd/config.toml
  sandboxd serve --config /etc/sandboxd/config.toml`,
		Version:       release.Version(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(serveCommand(), bundleCommand(), configCommand(), doctorCommand(), escrowCommand(), poolCommand(), restoreCommand(),
		rollbackCommand(), sbomCommand(), settleCommand(), supportCommand(), teardownCommand(), tryCommand(), upgradeCommand(),
		versionsCommand())
	return root
}

// configFlag adds --config to cmd; its value is empty for the defaults alone.
func configFlag(cmd *cobra.Command) *string { return configValue(cmd.Flags()) }

func configValue(flags *pflag.FlagSet) *string {
	path := "/etc/sandboxd/config.toml"
	if _, err := os.Stat(path); err != nil {
		if more, err := config.DropIns(path); err == nil && len(more) == 0 {
			path = ""
		}
	}
	return flags.String("config", path, "configuration file; files of the directory NAME.d beside NAME.toml are read after it")
}

func serveCommand() *cobra.Command {
	var d detached
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon until SIGTERM; sandboxes keep running",
		Example: `  sandboxd serve --config /etc/sandboxd/config.toml
  sandboxd serve --config dev.toml --detach --pid-file pid --log-file sandboxd.log`,
		Args: cobra.NoArgs,
	}
	path := configFlag(cmd)
	cmd.Flags().BoolVar(&d.on, "detach", false, "run in the background; return when the API answers")
	cmd.Flags().StringVar(&d.pidFile, "pid-file", "", "file to write the pid to, with --detach")
	cmd.Flags().StringVar(&d.logFile, "log-file", "", "file to append the log to, with --detach")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if d.on {
			return d.start(*path)
		}
		if err := systemd.Claim(); err != nil {
			return err
		}
		cfg, err := config.Load(*path)
		if err != nil {
			return err
		}
		return daemon.Run(cmd.Context(), cfg, release.Version(), announceReady)
	}
	return cmd
}

func teardownCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "teardown",
		Example: `  sandboxd teardown --config /etc/sandboxd/config.toml`,
		Short:   "Remove all sandboxes and everything of the instance on this host, except images, volumes and configuration",
		Args:    cobra.NoArgs,
	}
	path := configFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := config.Load(*path)
		if err != nil {
			return err
		}
		return daemon.Teardown(cmd.Context(), cfg)
	}
	return cmd
}

func configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "config", Short: "Print or check the configuration",
		Example: `  sandboxd config init /etc/sandboxd/config.toml
  sandboxd config check /etc/sandboxd/config.toml`,
	}
	var all bool
	initCmd := &cobra.Command{
		Use:   "init [FILE]",
		Short: "Write the default configuration, with the reason for each value",
		Long: `Write all keys with their defaults, each commented out, and the reason for each value. What you do
not change is then the default of the release that runs. --defaults leaves them uncommented.`,
		Example: "  sandboxd config init /etc/sandboxd/config.toml",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text := config.Commented()
			if all {
				text = config.Default()
			}
			if len(args) == 0 {
				_, err := cmd.OutOrStdout().Write(text)
				return err
			}
			f, err := os.OpenFile(args[0], os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			if errors.Is(err, os.ErrExist) {
				return fmt.Errorf("config init: %s exists and was not changed; use another file", args[0])
			}
			if err != nil {
				return fmt.Errorf("config init: %w", err)
			}
			_, err = f.Write(text)
			return errors.Join(err, f.Close())
		},
	}
	initCmd.Flags().BoolVar(&all, "defaults", false, "write the keys without comment signs")
	check := &cobra.Command{
		Use:     "check [FILE]",
		Short:   "Read a configuration and the files that it names, and report every problem",
		Example: `  sandboxd config check /etc/sandboxd/config.toml`,
		Args:    cobra.MaximumNArgs(1),
	}
	path := configFlag(check)
	check.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			*path = args[0]
		}
		warnings, err := config.Check(*path)
		for _, w := range warnings {
			fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", w)
		}
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), "ok")
		return err
	}
	cmd.AddCommand(initCmd, check)
	return cmd
}
