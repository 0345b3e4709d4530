// Package bench has the command that measures a host as a client sees it: for
// each runtime it makes sandboxes, runs commands, moves files and removes what it
// made.
//
// What surprises: names and JSON of the rows are those of `make bench`, which
// programs compare, so they stay as they are.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newBench(p)}
}

func newBench(p *command.Program) *cobra.Command {
	var (
		b benchmark
		o command.Output
	)
	cmd := &cobra.Command{
		Use:   "bench [--runtime RUNTIME] [--image IMAGE] [-n N]",
		Short: "Measure this host: create, exec, delete, files, list",
		Long: `Measure, as a client of this host, how long it takes to create a sandbox and see the
first output of a command, to do that and remove the sandbox (run_once), to run a
command, to delete a sandbox, to copy files and to list sandboxes. The sandboxes are
removed afterwards.

REFERENCE is the p50 of the same row in docs/benchmarks.md, on the machine that is named
below the table; RATIO is P50 divided by it. Of times less is better, of MB/s more.

Names and JSON are those of the bench.json that "make bench" writes. "make bench" has
more rows, and beside each a baseline that it measures on the same host in the same run.
Baselines need root, the source and other runtimes, so there are none here.

Results of a busy host are not reliable: compare p50, and measure twice.`,
		Example: `  sandboxctl bench
  sandboxctl bench --runtime runc -n 50 -o json`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			if b.n < 1 || b.n > 10_000 {
				return errs.New(errs.Invalid, "-n %d: want 1 to 10000", b.n)
			}
			b.cl = cl
			if err := b.run(ctx); err != nil {
				return err
			}
			return b.print(o)
		}),
	}
	o.Flags(cmd, false)
	cmd.Flags().StringSliceVar(&b.runtimes, "runtime", []string{"runc", "runsc"}, "runtimes to measure")
	cmd.Flags().StringVar(&b.image, "image", "base", "image to measure with; it needs echo, true and rm")
	cmd.Flags().IntVarP(&b.n, "count", "n", 10, "number of repetitions")
	return cmd
}

// A benchmark measures what any client can.
type benchmark struct {
	cl       *client.Client
	runtimes []string
	image    string
	n        int
	report   benchReport
}

// A benchReport has the form of make bench's bench.json, without baselines.
type benchReport struct {
	Machine benchMachine `json:"machine"`
	Results []measured   `json:"results"`
}

// A benchMachine is the machine of the daemon, as far as the API describes it.
type benchMachine struct {
	Time    time.Time `json:"time"`
	Kernel  string    `json:"kernel"`
	CPU     string    `json:"cpu"`
	CPUs    int       `json:"cpus"`
	Go      string    `json:"go"`
	Version string    `json:"sandboxd"`
	Cgroups string    `json:"cgroups"`
	Pool    string    `json:"pool"`
}

// A measured row is in Unit; p90 of a rate is the rate that 90 % reach.
type measured struct {
	Name    string  `json:"name"`
	Runtime string  `json:"runtime"`
	Unit    string  `json:"unit"`
	N       int     `json:"n"`
	P50     float64 `json:"p50"`
	P90     float64 `json:"p90"`

	Reference *reference `json:"reference,omitempty"`
}

const benchFile = 100 << 20 // bytes

// cleanup bounds how long the deletion of a sandbox may take.
const cleanup = 30 * time.Second

func (b *benchmark) run(ctx context.Context) error {
	info, err := b.cl.System().Info(ctx)
	if err != nil {
		return err
	}
	b.report.Machine = benchMachine{
		Time: time.Now().UTC(), Kernel: info.Kernel, CPU: info.CPU, CPUs: info.CPUs, Go: info.Go, Version: info.Version.Version,
		Cgroups: info.Cgroups, Pool: info.Pool,
	}
	for _, rt := range b.runtimes {
		if err := b.lives(ctx, rt); err != nil {
			return err
		}
		if err := b.inside(ctx, rt); err != nil {
			return err
		}
	}
	return b.repeat("list", "-", "ms", b.n, func() (float64, error) {
		start := time.Now()
		_, err := b.cl.List(ctx, client.Filter{})
		return millis(start), err
	})
}

// repeat does f once to warm up and then n times, and keeps a row of it.
func (b *benchmark) repeat(name, rt, unit string, n int, f func() (float64, error)) error {
	var values []float64
	for i := range n + 1 {
		v, err := f()
		if err != nil {
			return err
		}
		if i > 0 {
			values = append(values, v)
		}
	}
	b.keep(name, rt, unit, values)
	return nil
}

func (b *benchmark) keep(name, rt, unit string, values []float64) {
	slices.Sort(values)
	if unit == "MB/s" {
		slices.Reverse(values)
	}
	at := func(p float64) float64 {
		return math.Round(100*values[max(0, int(math.Ceil(p*float64(len(values))))-1)]) / 100
	}
	b.report.Results = append(b.report.Results, measured{
		name, rt, unit, len(values), at(0.5), at(0.9), referenceOf(name, rt, unit),
	})
}

func millis(start time.Time) float64 { return float64(time.Since(start)) / 1e6 }

