package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/release"
	"github.com/sandboxd/sandboxd/internal/support"
)

func supportCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "support-bundle",
		Short: "Write a file for a bug report, without secrets",
		Long: `Write the findings of the doctor, versions, the configuration, the states of sandboxes, and the
log's operations, warnings and errors to a file. The file contains no environments, arguments,
labels or output of sandboxes, and no keys and tokens. The log in it leaves out everything that
clients sent and guests did; the README in the file states the limits of that. Read the file
before you send it.`,
		Example: `  sandboxd support-bundle -o report.tar.gz`,
		Args:    cobra.NoArgs,
	}
	path := configFlag(cmd)
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write (default sandboxd-support-TIME.tar.gz)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := config.Load(*path)
		if err != nil {
			return err
		}
		if file == "" {
			file = "sandboxd-support-" + time.Now().UTC().Format("20060102T150405Z") + ".tar.gz"
		}
		f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("support-bundle: %w", err)
		}
		if err := errors.Join(support.Write(cmd.Context(), f, cfg, release.Version()), f.Close()); err != nil {
			return errors.Join(fmt.Errorf("support-bundle: %w", err), os.Remove(file))
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), file)
		return err
	}
	return cmd
}
