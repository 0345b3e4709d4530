// Command bench measures sandboxd, the software that it is built on and its competitors,
// in one run on one machine, and writes build/bench.json. It runs at the root of the
// checkout (scripts/bench.sh).
//
// It starts a daemon of its own (instance x). For the baselines it starts the runtimes
// itself, with the daemon's own packages (instance y). One thing surprises: daemon and
// baseline take turns, call by call. A busy machine, or a virtual machine with busy
// neighbours, slows both, so ratios are valid where absolute numbers are not.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/oci"
)

// bench is one run.
type bench struct {
	*daemon
	bare    *bare
	root    string // of the checkout: the SDK programs and their pinned versions
	quick   bool
	verbose bool
	report  Report
}

var runtimes = []string{oci.Runc, oci.Runsc}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	b := &bench{}
	bin := flag.String("bin", "build/bin", "directory of the programs to measure")
	recipes := flag.String("recipes", "rootfs", "directory of image recipes")
	out := flag.String("out", "build/bench.json", "file to write")
	only := flag.String("run", "", "regular expression: the rows to measure")
	doc := flag.String("doc", "", "document whose table a whole run replaces")
	merge := flag.Bool("merge", false, "with -run or -runtime: replace what was measured in the table of -doc, and keep the other rows")
	flag.BoolVar(&b.quick, "quick", false, "few repetitions: a smoke test of the bench, not numbers to quote")
	flag.Func("runtime", "measure this one only", func(rt string) error {
		if !slices.Contains(runtimes, rt) {
			return fmt.Errorf("want one of %q", runtimes)
		}
		runtimes = []string{rt}
		return nil
	})
	flag.BoolVar(&b.verbose, "v", false, "say how long each step took")
	flag.Parse()
	if b.quick || !*merge && (*only != "" || len(runtimes) == 1) {
		*doc = "" // numbers not to quote, or rows that nobody asked to put beside those of another run
	}
	if os.Geteuid() != 0 {
		return errors.New("sandboxd makes namespaces, cgroups and firewall rules, so this needs root")
	}
	for _, p := range []*string{bin, recipes, out} {
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	if b.root, err = os.Getwd(); err != nil {
		return err
	}
	want, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	b.report.Machine = machine("")
	defer func() { // after the daemon has stopped and left nothing behind
		if err == nil && *doc != "" {
			err = b.report.document(*doc, *merge)
		}
	}()
	b.daemon, err = startDaemon(ctx, *bin, *recipes, filepath.Join(filepath.Dir(*out), "bench"))
	if b.daemon == nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stop(), leaks()) }()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.closeBare()) }()
	if err := b.prepare(ctx); err != nil {
		return err
	}
	err = b.measure(ctx, want)
	b.report.Machine.LoadAfter = load()
	b.report.print(os.Stdout) // also after a failure: measured rows stay valid
	return errors.Join(err, b.report.write(*out))
}

// prepare opens the baselines on the layers of the daemon's image and runs each runtime
// once, because the first start reads from disk.
func (b *bench) prepare(ctx context.Context) error {
	v, err := b.cl.Version(ctx)
	if err != nil {
		return err
	}
	b.report.Machine.Version = v.Version
	sb, err := b.create(ctx, oci.Runc)
	if err != nil {
		return err
	}
	in, err := b.cl.Inspect(ctx, sb.ID)
	if err != nil {
		return err
	}
	if err := b.drop(ctx, sb.ID); err != nil {
		return err
	}
	layers := slices.Clone(in.Layers)
	if b.bare, err = openBare(ctx, b.bin, filepath.Join(inst.StateDir(), "layers"), layers); err != nil {
		return fmt.Errorf("prepare the baselines: %w", err)
	}
	b.report.Machine.Cgroups = b.bare.groups.Mode()
	return nil
}

func (b *bench) closeBare() error {
	if b.bare == nil {
		return nil
	}
	return b.bare.close(context.Background())
}

// A suite measures some rows.
type suite struct {
	name string
	do   func(context.Context, *bench) error
}

