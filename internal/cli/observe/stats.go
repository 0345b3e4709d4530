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

func newStats(p *command.Program) *cobra.Command {
	var (
		o    command.Output
		once bool
	)
	cmd := &cobra.Command{
		Use:   "stats [SANDBOX...]",
		Short: "Show the resource usage of sandboxes once a second",
		Long: `Show the resource usage of sandboxes once a second. With -o json each measurement is
an array. It is printed on one line, except with --no-stream.`,
		Example: `  sandboxctl stats lab
  sandboxctl stats --no-stream -o json`,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			return watchStats(ctx, cl, args, once, o)
		}),
	}
	o.Flags(cmd, false)
	samples.FormatFlag(cmd, &o)
	cmd.Flags().BoolVar(&once, "no-stream", false, "measure once, CPU over a fifth of a second")
	return cmd
}

// sample is one measurement, and the CPU in percent of one core since the last.
type sample struct {
	ID    string     `json:"id"`
	Name  string     `json:"name,omitempty"`
	CPU   float64    `json:"cpuPercent"`
	Usage wire.Usage `json:"usage"`
}

func watchStats(ctx context.Context, cl *client.Client, args []string, once bool, o command.Output) error {
	o.Lines = !once
	last := map[string]wire.Usage{}
	every := firstLook
	for first := true; ; first = false {
		list, err := measure(ctx, cl, args, last)
		if err != nil {
			return err
		}
		if !first {
			redraw := !once && o.Format == command.Table && command.IsTerminal(os.Stdout)
			if err := showStats(&o, list, redraw); err != nil || once {
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

// measure measures the sandboxes named, or all that run; of these, one that cannot
// be measured is left out.
func measure(ctx context.Context, cl *client.Client, args []string, last map[string]wire.Usage) ([]sample, error) {
	out := []sample{}
	add := func(id, name string, u wire.Usage) {
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
		add(sb.ID, command.NameOf(sb), u)
	}
	return out, nil
}

// pidsOf is how many processes and threads there are, or "-" if that is unknown.
func pidsOf(u wire.Usage) string {
	if u.Pids == nil {
		return "-"
	}
	return fmt.Sprint(*u.Pids)
}

// showStats prints one measurement; with redraw it takes the whole screen.
func showStats(o *command.Output, list []sample, redraw bool) error {
	if redraw {
		fmt.Print("\x1b[H\x1b[2J") // home, clear
	}
	return samples.Show(os.Stdout, o, list)
}

var samples = command.Listing[sample]{
	Name: func(s sample) string { return s.ID },
	Header: []string{
		"ID", "NAME", "CPU", "MEMORY / LIMIT", "MEM", "PEAK", "PIDS / LIMIT", "DISK / LIMIT", "NET IN / OUT", "OOM",
	},
	Row: func(s sample) []string {
		u := s.Usage
		return []string{
			s.ID, s.Name, fmt.Sprintf("%.1f%%", s.CPU),
			text.Bytes(u.MemoryBytes) + " / " + text.Bytes(u.MemoryLimitBytes), share(u), text.Bytes(u.MemoryPeakBytes),
			fmt.Sprintf("%s / %d", pidsOf(u), u.PidsLimit), text.Bytes(u.DiskBytes) + " / " + text.Bytes(u.DiskLimitBytes),
			text.Bytes(u.RxBytes) + " / " + text.Bytes(u.TxBytes), fmt.Sprint(u.OOMKills),
		}
	},
	Docker: func(s sample) command.Fields {
		u := s.Usage
		return command.Fields{
			"ID": s.ID, "Name": s.Name, "Container": s.ID, "CPUPerc": fmt.Sprintf("%.2f%%", s.CPU), "MemPerc": share(u),
			"MemUsage": text.Bytes(u.MemoryBytes) + " / " + text.Bytes(u.MemoryLimitBytes), "PIDs": pidsOf(u),
			"NetIO": text.Bytes(u.RxBytes) + " / " + text.Bytes(u.TxBytes),
		}
	},
}

// share is how much of its memory limit a sandbox uses.
func share(u wire.Usage) string {
	if u.MemoryLimitBytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(u.MemoryBytes)/float64(u.MemoryLimitBytes))
}