func (b *benchmark) create(ctx context.Context, rt string) (wire.Sandbox, error) {
	sb, err := b.cl.Create(ctx, wire.CreateRequest{
		Image: &wire.Image{URI: b.image},
		Extensions: map[string]string{
			wire.ExtRuntime: rt, wire.ExtIdle: "true", wire.ExtOneShot: "true",
			wire.ExtTimeout: "15m", // in case this process is killed
		},
	}, true)
	if err == nil && sb.Status.State != wire.Running {
		err = errs.New(errs.Internal, "the sandbox failed (%s): %s", sb.Status.Reason, sb.Status.Message)
	}
	return sb, err
}

// delete destroys a sandbox, even when ctx has ended.
func (b *benchmark) delete(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanup)
	defer cancel()
	return b.cl.Delete(ctx, id)
}

// lives measures from creation to the first output, and deletion.
func (b *benchmark) lives(ctx context.Context, rt string) error {
	var deletions, whole []float64
	err := b.repeat("cold_create_first_command", rt, "ms", b.n, func() (float64, error) {
		start := time.Now()
		sb, err := b.create(ctx, rt)
		if err != nil {
			return 0, err
		}
		first, err := b.exec(ctx, sb.ID, "echo", "hello")
		took := float64(first.Sub(start)) / 1e6
		deleting := time.Now()
		err = errors.Join(err, b.delete(ctx, sb.ID))
		deletions = append(deletions, millis(deleting))
		whole = append(whole, millis(start))
		return took, err
	})
	if err == nil {
		b.keep("run_once", rt, "ms", whole[1:])
		b.keep("delete", rt, "ms", deletions[1:])
	}
	return err
}

// inside measures commands and files in one sandbox.
func (b *benchmark) inside(ctx context.Context, rt string) (err error) {
	sb, err := b.create(ctx, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.delete(ctx, sb.ID)) }()
	err = b.repeat("exec_true", rt, "ms", 5*b.n, func() (float64, error) {
		start := time.Now()
		_, err := b.exec(ctx, sb.ID, "true")
		return millis(start), err
	})
	if err != nil {
		return err
	}
	rate := func(start time.Time) float64 { return benchFile / 1e6 / time.Since(start).Seconds() }
	n := min(b.n, 5)
	err = b.repeat("file_put_100MB", rt, "MB/s", n, func() (float64, error) {
		start := time.Now()
		open := func() (io.ReadCloser, error) { return io.NopCloser(io.LimitReader(filler{}, benchFile)), nil }
		err := b.cl.Files(sb.ID).Put(ctx, []client.Upload{{Path: "/tmp/bench", Mode: 600, Size: benchFile, Open: open}})
		return rate(start), err
	})
	if err != nil {
		return err
	}
	return b.repeat("file_get_100MB", rt, "MB/s", n, func() (float64, error) {
		start := time.Now()
		r, err := b.cl.Files(sb.ID).Download(ctx, "/tmp/bench")
		if err != nil {
			return 0, err
		}
		defer r.Close()
		n, err := io.Copy(io.Discard, r)
		if err == nil && n != benchFile {
			err = errs.New(errs.Unavailable, "read %d of %d bytes; does the sandbox still run?", n, benchFile)
		}
		return rate(start), err
	})
}

// exec runs a command and returns when its first output came, or its end if it
// had none.
func (b *benchmark) exec(ctx context.Context, id string, argv ...string) (time.Time, error) {
	p, err := b.cl.Start(ctx, id, client.Command{Argv: argv})
	if err != nil {
		return time.Time{}, err
	}
	var out firstByte
	exit, err := p.Wait(&out, io.Discard)
	if err == nil && exit.Code != 0 {
		err = errs.New(errs.Invalid, "%s in image %s ended with status %d; use an --image that has it",
			argv[0], b.image, exit.Code)
	}
	if out.at.IsZero() {
		out.at = time.Now()
	}
	return out.at, err
}

// firstByte notes when it was first written to.
type firstByte struct{ at time.Time }

func (f *firstByte) Write(p []byte) (int, error) {
	if f.at.IsZero() {
		f.at = time.Now()
	}
	return len(p), nil
}

// filler is an endless file without holes.
type filler struct{}

func (filler) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(i)*31 + 7
	}
	return len(p), nil
}

func (b *benchmark) print(o command.Output) error {
	if o.Format == command.JSON {
		return text.JSON(os.Stdout, b.report)
	}
	return b.report.table(os.Stdout)
}

// table writes the machine, a line for each row, and where the references are from.
func (r *benchReport) table(w io.Writer) error {
	host := r.Machine
	_, err := fmt.Fprintf(w, "sandboxd %s, Linux %s, %s\n\n", text.Printable(host.Version), text.Printable(host.Kernel),
		text.Printable(text.CPUs(host.CPUs, host.CPU)))
	if err != nil {
		return err
	}
	var rows [][]string
	for _, m := range r.Results {
		of, ratio := "-", "-"
		if m.Reference != nil {
			of, ratio = fmt.Sprintf("%.4g", m.Reference.P50), fmt.Sprintf("%.2f", m.P50/m.Reference.P50)
		}
		rows = append(rows, []string{
			m.Name, m.Runtime, m.Unit, strconv.Itoa(m.N), fmt.Sprintf("%.4g", m.P50), fmt.Sprintf("%.4g", m.P90), of, ratio,
		})
	}
	err = text.Table(w, []string{"NAME", "RUNTIME", "UNIT", "N", "P50", "P90", "REFERENCE", "RATIO"}, rows)
	if all := r.machines(); err == nil && all != "" {
		_, err = fmt.Fprintf(w, "\nREFERENCE is docs/benchmarks.md: %s\n", all)
	}
	return err
}
