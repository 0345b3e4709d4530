package observe

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newEvents(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print events of sandboxes as they happen",
		Long: `Print events of sandboxes as they happen, until interrupted. With -o json each line is
an object, because the output has no end; commands that end print one object or one array.

When the daemon is restarted, events waits for it and goes on with what happened
meanwhile. An event of the type "lost" says that some are missing.`,
		Example: `  sandboxctl events
  sandboxctl events -o json | jq -r 'select(.reason == "oom").id'`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			for ev, err := range cl.Events(ctx, command.Notices()) {
				if err != nil {
					if ctx.Err() != nil {
						return context.Canceled
					}
					return err
				}
				switch o.Format {
				case command.JSON: // one a line
					if err := text.JSONLine(os.Stdout, ev); err != nil {
						return err
					}
				case command.Name:
					fmt.Println(text.Printable(ev.ID))
				default:
					line := fmt.Sprintf("%s %s %s", ev.Time.Local().Format(time.RFC3339), ev.ID, ev.Type)
					for _, more := range []string{ev.Name, ev.Reason, ev.Message} {
						if more != "" {
							line += " " + more
						}
					}
					fmt.Fprintln(os.Stdout, text.Printable(line))
				}
			}
			return nil
		}),
	}
	o.Flags(cmd, false)
	cmd.Flags().BoolP("follow", "f", true, "follow events until interrupted; always on")
	return cmd
}
