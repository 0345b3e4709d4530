package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newStats(c *cli) *cobra.Command {
	var (
		o    output
		once bool
	)
	cmd := &cobra.Command{
		Use:   "stats [SANDBOX...]",
		Short: "Show what sandboxes use, once a second",
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
	last := map[string]client.Usage{}
	every := 200 * time.Millisecond // the first row needs two looks, soon
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

// measure looks at the sandboxes named, or at all that run. With names a
// sandbox that can not be measured is an error, without it is left out.
func measure(ctx context.Context, cl *client.Client, args []string, last map[string]client.Usage) ([]sample, error) {
	var todo []sample
	if len(args) == 0 {
		list, err := cl.List(ctx, client.Filter{States: []string{client.Running, client.Paused}})
		if err != nil {
			return nil, err
		}
		for _, sb := range list {
			todo = append(todo, sample{ID: sb.ID, Name: nameOf(sb)})
		}
	}
	for _, a := range args {
		sb, err := cl.Get(ctx, a)
		if err != nil {
			return nil, err
		}
		todo = append(todo, sample{ID: sb.ID, Name: nameOf(sb)})
	}
	out := []sample{}
	for _, s := range todo {
		u, err := cl.Stats(ctx, s.ID)
		if err != nil {
			if len(args) == 0 && (errs.Is(err, errs.NotFound) || errs.Is(err, errs.WrongState)) {
				continue // it ended since the list was made
			}
			return nil, err
		}
		if was, ok := last[s.ID]; ok {
			if dt := u.Time.Sub(was.Time).Microseconds(); dt > 0 {
				s.CPU = 100 * float64(u.CPUMicros-was.CPUMicros) / float64(dt)
			}
		}
		last[s.ID], s.Usage = u, u
		out = append(out, s)
	}
	return out, nil
}

func (o *output) stats(list []sample, redraw bool) error {
	switch o.format {
	case "json":
		return printJSON(os.Stdout, list)
	case "name":
		for _, s := range list {
			fmt.Println(printable(s.ID, false))
		}
		return nil
	}
	if redraw {
		fmt.Print("\x1b[H\x1b[2J") // home, clear
	}
	rows := make([][]string, 0, len(list))
	for _, s := range list {
		u := s.Usage
		mem := "-"
		if u.MemoryLimitBytes > 0 {
			mem = fmt.Sprintf("%.1f%%", 100*float64(u.MemoryBytes)/float64(u.MemoryLimitBytes))
		}
		rows = append(rows, []string{
			s.ID, s.Name, fmt.Sprintf("%.1f%%", s.CPU),
			bytesOf(u.MemoryBytes) + " / " + bytesOf(u.MemoryLimitBytes), mem, bytesOf(u.MemoryPeakBytes),
			fmt.Sprintf("%d / %d", u.Pids, u.PidsLimit), bytesOf(u.DiskBytes) + " / " + bytesOf(u.DiskLimitBytes),
			bytesOf(u.RxBytes) + " / " + bytesOf(u.TxBytes), fmt.Sprint(u.OOMKills),
		})
	}
	return table(os.Stdout, []string{"ID", "NAME", "CPU", "MEMORY / LIMIT", "MEM", "PEAK", "PIDS / LIMIT", "DISK / LIMIT", "NET IN / OUT", "OOM"}, rows)
}
