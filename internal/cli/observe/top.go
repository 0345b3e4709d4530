package observe

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// firstLook is how long after the first measurement the second comes, without
// which there is no CPU percentage.
const firstLook = 200 * time.Millisecond

func newTop(p *command.Program) *cobra.Command {
	var (
		o     command.Output
		times int
		every time.Duration
		sort  string
	)
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the resource usage of all sandboxes, busiest first, until q is pressed",
		Long: `Show the resource usage of all sandboxes, busiest first, until q is pressed.

If standard output is not a terminal, top prints one measurement. CPU is in percent of
one core. One request reads all values on the host; only the number of processes in a
gVisor sandbox is asked of the sandbox. With -o json each measurement is an array; if
there are several, each is one line.`,
		Example: `  sandboxctl top
  sandboxctl top --sort memory -d 5s
  sandboxctl top -n 1 -o json | jq '.[] | select(.cpuPercent > 90) | .id'`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return errs.New(errs.Invalid, "top shows all sandboxes; the processes of one: sandboxctl exec %s -- ps aux; what it uses: "+
				"sandboxctl stats %[1]s", text.Clip(args[0], 60))
		},
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			by, ok := orders[sort]
			if !ok {
				return errs.New(errs.Invalid, "--sort %q: want cpu, memory, pids, disk, age or name", text.Clip(sort, 20))
			}
			if every < 100*time.Millisecond {
				return errs.New(errs.Invalid, "--delay %s: want at least 100ms", every)
			}
			o.Lines = times != 1
			live := command.IsTerminal(os.Stdout) && o.Format == command.Table
			if times == 0 && !live {
				times, o.Lines = 1, false
			}
			t := top{cl: cl, out: o, by: by, every: every}
			if live && times != 1 {
				return t.watch(ctx, times)
			}
			return t.run(ctx, times, t.print)
		}),
	}
	o.Flags(cmd, false)
	cmd.Flags().IntVarP(&times, "iterations", "n", 0, "number of measurements (default: no limit on a terminal, else 1)")
	command.DurationFlag(cmd.Flags(), &every, "delay", "d", time.Second, "time between two measurements")
	cmd.Flags().StringVar(&sort, "sort", "cpu", "sort by cpu, memory, pids, disk, age or name")
	command.Choices(cmd, "sort", "cpu", "memory", "pids", "disk", "age", "name")
	return cmd
}

// usage is a row: what a sandbox uses, and its CPU since the last measurement.
type usage struct {
	wire.SandboxStats
	CPU float64 `json:"cpuPercent"`
}

// orders are how rows may be sorted: the largest first, names by the alphabet.
var orders = map[string]func(a, b usage) int{
	"cpu":    func(a, b usage) int { return cmp.Compare(b.CPU, a.CPU) },
	"memory": func(a, b usage) int { return cmp.Compare(b.Usage.MemoryBytes, a.Usage.MemoryBytes) },
	"pids":   func(a, b usage) int { return cmp.Compare(tasks(b), tasks(a)) },
	"disk":   func(a, b usage) int { return cmp.Compare(b.Usage.DiskBytes, a.Usage.DiskBytes) },
	"age":    func(a, b usage) int { return a.CreatedAt.Compare(b.CreatedAt) },
	"name":   func(a, b usage) int { return cmp.Compare(cmp.Or(a.Name, a.ID), cmp.Or(b.Name, b.ID)) },
}

// tasks is what rows are sorted by: a sandbox whose count is unknown comes last.
func tasks(u usage) int64 {
	if u.Usage.Pids == nil {
		return -1
	}
	return *u.Usage.Pids
}

type top struct {
	cl    *client.Client
	out   command.Output
	by    func(a, b usage) int
	every time.Duration
	last  map[string]wire.Usage
}

// run shows a measurement every t.every, so many times or, for 0, until ctx ends.
func (t *top) run(ctx context.Context, times int, show func([]usage) error) error {
	if _, err := t.measure(ctx); err != nil {
		return err
	}
	wait := min(firstLook, t.every)
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
		list, err := t.measure(ctx)
		if err == nil {
			err = show(list)
		}
		if err != nil || n == times {
			return err
		}
		wait = t.every
	}
}

