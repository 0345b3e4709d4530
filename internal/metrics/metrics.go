// Package metrics counts what the daemon does, for Prometheus. Operations are counted
// as they end; the state of the host (sandboxes, pool, flows) is read only at a scrape.
//
// No label has a value that a client, a guest or an image chose: no ID, no name, no
// path but those of the configuration, no rule. So the code fixes the number of series, about a thousand.
package metrics

import (
	"net/http"
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// OK is the outcome of a success. The others are "aborted", for an operation that no
// client wanted any more, and the codes of pkg/errs.
const OK = "ok"

// buckets are seconds: from a step of half a millisecond to the longest start.
var buckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 60}

// Config is the configuration of a Metrics.
type Config struct {
	Runtimes []string // their series exist from the start, so that a first event is an increase
	Ops      []string // likewise
	Reasons  []string // likewise
	Bounds   []string // likewise
	Kept     []string // likewise, the limits of snapshots
	Look     func() (Look, error)
}

// Metrics counts. Its methods may be called concurrently and take less than a
// microsecond.
type Metrics struct {
	registry *prometheus.Registry

	operations *prometheus.CounterVec   // op, runtime, outcome
	took       *prometheus.HistogramVec // op, runtime
	steps      *prometheus.HistogramVec // way, step, runtime
	failed     *prometheus.CounterVec   // way, step, runtime
	ended      *prometheus.CounterVec   // reason, runtime
	execs      *prometheus.CounterVec   // runtime, outcome
	started    *prometheus.HistogramVec // runtime
	requests   *prometheus.CounterVec   // method, route, code
	answered   *prometheus.HistogramVec // route
	sweeps     *prometheus.CounterVec   // outcome
	sweep      prometheus.Histogram
	refused    *prometheus.CounterVec // bound
	removed    *prometheus.CounterVec // limit
}

// New makes Metrics with their own registry.
func New(c Config) *Metrics {
	m := &Metrics{
		registry:   prometheus.NewRegistry(),
		operations: counter("operations_total", "Finished operations on sandboxes and images.", "op", "runtime", "outcome"),
		took:       histogram("operation_seconds", "How long operations took, failed ones included.", "op", "runtime"),
		steps: histogram("step_seconds", "How long the steps of creations and starts (up) and of removals (down) took.",
			"way", "step", "runtime"),
		failed:  counter("step_failures_total", "Steps at which an operation failed.", "way", "step", "runtime"),
		ended:   counter("ended_total", "Sandboxes that ended without being deleted, by reason.", "reason", "runtime"),
		execs:   counter("execs_total", "Commands that clients started in sandboxes.", "runtime", "outcome"),
		started: histogram("exec_start_seconds", "From the request for a command until its answer began.", "runtime"),
		requests: counter("http_requests_total", "Answered requests. For answers of guests the code is the class only.",
			"method", "route", "code"),
		answered: histogram("http_answer_seconds", "From a request until its answer began.", "route"),
		sweeps:   counter("sweeps_total", "Runs of the sweep.", "outcome"),
		refused:  counter("refused_total", "Creations and starts that were refused: by the limit of the host, or draining.", "bound"),
		removed:  counter("snapshots_removed_total", "Snapshots that were removed because they exceeded a limit.", "limit"),
		sweep: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "sandboxd_sweep_seconds", Help: "How long a sweep took.", Buckets: buckets,
		}),
	}
	m.registry.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		m.operations, m.took, m.steps, m.failed, m.ended, m.execs, m.started, m.requests, m.answered, m.sweeps, m.sweep, m.refused,
		m.removed,
		newLooker(c.Look),
	)
	m.begin(c)
	return m
}

// Build sets the version and instance. It may be called once.
func (m *Metrics) Build(version, instance string) {
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "sandboxd_build_info", Help: "Version of sandboxd; the value is 1.",
		ConstLabels: prometheus.Labels{"version": version, "daemon": instance, "goversion": runtime.Version()},
	})
	build.Set(1)
	m.registry.MustRegister(build)
}

