package metrics

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

func scrape(t testing.TB, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("scrape: %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func newMetrics(look func() (Look, error)) *Metrics {
	m := New(Config{Runtimes: []string{"runsc", "runc"}, Ops: []string{"create", "delete"}, Kept: []string{"max_age"}, Look: look})
	m.Build("v1", "t")
	return m
}

func full() (Look, error) {
	return Look{
		Sandboxes: map[Kind]int{{"running", "runc"}: 3}, Deleting: 4, Prepared: map[string]int{"runc": 6},
		Creating: 2, Waiting: 5, PoolBytes: 100, PoolUsedBytes: 40,
		Flows: []Flows{{"deny", "blocked", 7}}, RxBytes: 21, TxBytes: 22, RxPackets: 23, TxPackets: 24,
		QueueWaiting: 1, QueueOverflowed: 2, QueueLost: 3, NamesAnswered: 41, NamesUnanswered: 42,
		Backup: Backup{
			Every: time.Hour, Good: time.Unix(1_800_000_000, 0), Bytes: 31, Failed: 32,
			DrillGood: time.Unix(1_900_000_000, 0), DrillFails: true,
			DataBytes: 33, DataSent: 34, DataLeft: 35, CheckFails: true, Full: true, Unknown: 36,
		},
	}, nil
}

// TestScrape holds the names, which dashboards and alert rules of others use.
func TestScrape(t *testing.T) {
	m := newMetrics(full)
	m.Operation("create", "runc", OK, 20*time.Millisecond)
	m.Step("up", "rootfs", "runc", time.Millisecond)
	m.StepFailed("up", "disk", "runc")
	m.Exec("runsc", OK, 2*time.Millisecond)
	m.Ended("oom", "runc")
	m.Request("POST", "/sandboxes", 202, false, time.Millisecond)
	m.Sweep(true, time.Millisecond)
	m.Refused("memory")
	m.SnapshotRemoved("max")
	text := scrape(t, m)
	for _, line := range []string{
		`sandboxd_build_info{daemon="t",goversion="go`,
		`sandboxd_operations_total{op="create",outcome="ok",runtime="runc"} 1`,
		`sandboxd_operations_total{op="create",outcome="internal",runtime="runsc"} 0`,
		`sandboxd_operation_seconds_count{op="create",runtime="runc"} 1`,
		`sandboxd_step_seconds_bucket{runtime="runc",step="rootfs",way="up",le="0.001"} 1`,
		`sandboxd_step_failures_total{runtime="runc",step="disk",way="up"} 1`,
		`sandboxd_step_failures_total{runtime="runsc",step="runtime",way="up"} 0`,
		`sandboxd_ended_total{reason="oom",runtime="runc"} 1`,
		`sandboxd_execs_total{outcome="ok",runtime="runsc"} 1`,
		`sandboxd_exec_start_seconds_count{runtime="runsc"} 1`,
		`sandboxd_http_requests_total{code="202",method="POST",route="/sandboxes"} 1`,
		`sandboxd_sweeps_total{outcome="failed"} 1`,
		`sandboxd_sandboxes{runtime="runc",state="running"} 3`,
		`sandboxd_creations{stage="going"} 2`,
		`sandboxd_creations{stage="waiting"} 5`,
		`sandboxd_refused_total{bound="memory"} 1`,
		`sandboxd_snapshots_removed_total{limit="max"} 1`,
		`sandboxd_snapshots_removed_total{limit="max_age"} 0`,
		`sandboxd_step_seconds_count{runtime="runsc",step="queue",way="up"} 0`,
		`sandboxd_pool_size_bytes 100`,
		`sandboxd_pool_used_bytes 40`,
		`sandboxd_deleting_sandboxes 4`,
		`sandboxd_prepared_slots{runtime="runc"} 6`,
		`sandboxd_egress_flows_total{cause="blocked",verdict="deny"} 7`,
		`sandboxd_backup_interval_seconds 3600`,
		`sandboxd_backup_last_success_timestamp_seconds 1.8e+09`,
		`sandboxd_backup_bytes 31`,
		`sandboxd_backup_failures_total 32`,
		`sandboxd_backup_drill_last_success_timestamp_seconds 1.9e+09`,
		`sandboxd_backup_drill_failed 1`,
		`sandboxd_backup_data_bytes 33`,
		`sandboxd_backup_data_sent_bytes 34`,
		`sandboxd_backup_data_left_out 35`,
		`sandboxd_backup_check_failed 1`,
		`sandboxd_backup_target_full 1`,
		`sandboxd_backup_unknown 36`,
		`sandboxd_network_bytes_total{direction="in"} 21`,
		`sandboxd_network_bytes_total{direction="out"} 22`,
		`sandboxd_network_packets_total{direction="in"} 23`,
		`sandboxd_network_packets_total{direction="out"} 24`,
		`sandboxd_egress_queue_packets 1`,
		`sandboxd_egress_queue_dropped_total{at="queue"} 2`,
		`sandboxd_egress_queue_dropped_total{at="socket"} 3`,
		`sandboxd_egress_name_queries_total{outcome="answered"} 41`,
		`sandboxd_egress_name_queries_total{outcome="unanswered"} 42`,
		`sandboxd_look_failed 0`,
		`go_goroutines `,
		`process_resident_memory_bytes `,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("no %s", line)
		}
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "sandboxd_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

// TestUnboundedLabels holds that nothing from outside makes a series.
func TestUnboundedLabels(t *testing.T) {
	m := newMetrics(full)
	for i := range 2000 {
		m.Request("X"+strings.Repeat("y", i), "/r", i, true, 0)
	}
	if n := strings.Count(scrape(t, m), "sandboxd_http_requests_total{"); n > 8 {
		t.Errorf("%d series of requests whose method and status others chose", n)
	}
}

// TestLookFails holds that a host that cannot be looked at hides no counter.
func TestLookFails(t *testing.T) {
	m := newMetrics(func() (Look, error) { return Look{}, errors.New("no pool") })
	m.Operation("delete", "runsc", OK, time.Second)
	text := scrape(t, m)
	for _, line := range []string{"sandboxd_look_failed 1", `sandboxd_operations_total{op="delete",outcome="ok",runtime="runsc"} 1`} {
		if !strings.Contains(text, line) {
			t.Errorf("no %s", line)
		}
	}
	if strings.Contains(text, "sandboxd_pool_size_bytes ") {
		t.Error("a pool that was not looked at has a size")
	}
}

// BenchmarkCreate is all that a creation counts.
func BenchmarkCreate(b *testing.B) {
	m := newMetrics(full)
	steps := []string{"namespaces", "disk", "rootfs", "cgroup", "network", "egress", "bundle", "runtime", "agent", "ports", "cpu"}
	b.ReportAllocs()
	for b.Loop() {
		m.Operation("create", "runc", OK, 20*time.Millisecond)
		for _, s := range steps {
			m.Step("up", s, "runc", time.Millisecond)
		}
		m.Request("POST", "/sandboxes", 202, false, time.Millisecond)
	}
}

// BenchmarkExec is all that a command counts.
func BenchmarkExec(b *testing.B) {
	m := newMetrics(full)
	b.ReportAllocs()
	for b.Loop() {
		m.Exec("runc", OK, time.Millisecond)
		m.Request("POST", "/sandboxes/{id}/proxy/{port}", 200, true, time.Millisecond)
	}
}

func BenchmarkScrape(b *testing.B) {
	m := newMetrics(full)
	for b.Loop() {
		scrape(b, m)
	}
}