// measure asks once for all sandboxes.
func (t *top) measure(ctx context.Context) ([]usage, error) {
	all, err := t.cl.AllStats(ctx)
	if err != nil {
		return nil, err
	}
	now := make(map[string]wire.Usage, len(all))
	list := make([]usage, 0, len(all))
	for _, s := range all {
		now[s.ID] = s.Usage
		list = append(list, usage{s, cpuSince(t.last[s.ID], s.Usage)})
	}
	t.last = now
	slices.SortStableFunc(list, func(a, b usage) int { return cmp.Or(t.by(a, b), cmp.Compare(a.ID, b.ID)) })
	return list, nil
}

// cpuSince is the CPU time between two measurements, in percent of one core.
func cpuSince(was, now wire.Usage) float64 {
	dt := now.Time.Sub(was.Time).Microseconds()
	if was.Time.IsZero() || dt <= 0 {
		return 0
	}
	return max(0, 100*float64(now.CPUMicros-was.CPUMicros)/float64(dt))
}

func (t *top) print(list []usage) error { return usages.Show(os.Stdout, &t.out, list) }

// watch redraws the screen until q, Ctrl-C or the end of ctx.
func (t *top) watch(ctx context.Context, times int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quit := make(chan struct{})
	if in := int(os.Stdin.Fd()); term.IsTerminal(in) {
		if was, err := term.MakeRaw(in); err == nil {
			defer term.Restore(in, was) //nolint:errcheck // the terminal is gone
			go func() {
				awaitQuit(os.Stdin)
				close(quit)
				cancel()
			}()
		}
	}
	// The other screen, without a cursor: what was on this one comes back.
	fmt.Print("\x1b[?1049h\x1b[?25l")
	defer fmt.Print("\x1b[?25h\x1b[?1049l")
	err := t.run(ctx, times, func(list []usage) error {
		width, height, err := term.GetSize(int(os.Stdout.Fd()))
		if err != nil {
			width, height = 80, 24
		}
		_, err = os.Stdout.Write(page(list, time.Now(), width, height))
		return err
	})
	select {
	case <-quit:
		return nil
	default:
		return err
	}
}

// awaitQuit reads keys until one that ends: q, or Ctrl-C, of which a raw terminal
// makes no signal.
func awaitQuit(in *os.File) {
	key := make([]byte, 1)
	for {
		if n, err := in.Read(key); err != nil || n == 1 && (key[0] == 'q' || key[0] == 'Q' || key[0] == 3) {
			return
		}
	}
}

// page draws one measurement, no larger than the terminal: from the top left
// corner, each line to its end, and nothing below.
func page(list []usage, now time.Time, width, height int) []byte {
	var cpu float64
	var memory int64
	for _, s := range list {
		cpu += s.CPU
		memory += s.Usage.MemoryBytes
	}
	var all bytes.Buffer
	fmt.Fprintf(&all, "%s  %s, CPU %.0f%%, memory %s   (q quits)\n\n",
		now.Format(time.TimeOnly), errs.Count(len(list), "sandbox", "sandboxes"), cpu, text.Bytes(memory))
	usages.Show(&all, &command.Output{Width: width}, list) //nolint:errcheck // a buffer takes all
	lines := strings.Split(strings.TrimSuffix(all.String(), "\n"), "\n")
	var b bytes.Buffer
	b.WriteString("\x1b[H")
	for i, line := range lines[:min(len(lines), max(height, 1))] {
		if i > 0 {
			b.WriteString("\r\n")
		}
		if r := []rune(line); len(r) > width {
			line = string(r[:width])
		}
		b.WriteString(line + "\x1b[K")
	}
	b.WriteString("\x1b[J")
	return b.Bytes()
}

var usages = command.Listing[usage]{
	Name:   func(s usage) string { return s.ID },
	Header: []string{"ID", "CPU%", "MEMORY / LIMIT", "PIDS", "DISK", "NET IN / OUT", "AGE", "RUNTIME", "NAME"},
	Drop:   []string{"RUNTIME", "NET IN / OUT", "AGE", "DISK", "PIDS"},
	Row: func(s usage) []string {
		u := s.Usage
		name := s.Name
		if s.State != wire.Running {
			name = strings.TrimSpace(name + " (" + s.State + ")")
		}
		return []string{
			s.ID, fmt.Sprintf("%.1f", s.CPU),
			text.Bytes(u.MemoryBytes) + " / " + text.Bytes(u.MemoryLimitBytes), pidsOf(u), text.Bytes(u.DiskBytes),
			text.Bytes(u.RxBytes) + " / " + text.Bytes(u.TxBytes), units.HumanDuration(time.Since(s.CreatedAt)), s.Runtime, name,
		}
	},
}