// begin makes the series that dashboards and alerts use: a rate sees no increase when a
// series first appears.
func (m *Metrics) begin(c Config) {
	for _, r := range c.Runtimes {
		for _, op := range c.Ops {
			m.took.WithLabelValues(op, r)
			for _, outcome := range []string{OK, "internal"} {
				m.operations.WithLabelValues(op, r, outcome)
			}
		}
		for _, reason := range c.Reasons {
			m.ended.WithLabelValues(reason, r)
		}
		m.steps.WithLabelValues("up", "queue", r)
		m.failed.WithLabelValues("up", "runtime", r)
		m.execs.WithLabelValues(r, OK)
		m.started.WithLabelValues(r)
	}
	for _, b := range c.Bounds {
		m.refused.WithLabelValues(b)
	}
	for _, l := range c.Kept {
		m.removed.WithLabelValues(l)
	}
	m.sweeps.WithLabelValues(OK)
	m.sweeps.WithLabelValues("failed")
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sandboxd_" + name, Help: help}, labels)
}

func histogram(name, help string, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "sandboxd_" + name, Help: help, Buckets: buckets}, labels)
}

// Operation counts a finished operation. runtime may be empty.
func (m *Metrics) Operation(op, runtime, outcome string, took time.Duration) {
	m.operations.WithLabelValues(op, runtime, outcome).Inc()
	m.took.WithLabelValues(op, runtime).Observe(took.Seconds())
}

// Step counts one step of an operation; way is "up" or "down".
func (m *Metrics) Step(way, step, runtime string, took time.Duration) {
	m.steps.WithLabelValues(way, step, runtime).Observe(took.Seconds())
}

// StepFailed counts an operation that failed at a step.
func (m *Metrics) StepFailed(way, step, runtime string) {
	m.failed.WithLabelValues(way, step, runtime).Inc()
}

// Ended counts a sandbox that ended without being deleted.
func (m *Metrics) Ended(reason, runtime string) { m.ended.WithLabelValues(reason, runtime).Inc() }

// Exec counts a requested command, and how long its start took.
func (m *Metrics) Exec(runtime, outcome string, start time.Duration) {
	m.execs.WithLabelValues(runtime, outcome).Inc()
	m.started.WithLabelValues(runtime).Observe(start.Seconds())
}

// Request counts an answer. route is one of our patterns. first is the time until the
// answer began. For an answer from a guest it keeps only the class of the status.
func (m *Metrics) Request(method, route string, status int, guests bool, first time.Duration) {
	m.requests.WithLabelValues(knownMethod(method), route, code(status, guests)).Inc()
	m.answered.WithLabelValues(route).Observe(first.Seconds())
}

// Refused counts a creation that met a bound of the host.
func (m *Metrics) Refused(bound string) { m.refused.WithLabelValues(bound).Inc() }

// SnapshotRemoved counts a snapshot that was removed because of a limit.
func (m *Metrics) SnapshotRemoved(limit string) { m.removed.WithLabelValues(limit).Inc() }

// Sweep counts a periodic run of the recovery.
func (m *Metrics) Sweep(failed bool, took time.Duration) {
	outcome := OK
	if failed {
		outcome = "failed"
	}
	m.sweeps.WithLabelValues(outcome).Inc()
	m.sweep.Observe(took.Seconds())
}

func knownMethod(m string) string {
	switch m {
	case http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodHead, http.MethodOptions:
		return m
	}
	return "other"
}

func code(status int, guests bool) string {
	switch {
	case status == 0:
		return "none" // the client left before there was an answer
	case guests && (status < 100 || status > 599):
		return "other"
	case guests:
		return strconv.Itoa(status/100) + "xx"
	}
	return strconv.Itoa(status)
}

// Handler serves the metrics in the text format (GET /metrics).
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: 4, Timeout: 10 * time.Second,
	})
}
