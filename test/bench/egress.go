package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// The benchmarks of pkg/egress measure one mechanism each, between namespaces of their own.
// scripts/bench.sh builds them. The bench runs them and takes their medians.
type mechanism struct {
	row, unit string
	scale     float64 // from the benchmark's unit to the row's
	// ours and theirs are BENCHMARK METRIC, theirs perhaps empty. If METRIC ends in "-",
	// there are two, with p50-us and p90-us behind it.
	ours, theirs string
	baseline     string
	goal         goal
}

const (
	withoutRules = "the same namespaces without any rule"
	upstream     = "the upstream asked directly"
	byAddress    = "the same by a rule by address"
	undecrypted  = "the same without decryption, by a rule by address"
)

var mechanisms = []mechanism{
	{"policy_apply_10", "ms", 1e-3, "PolicyApply/10-at-1 apply-", "", "", goal{maxP50: 1}},
	{"policy_apply_1000", "ms", 1e-3, "PolicyApply/1000-at-1 apply-", "", "", goal{maxP50: 5}},
	{
		"policy_apply_at_2000", "ms", 1e-3, "PolicyApply/10-at-2000 apply-", "PolicyApply/10-at-1 apply-", "with one policy",
		goal{maxRatio: 1.3},
	},
	{"policy_tighten", "ms", 1e-3, "PolicyTighten tighten-", "", "", goal{maxP50: 10}},
	{"new_flow_added_us", "µs", 1, "NewFlow/allowed connect-", "NewFlow/bare connect-", withoutRules, goal{maxOver: 40}},
	{"established_rtt", "µs", 1, "Forward/rules rtt-", "Forward/bare rtt-", withoutRules, goal{maxRatio: 1.1}},
	{"forward_throughput", "MB/s", 1, "Forward/rules forward-MB/s", "Forward/bare forward-MB/s", withoutRules, goal{minRatio: 0.9}},
	{"dns_cached", "ms", 1e-3, "DNS/cached query-", "DNS/direct query-", upstream, goal{maxP50: 0.15}},
	{"dns_uncached_added", "ms", 1e-3, "DNS/uncached query-", "DNS/direct query-", upstream, goal{maxOver: 0.2}},
	{"dns_flood", "ms", 1e-3, "DNSFlood/flood query-p99-us", "DNSFlood/calm query-p99-us", "without the flood; both p99", goal{maxP50: 5}},
	{"sni_connect_added", "ms", 1e-3, "Name named-", "Name direct-", byAddress, goal{maxOver: 0.5}},
	{"sni_throughput", "×", 1, "Name sni-throughput-ratio", "", byAddress, goal{minP50: 0.85}},
	{"sni_resets", "of 100,000", 1, "Name resets", "", "", goal{}},
}

// A rounds says how often a benchmark runs, by the pattern that selects it.
type rounds struct {
	pattern string
	n       int
}

var mechanismRounds = []rounds{
	{"PolicyApply", 500},
	{"PolicyTighten", 10},
	{"NewFlow/bare|NewFlow/allowed", 600},
	{"Forward", 5000},
	{"DNS$", 2000},
	{"DNSFlood", 2000},
	{"Name$", 100_000},
}

func egressRows(ctx context.Context, b *bench) error {
	return mechanismRows(ctx, b, mechanisms, mechanismRounds)
}

// vaultRounds: the last two are of MiB.
var vaultRounds = []rounds{{"VaultKept", 1000}, {"VaultNew", 400}, {"VaultBody", 1024}, {"VaultStreams", 1024}}

func vaultRows(ctx context.Context, b *bench) error {
	var rows []mechanism
	for protocol, suffix := range map[string]string{"h1": "", "h2": "_h2"} {
		of := func(row, unit string, scale float64, benchmark, ours, theirs, baseline string, g goal) {
			benchmark += "/" + protocol + " "
			if theirs != "" {
				theirs = benchmark + theirs
			}
			rows = append(rows, mechanism{row + suffix, unit, scale, benchmark + ours, theirs, baseline, g})
		}
		of("vault_request_added_keepalive", "ms", 1e-3, "VaultKept", "vault-", "direct-", undecrypted, goal{maxOver: 0.5})
		of("vault_request_added_new", "ms", 1e-3, "VaultNew", "vault-", "direct-", undecrypted, goal{maxOver: 3})
		of("vault_throughput_down", "MB/s", 1, "VaultBody", "vault-down-MB/s", "direct-down-MB/s", undecrypted, goal{minRatio: 0.5})
		of("vault_throughput_up", "MB/s", 1, "VaultBody", "vault-up-MB/s", "direct-up-MB/s", undecrypted, goal{minRatio: 0.5})
		of("vault_throughput_memory", "MiB", 1, "VaultBody", "child-MiB-above-idle", "", "", goal{maxP50: 32})
		of("vault_concurrency", "MB/s", 1, "VaultStreams", "vault-MB/s", "direct-MB/s", undecrypted, goal{minRatio: 0.7})
		of("vault_concurrency_others", "ms", 1e-3, "VaultStreams", "others-vault-p99-us", "others-direct-p99-us",
			"while the streams are not decrypted; both p99", goal{maxRatio: 1.5})
	}
	slices.SortStableFunc(rows, func(a, b mechanism) int { return strings.Compare(a.row, b.row) })
	return mechanismRows(ctx, b, rows, vaultRounds)
}

