package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/doctor"
)

func doctorCommand() *cobra.Command {
	var (
		fix        bool
		format     string
		advisories string
	)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check that this host has what sandboxd needs, and print a fix for each problem",
		Long: `Check that this host has what sandboxd needs: features of the kernel, host limits that
suffice for limits.max_sandboxes, and other settings and software of the host. For each check
that is not ok, doctor prints the command that fixes it. It works with and without a running
daemon. The exit status is 1 if a check fails.

Without --config and without /etc/sandboxd/config.toml, doctor reads the configuration of the
daemon that runs, such as the development daemon, if there is only one. The first line says
what was read.

doctor compares the versions of the kernel, of runc and of gVisor with a table of known flaws,
and prints the table's date. The built-in table is as old as the release. A newer one in
/etc/sandboxd/advisories.toml, or in the file that --advisories names, replaces it; its form is
in docs/operations.md.

--fix sets sysctls, saves them in /etc/sysctl.d/60-sandboxd.conf, and loads modules. It
changes nothing else.`,
		Example: `  sandboxd doctor
  sandboxd doctor --fix
  sandboxd doctor --advisories advisories.toml`,
		Args: cobra.NoArgs,
	}
	path := configFlag(cmd)
	cmd.Flags().BoolVar(&fix, "fix", false, "set sysctls and load modules")
	cmd.Flags().StringVar(&advisories, "advisories", "", "file with the table of known flaws (default "+doctor.AdvisoriesFile+
		", or else the built-in table)")
	cmd.Flags().StringVarP(&format, "output", "o", "table", "output format: table or json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if format != "table" && format != "json" {
			return usageError{fmt.Errorf("--output %q: want table or json", format)}
		}
		cfg, read, err := doctor.Read(*path)
		if err != nil {
			return err
		}
		found := doctor.Examine(cmd.Context(), cfg, advisories)
		if fix {
			found, err = doctor.Mend(cmd.Context(), cfg, advisories, found)
		}
		found = append([]doctor.Finding{read}, found...)
		return errors.Join(err, printFindings(cmd.OutOrStdout(), found, format), verdict(found))
	}
	return cmd
}

func printFindings(w io.Writer, found []doctor.Finding, format string) error {
	if format == "json" {
		e := json.NewEncoder(w)
		e.SetEscapeHTML(false)
		e.SetIndent("", "  ")
		return e.Encode(found)
	}
	width := 0
	for _, f := range found {
		width = max(width, len(f.Check))
	}
	for _, f := range found {
		fmt.Fprintf(w, "%-7s  %-*s  %s\n", f.Status, width, f.Check, f.Detail)
		note := func(what, text string) { fmt.Fprintf(w, "%-7s  %-*s  %s %s\n", "", width, "", what, text) }
		if f.Fixed != "" {
			note("done:", f.Fixed)
		}
		if f.Status == doctor.OK {
			continue
		}
		note("for:", f.Protects)
		switch {
		case f.Fixed != "" && f.Fixable(): // done, and not enough
		case f.Mend != "" && f.Fixable():
			note("fix:", f.Mend+"   (or sandboxd doctor --fix)")
		case f.Mend != "":
			note("fix:", f.Mend)
		}
	}
	return nil
}

// verdict is the error that makes the exit status 1: what was mended in vain
// has still failed.
func verdict(found []doctor.Finding) error {
	n := 0
	for _, f := range found {
		if f.Status == doctor.Fail {
			n++
		}
	}
	if n > 0 {
		return fmt.Errorf("doctor: %d of %d checks failed", n, len(found))
	}
	return nil
}
