package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/appliance"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/doctor"
)

func bundleInstallCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "install FILE",
		Short: "Check a bundle, and install its packages and images on this host",
		Long: `Check the bundle as "sandboxd bundle verify" does, and install its packages with dpkg or rpm. Then
import its images, if the daemon runs. "sh FILE" does the same on a host that has no sandboxd:
it runs the program in the bundle.

A bundle that no trusted key signed, that was changed, that is for another host or that is older
than the installed sandboxd is refused before anything is written. If the host lacks packages or
features of the kernel, all of them are printed, and nothing is installed.

The packages and images are unpacked to TMPDIR or /var/tmp meanwhile.`,
		Example: `  sh sandboxd-1.2.0.bundle --key bundle.pub
  sandboxd bundle install sandboxd-1.2.0.bundle`,
		Args: cobra.ExactArgs(1),
	}
	keys := keyFlag(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "accept a version older than the installed one")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		trusted, err := readKeys(*keys)
		if err != nil {
			return fmt.Errorf("bundle install: %w", err)
		}
		err = appliance.Install(cmd.Context(), appliance.Order{
			File: args[0], Keys: trusted, Force: force, Lacks: hostLacks, Out: cmd.OutOrStdout(),
			Work: cmp.Or(os.Getenv("TMPDIR"), "/var/tmp"),
		})
		if err != nil {
			return fmt.Errorf("bundle install: %w", err)
		}
		if _, err := os.Stat(bundleKey); errors.Is(err, fs.ErrNotExist) {
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is missing: copy the public key there, and the next bundle needs no --key\n",
				bundleKey)
			return err
		}
		return nil
	}
	return cmd
}

// hostLacks is what the doctor finds, for the present configuration or the default one.
func hostLacks(ctx context.Context) (lacking []string) {
	path := "/etc/sandboxd/config.toml"
	if _, err := os.Stat(path); err != nil {
		path = ""
	}
	cfg, err := config.Load(path)
	if err != nil {
		return []string{fmt.Sprintf("a configuration that can be read: %v", err)}
	}
	for _, f := range doctor.Bare(ctx, cfg) {
		lacking = append(lacking, f.Detail+"; fix: "+f.Mend)
	}
	return lacking
}