// mechanismRows runs benchmarks of pkg/egress, and makes rows of what they report.
func mechanismRows(ctx context.Context, b *bench, rows []mechanism, all []rounds) error {
	got := map[string]map[string]float64{}
	for _, r := range all {
		n := b.times(r.n, max(r.n/50, 2))
		cmd := exec.CommandContext(ctx, filepath.Join(b.dir, "..", "bench-egress"), "-test.run=^$", "-test.bench="+r.pattern,
			"-test.benchtime="+strconv.Itoa(n)+"x", "-test.timeout=30m")
		cmd.Dir = filepath.Join(b.root, "pkg", "egress")
		cmd.Env = append(os.Environ(), "SANDBOXD_TEST=root")
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w\n%s", cmd, err, out)
		}
		readBenchmarks(out, got)
	}
	for _, m := range rows {
		r := Result{Name: m.row, Runtime: "-", Unit: m.unit, Baseline: m.baseline, goal: m.goal, N: 1}
		var err1, err2 error
		r.P50, r.P90, r.N, err1 = metricOf(got, m.ours, m.scale)
		if m.theirs != "" {
			r.BaselineP50, _, _, err2 = metricOf(got, m.theirs, m.scale)
			r.Ratio = round(r.P50 / r.BaselineP50)
		}
		if err := errors.Join(err1, err2); err != nil {
			return fmt.Errorf("%s: %w", m.row, err)
		}
		b.add(r)
	}
	return nil
}

// readBenchmarks reads lines as testing prints them: a name with the number of CPUs behind
// it, how often, and values with their units.
func readBenchmarks(out []byte, into map[string]map[string]float64) {
	for line := range bytes.Lines(out) {
		f := strings.Fields(string(line))
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		name := strings.TrimPrefix(f[0], "Benchmark")
		if i := strings.LastIndexByte(name, '-'); i > 0 {
			name = name[:i]
		}
		values := map[string]float64{}
		values["n"], _ = strconv.ParseFloat(f[1], 64)
		for i := 2; i+1 < len(f); i += 2 {
			values[f[i+1]], _ = strconv.ParseFloat(f[i], 64)
		}
		into[name] = values
	}
}

// metricOf finds BENCHMARK METRIC, see mechanism.
func metricOf(got map[string]map[string]float64, which string, scale float64) (p50, p90 float64, n int, err error) {
	name, metric, _ := strings.Cut(which, " ")
	values := got[name]
	upper := metric
	if strings.HasSuffix(metric, "-") {
		metric, upper = metric+"p50-us", metric+"p90-us"
	}
	v, ok := values[metric]
	if !ok {
		return 0, 0, 0, fmt.Errorf("the benchmark %s reports no %s", name, metric)
	}
	return round(v * scale), round(values[upper] * scale), int(values["n"]), nil
}

// policyCreate: a create with a policy of ten rules, half of them by name, beside one without.
func policyCreate(ctx context.Context, b *bench) error {
	var rules []string
	for i := range 5 {
		rules = append(rules, fmt.Sprintf("host%d.example.org:443", i), fmt.Sprintf("203.0.113.%d:443", i))
	}
	for _, rt := range runtimes {
		create := func(allow string) func() (float64, error) {
			return func() (float64, error) {
				r := request(rt)
				if allow != "" {
					r.Extensions[wire.ExtAllow] = allow
				}
				return createOnce(ctx, b, r)
			}
		}
		a, c, err := turns(b.times(150, 3), 2, create(strings.Join(rules, ",")), create(""))
		if err != nil {
			return err
		}
		b.add(row("create_with_policy", rt, "ms", a, "create without one", c, goal{maxOver: 1}))
	}
	return nil
}
