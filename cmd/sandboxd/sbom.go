package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/internal/release"
	"github.com/sandboxd/sandboxd/internal/sbom"
)

func sbomCommand() *cobra.Command {
	var (
		c    sbom.Content
		file string
	)
	cmd := &cobra.Command{
		Use:   "sbom",
		Short: "Write what is in programs and images: a software bill of materials in CycloneDX's JSON",
		Long: `Write a software bill of materials in CycloneDX's JSON, version 1.6. Of a program of sandboxd it
has the Go modules with their sums and the version of Go, which Go notes in the program. Of an
image it has the distribution and the packages of Debian, Python and npm, which the files of the
image name. An image is the archive that "sandboxctl image export" or "docker save" writes, or a
tar of a root file system. What cannot be read in an image is a property sandboxd:note of the
image.

The same files give the same bytes. The time in the document is SOURCE_DATE_EPOCH, in seconds
since 1970, or else the time of the commit that sandboxd was built from, if Go has noted it.
Programs get the version of the sandboxd that runs.`,
		Example: `  sandboxd sbom --program /usr/bin/sandboxd --program /usr/bin/sandboxctl -o sandboxd.cdx.json
  sandboxd sbom --image build/images/python.tar -o python.cdx.json`,
		Args: cobra.NoArgs,
	}
	cmd.Flags().StringArrayVar(&c.Programs, "program", nil, "Go program (repeatable)")
	cmd.Flags().StringArrayVar(&c.Images, "image", nil, "archive of an image, not compressed (repeatable)")
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write (default standard output)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if len(c.Programs)+len(c.Images) == 0 {
			return usageError{errors.New("sbom: want a --program or an --image")}
		}
		c.Version = release.Version()
		if c.Time, err = sourceTime(); err != nil {
			return usageError{err}
		}
		b, err := sbom.Make(cmd.Context(), c)
		if err != nil {
			return fmt.Errorf("sbom: %w", err)
		}
		if file == "" {
			_, err = cmd.OutOrStdout().Write(b)
			return err
		}
		if err := durable.Write(file, b, 0o644); err != nil {
			return fmt.Errorf("sbom: %w", err)
		}
		return nil
	}
	return cmd
}

// sourceTime is the time of what is released: https://reproducible-builds.org/specs/source-date-epoch/.
// It is zero if nobody says it.
func sourceTime() (time.Time, error) {
	if text := os.Getenv("SOURCE_DATE_EPOCH"); text != "" {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 || n > 253402300799 { // the end of the year 9999
			return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH=%.40q is no number of seconds since 1970", text)
		}
		return time.Unix(n, 0), nil
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return time.Time{}, nil
	}
	stamp := ""
	for _, s := range info.Settings {
		if s.Key == "vcs.time" {
			stamp = s.Value
		}
	}
	t, err := time.Parse(time.RFC3339, cmp.Or(stamp, "0001-01-01T00:00:00Z"))
	return t, err
}
