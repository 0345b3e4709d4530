package cli

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newStats(c *cli) *cobra.Command {
	var (
		o    output
		once bool
	)
	cmd := &cobra.Command{
		Use:   "stats [SANDBOX...]",
		Short: "Show what sandboxes use, once a second",
		Long: `Show what sandboxes use, once a second. With -o json each look is an array, a line
each unless --no-stream asks for one alone.`,
		Example: `  sandboxctl stats lab
  sandboxctl stats --no-stream -o json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			return watchStats(cmd.Context(), cl, args, once, o)
		},
	}
	o.flags(cmd, false)
	cmd.Flags().BoolVar(&once, "no-stream", false, "measure once: CPU over a fifth of a second")
	return cmd
}

// sample is one measurement, and CPU in percent of one core since the one before.
type sample struct {
	ID    string       `json:"id"`
	Name  string       `json:"name,omitempty"`
	CPU   float64      `json:"cpuPercent"`
	Usage client.Usage `json:"usage"`
}

func watchStats(ctx context.Context, cl *client.Client, args []string, once bool, o output) error {
	o.lines = !once
	last := map[string]client.Usage{}
	every := firstLook
	for first := true; ; first = false {
		list, err := measure(ctx, cl, args, last)
		if err != nil {
			return err
		}
		if !first {
			if err := o.stats(list, !once && o.format == "table" && isTerminal(os.Stdout)); err != nil || once {
				return err
			}
			every = time.Second
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(every):
		}
	}
}

// measure looks at the sandboxes named, or at all that run: then one that can
// not be measured is left out.
func measure(ctx context.Context, cl *client.Client, args []string, last map[string]client.Usage) ([]sample, error) {
	out := []sample{}
	add := func(id, name string, u client.Usage) {
		out = append(out, sample{ID: id, Name: name, CPU: cpuSince(last[id], u), Usage: u})
		last[id] = u
	}
	if len(args) == 0 {
		all, err := cl.AllStats(ctx)
		for _, s := range all {
			add(s.ID, s.Name, s.Usage)
		}
		return out, err
	}
	for _, a := range args {
		sb, err := cl.Get(ctx, a)
		if err != nil {
			return nil, err
		}
		u, err := cl.Stats(ctx, sb.ID)
		if err != nil {
			return nil, err
		}
		add(sb.ID, nameOf(sb), u)
	}
	return out, nil
}

// pidsOf is how many processes and threads there are, where somebody knows.
func pidsOf(u client.Usage) string {
	if u.Pids == nil {
		return "-"
	}
	return fmt.Sprint(*u.Pids)
}

func (o *output) stats(list []sample, redraw bool) error {
	if redraw {
		fmt.Print("\x1b[H\x1b[2J") // home, clear
	}
	return samples.show(os.Stdout, o, list)
}

var samples = listing[sample]{
	name:   func(s sample) string { return s.ID },
	header: []string{"ID", "NAME", "CPU", "MEMORY / LIMIT", "MEM", "PEAK", "PIDS / LIMIT", "DISK / LIMIT", "NET IN / OUT", "OOM"},
	row: func(s sample) []string {
		u := s.Usage
		mem := "-"
		if u.MemoryLimitBytes > 0 {
			mem = fmt.Sprintf("%.1f%%", 100*float64(u.MemoryBytes)/float64(u.MemoryLimitBytes))
		}
		return []string{
			s.ID, s.Name, fmt.Sprintf("%.1f%%", s.CPU),
			bytesOf(u.MemoryBytes) + " / " + bytesOf(u.MemoryLimitBytes), mem, bytesOf(u.MemoryPeakBytes),
			fmt.Sprintf("%s / %d", pidsOf(u), u.PidsLimit), bytesOf(u.DiskBytes) + " / " + bytesOf(u.DiskLimitBytes),
			bytesOf(u.RxBytes) + " / " + bytesOf(u.TxBytes), fmt.Sprint(u.OOMKills),
		}
	},
}
