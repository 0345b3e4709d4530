package observe

import (
	"cmp"
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

// lost is the type of an event that stands for others, which the daemon does not know.
const lost = "lost"

func newEvents(p *command.Program) *cobra.Command {
	var o command.Output
	var since string
	cmd := &cobra.Command{
		Use:   "events [--since TIME]",
		Short: "Print events of sandboxes as they happen",
		Long: `Print events of sandboxes as they happen, until interrupted. With -o json each line is
an object, because the output has no end; commands that end print one object or one array.

With --since, past events come first. The daemon remembers its last 1024 events since its
start; a note says if that is not all. Events of the type "denied" are never among them.

When the daemon is restarted, events waits for it and goes on with what happened
meanwhile. An event of the type "lost" says that some are missing. Events of the types
"pressure" (a disk fills), "expires" (a certificate or a key ends soon) and "pruned" (an old
version of sandboxd was removed) are about the host and have no ID.`,
		Example: `  sandboxctl events
  sandboxctl events --since 10m
  sandboxctl events -o json | jq -r 'select(.reason == "oom").id'`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			from, err := command.Since("--since", since, time.Now())
			if err != nil {
				return err
			}
			for ev, err := range cl.Events(ctx, from, command.Notices()) {
				if err != nil {
					if ctx.Err() != nil {
						return context.Canceled
					}
					return err
				}
				if first := !from.IsZero(); first && ev.Type == lost {
					command.Note("the daemon knows no events from before " + ev.Time.Local().Format(time.RFC3339))
					from = time.Time{}
					continue
				}
				from = time.Time{}
				done, err := o.Value(os.Stdout, ev, event(ev))
				switch {
				case done && err != nil:
					return err
				case done:
				case o.Format == command.Name && ev.ID == "": // an event of the host
				case o.Format == command.Name:
					if ev.ID != "" { // an event of the host has none
						fmt.Println(text.Printable(ev.ID))
					}
				default:
					line := fmt.Sprintf("%s %s %s", ev.Time.Local().Format(time.RFC3339), cmp.Or(ev.ID, "-"), ev.Type)
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
	cmd.Flags().StringVar(&since, "since", "", "begin with the events since this time: a duration such as 10m, a time or Unix seconds")
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