var suites = []suite{
	{"create_at_200 list_200 daemon_rss", manySandboxes}, // first: it needs a daemon that has done nothing yet
	{"cold_create_first_command", coldCreate},
	{"cold_create_first_command_prepared", coldPrepared},
	{"create_202", accepted},
	{"sdk_create_to_first_command", sdkFirst},
	{"sdk_create_to_first_command_go", sdkGo},
	{"sdk_create_failing", sdkFailing},
	{"run_once", runOnce},
	{"exec_true", execTrue},
	{"exec_true_ahead", execAhead},
	{"pty_echo", ptyEcho},
	{"freeze resume", freezing},
	{"delete", deletion},
	{"burst_50", burst},
	{"warm_claim_to_first_command warm_claim_p99 warm_claim_misses", warmClaims},
	{"pool_100_claims", manyClaims},
	{"idle_memory", idleMemory},
	{"pool_member_memory", memberMemory},
	{"file_snapshot_ended create_from_snapshot", snapshotEnded},
	{"file_snapshot_live", snapshotLive},
	{"memory_snapshot_pause memory_snapshot_ready restore_to_first_answer wake_hibernated fork_memory_8", memoryRows},
	{"fork_files", forkFiles},
	{"file_put_100MB file_get_100MB", files},
	{"upload_1GB download_1GB", gigabyte},
	{"upload_10000_files", manyFiles},
	{"command_stream", commandStream},
	{"code_cell_warm", codeCell},
	{"code_context_new", codeContext},
	{"code_go", codeGo},
	{"interpreter_idle_memory", idleInterpreter},
	{"proxy_throughput proxy_added_latency", proxied},
	{"create_with_policy", policyCreate},
	{"policy_apply policy_tighten new_flow_added_us established_rtt forward_throughput dns_cached dns_uncached_added dns_flood " +
		"sni_connect_added sni_throughput sni_resets", egressRows},
	{"vault_request_added vault_throughput vault_concurrency", vaultRows},
	{"import_1GB", imports},
	{"bundle_install bundle_size", bundles},
	{"security_start_cost", securityStart},
	{"security_syscall_cost", securityCalls},
	{"restart_100", restart},
	{"sandboxes_1000", scale},
	{"soak", soak},
	{"node_endpoint", nodeEndpoint},
	{"fsync_append_4k sqlite_insert pgbench_write postgres_read", durable}, // last: it changes the pool
}

func (b *bench) measure(ctx context.Context, want *regexp.Regexp) error {
	shown := 0
	for _, s := range suites {
		if !want.MatchString(s.name) {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		start := time.Now()
		if err := s.do(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		fmt.Fprintf(os.Stderr, "bench: %s took %s\n", s.name, time.Since(start).Round(100*time.Millisecond))
		shown = b.report.progress(os.Stderr, shown)
	}
	return nil
}

func (b *bench) add(r Result) { b.report.Results = append(b.report.Results, r) }

// times is the number of repetitions; quick is for a smoke test.
func (b *bench) times(full, quick int) int {
	if b.quick {
		return quick
	}
	return full
}

// drop deletes a sandbox and waits until everything of it is gone.
func (b *bench) drop(ctx context.Context, id string) error {
	if err := b.cl.Delete(context.WithoutCancel(ctx), id); err != nil {
		return err
	}
	return settle(id)
}

// turns calls ours and theirs n times each, after some rounds to warm up. They take turns,
// and each goes first in every other round. Both return what they measured.
func turns(n, warm int, ours, theirs func() (float64, error)) (a, c []float64, err error) {
	for i := range n + warm {
		order := []func() (float64, error){ours, theirs}
		into := []*[]float64{&a, &c}
		if i%2 == 1 {
			slices.Reverse(order)
			slices.Reverse(into)
		}
		for k, f := range order {
			v, err := f()
			if err != nil {
				return nil, nil, err
			}
			if i >= warm {
				*into[k] = append(*into[k], v)
			}
		}
	}
	return a, c, nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
