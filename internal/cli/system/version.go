package system

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newVersion(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of sandboxctl and of the daemon",
		Example: `  sandboxctl version
  sandboxctl version -o json | jq -r .daemon.version`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			v, err := cl.Version(ctx)
			if err == nil {
				own := map[string]string{"version": p.Version, "go": runtime.Version()}
				done, err := o.Value(os.Stdout, map[string]any{"client": own, "daemon": v}, command.Fields{
					"Client": map[string]any{"Version": p.Version}, "Server": map[string]any{"Version": v.Version},
				})
				if done {
					return err
				}
			}
			fmt.Printf("sandboxctl %s (%s)\n", p.Version, runtime.Version())
			if err != nil {
				return err
			}
			_, err = fmt.Println(text.Printable(fmt.Sprintf("sandboxd   %s (%s), instance %s, runtimes %s",
				v.Version, v.Go, v.Instance, strings.Join(v.Runtimes, " "))))
			return err
		}),
	}
	o.Flags(cmd, false)
	o.FormatFlag(cmd, command.Fields{"Client": nil, "Server": nil})
	return cmd
}
