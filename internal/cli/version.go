package cli

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
)

func newVersion(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of sandboxctl and of the daemon",
		Example: `  sandboxctl version
  sandboxctl version -o json | jq -r .daemon.version`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			v, err := cl.Version(cmd.Context())
			if o.format == "json" && err == nil {
				return printJSON(os.Stdout, map[string]any{"client": map[string]string{"version": c.version, "go": runtime.Version()}, "daemon": v})
			}
			fmt.Printf("sandboxctl %s (%s)\n", c.version, runtime.Version())
			if err != nil {
				return err
			}
			_, err = fmt.Println(printable(fmt.Sprintf("sandboxd   %s (%s), instance %s, runtimes %s", v.Version, v.Go, v.Instance, strings.Join(v.Runtimes, " ")), false))
			return err
		},
	}
	o.flags(cmd, false)
	return cmd
}
