package cli

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
)

func newEvents(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print what happens to sandboxes, as it happens",
		Long: `Print what happens to sandboxes, as it happens. It has no end, so with -o json each
line is an object; commands whose answer ends print one object or one array.`,
		Example: `  sandboxctl events
  sandboxctl events -o json | jq -r 'select(.reason == "oom").id'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			for ev, err := range cl.Events(cmd.Context()) {
				if err != nil {
					if cmd.Context().Err() != nil {
						return context.Canceled
					}
					return err
				}
				switch o.format {
				case "json": // one a line
					if err := writeJSON(os.Stdout, ev, ""); err != nil {
						return err
					}
				case "name":
					fmt.Println(printable(ev.ID, false))
				default:
					line := fmt.Sprintf("%s %s %s", ev.Time.Local().Format(time.RFC3339), ev.ID, ev.Type)
					for _, more := range []string{ev.Name, ev.Reason, ev.Message} {
						if more != "" {
							line += " " + more
						}
					}
					fmt.Fprintln(os.Stdout, printable(line, false))
				}
			}
			return nil
		},
	}
	o.flags(cmd, false)
	cmd.Flags().BoolP("follow", "f", true, "go on until interrupted; it always does")
	return cmd
}
