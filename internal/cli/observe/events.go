package observe

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newEvents(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print events of sandboxes as they happen",
		Long: `Print events of sandboxes as they happen, until interrupted. With -o json each line is
an object, because the output has no end; commands that end print one object or one array.`,
		Example: `  sandboxctl events
  sandboxctl events -o json | jq -r 'select(.reason == "oom").id'`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			for ev, err := range cl.Events(ctx) {
				if err != nil {
					if ctx.Err() != nil {
						return context.Canceled
					}
					return err
				}
				done, err := o.Value(os.Stdout, ev, event(ev))
				switch {
				case done && err != nil:
					return err
				case done:
				case o.Format == command.Name:
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
	o.Lines = true
	o.Flags(cmd, false)
	o.FormatFlag(cmd, event(wire.Event{}))
	cmd.Flags().BoolP("follow", "f", true, "follow events until interrupted; always on")
	return cmd
}

// event has docker's names of what an event tells.
func event(ev wire.Event) command.Fields {
	return command.Fields{
		"ID": ev.ID, "Type": "container", "Action": ev.Type, "Status": ev.Type, "Time": ev.Time.Unix(), "TimeNano": ev.Time.UnixNano(),
		"From": ev.Name,
	}
}
