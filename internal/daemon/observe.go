package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/internal/metrics"
	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/retention"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// newMetrics makes the metrics. The packages below do not know them; they only call
// callbacks.
func (d *Daemon) newMetrics() *metrics.Metrics {
	return metrics.New(metrics.Config{
		Runtimes: []string{oci.Runsc, oci.Runc},
		Ops:      sandbox.OperationNames(),
		Reasons:  []string{string(record.RuntimeCrash), string(record.OOM), string(record.CreateFailed)},
		Bounds:   admission.BoundNames(),
		Kept:     retention.LimitNames(),
		Look: func() (metrics.Look, error) {
			l, err := d.look()
			if err != nil {
				d.log.Warn("metrics are incomplete: cannot read the state of the host", "err", err)
			}
			return l, err
		},
	})
}

// look reads the state of the host: memory, one statfs and one file of /proc.
func (d *Daemon) look() (l metrics.Look, err error) {
	all, err := d.store.List(context.Background())
	if err != nil {
		return l, err
	}
	l.Sandboxes = map[metrics.Kind]int{}
	l.Prepared = map[string]int{oci.Runsc: 0, oci.Runc: 0}
	for _, runtime := range []string{oci.Runsc, oci.Runc} {
		for _, state := range []record.State{record.Creating, record.Running, record.Paused, record.Hibernated, record.Ended} {
			l.Sandboxes[metrics.Kind{State: string(state), Runtime: runtime}] = 0
		}
	}
	for _, r := range all {
		switch r.State {
		case record.Deleting:
			l.Deleting++
			continue
		case record.Prepared:
			if r.Pool.Name == "" && !sandbox.StockOf(d.manager).Making(r.ID) {
				l.Prepared[r.Spec.Runtime]++
			}
			continue
		}
		l.Sandboxes[metrics.Kind{State: string(r.State), Runtime: r.Spec.Runtime}]++
	}
	pools, err := sandbox.StockOf(d.manager).Pools(context.Background())
	if err != nil {
		return l, err
	}
	for _, p := range pools {
		m := metrics.Pool{Name: p.Name, Ready: p.Available, Allocated: p.Allocated, Work: map[string]metrics.PoolWork{}}
		for result, w := range p.Work {
			m.Work[result] = metrics.PoolWork{N: w.N, Seconds: w.Took.Seconds()}
		}
		l.Pools = append(l.Pools, m)
	}
	l.Lasting = map[string]bool{}
	states, err := lasting(context.Background(), d)
	if err != nil {
		return l, err
	}
	for state, why := range states {
		l.Lasting[state] = why != ""
	}
	l.Creating, l.Waiting = d.queue.Len()
	lookAhead(d, &l)
	free, total, err := d.files.Pool.Space()
	if err != nil {
		return l, err
	}
	l.PoolBytes, l.PoolUsedBytes = total, total-free
	for _, c := range d.egress.FlowCounts() {
		l.Flows = append(l.Flows, metrics.Flows(c))
	}
	t := d.egress.FlowLog.Traffic()
	l.RxBytes, l.TxBytes, l.RxPackets, l.TxPackets = t.RxBytes, t.TxBytes, t.RxPackets, t.TxPackets
	names := egress.CountNames(d.egress)
	l.NamesAnswered, l.NamesUnanswered = names.Answered, names.Unanswered
	q, err := d.egress.QueueCounts()
	l.QueueWaiting, l.QueueOverflowed, l.QueueLost = q.Waiting, q.Overflowed, q.Lost
	if k := d.backups; k != nil {
		s := k.Status()
		l.Backup = metrics.Backup{
			Every: k.Every, Good: s.Backup.Good.Time, Bytes: s.Backup.Good.Bytes, Failed: k.Failures(),
			DrillGood: s.Drill.Good.Time, DrillFails: !s.Drill.Since.IsZero(),
			CheckFails: !s.Check.Since.IsZero(), Full: s.Backup.Last.Full, Unknown: s.Unknown.Count,
		}
		if run := s.Backup.Good.Data; run != nil {
			l.Backup.DataBytes, l.Backup.DataSent, l.Backup.DataLeft = run.Bytes, run.Sent, run.Left
		}
	}
	return l, err
}

// openHistory opens the histories of the sandboxes that exist already.
func (d *Daemon) openHistory(ctx context.Context) error {
	all, err := d.manager.List(ctx)
	for i := range all {
		d.history.Open(all[i].ID)
		d.denials.open(all[i].ID)
	}
	return err
}

// onEvent is called for every event of the Manager.
func (d *Daemon) onEvent(e events.Event) {
	switch e.Type {
	case string(record.Creating):
		d.history.Open(e.ID)
		d.denials.open(e.ID)
	case events.Deleted:
		d.history.Forget(e.ID)
		d.denials.forget(e.ID)
		if err := d.egress.FlowLog.Forget(e.ID); err != nil {
			d.log.Warn("the flow log of a deleted sandbox was not removed; the sweep tries again", "sandbox", e.ID, "err", err)
		}
		return
	}
	d.history.Note(e.ID, history.State, e.Time, history.Change(e.Type, e.Reason, e.Message))
}

// onDeny is called for denied flows and queries. A repeated denial gets no line at level
// info and no event, and those of one guest are limited.
func (d *Daemon) onDeny(n egress.Denial) {
	now := time.Now()
	denied := denialOf(n, now)
	d.denials.note(n.ID, denied)
	level := slog.LevelDebug
	text := "denied " + denied.Protocol + " " + denied.Target() + ": " + denied.Reason
	if d.history.Note(n.ID, history.Network, now, text) && d.denials.allow(n.ID, now) {
		level = slog.LevelInfo
		d.denials.tellReaders(n.ID, denied.Protocol+" "+denied.Target()+": "+denied.Reason)
	}
	attrs := []any{"sandbox", n.ID, "proto", n.Proto}
	if n.Dst.IsValid() {
		attrs = append(attrs, "dst", n.Dst.String())
	}
	if denied.Name != "" {
		attrs = append(attrs, "name", denied.Name)
	}
	d.log.Log(context.Background(), level, "denied", append(attrs, "rule", n.Rule, "by", n.By, "reason", denied.Reason)...)
}

// onOperation is called for every operation of the Manager.
func (d *Daemon) onOperation(o sandbox.Operation) {
	d.history.Note(o.ID, history.Operation, time.Now(), operationText(o))
	d.metrics.Operation(o.Name, o.Runtime, o.Outcome, o.Took)
	if o.Ended != "" {
		d.metrics.Ended(string(o.Ended), o.Runtime)
	}
	way := "down"
	if o.Up {
		way = "up"
	}
	if o.Failed != "" {
		d.metrics.StepFailed(way, o.Failed, o.Runtime)
	}
	for _, s := range o.Steps {
		d.metrics.Step(way, s.Name, o.Runtime, s.Took)
	}
}

// operationText formats an operation on one line.
func operationText(o sandbox.Operation) string {
	text := fmt.Sprintf("%s: %s in %s", o.Name, o.Outcome, o.Took.Round(10*time.Microsecond))
	if o.Text != "" {
		text += ": " + o.Text
	}
	for i, s := range o.Steps {
		sep := ", "
		if i == 0 {
			sep = "; "
		}
		text += sep + s.Name + " " + s.Took.Round(10*time.Microsecond).String()
	}
	return text
}

// onAnswer is called for every finished request of the API.
func (d *Daemon) onAnswer(a api.Answer) {
	d.metrics.Request(a.Method, a.Route, a.Status, a.Guests, a.First)
	switch {
	case a.Op == "":
	case a.Runtime != "":
		d.metrics.Exec(a.Runtime, a.Outcome, a.First)
	default:
		d.metrics.Operation(a.Op, "", a.Outcome, a.Took)
	}
}

// serveAdmin serves metrics and profiles to root, on a socket of their own: the API may
// be open to a group, and to other hosts. Profiles show memory, which contains keys; so
// listen.metrics serves only the metrics.
func (d *Daemon) serveAdmin(version string) (stop func(), err error) {
	d.metrics.Build(version, d.cfg.Instance.String())
	l, err := bindUnix("listen.admin_socket", d.cfg.Listen.AdminSocket, 0o600)
	if err != nil {
		return nil, err
	}
	all := http.NewServeMux()
	all.Handle("GET /metrics", d.metrics.Handler())
	all.HandleFunc("POST /sweep", background{d}.sweepNow)
	all.HandleFunc("GET /debug/pprof/", pprof.Index)
	all.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	all.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	all.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	admin := d.serveNumbers("the admin socket", l, all)
	if d.cfg.Listen.Metrics == "" {
		return func() { admin.Close() }, nil
	}
	tcp, _, err := listenTCP("listen.metrics", d.cfg.Listen.Metrics)
	if err != nil {
		admin.Close()
		l.Close() // its server may not run yet
		return nil, err
	}
	alone := http.NewServeMux()
	alone.Handle("GET /metrics", d.metrics.Handler())
	metrics := d.serveNumbers("listen.metrics", secured(tcp, d.cert), alone)
	return func() { admin.Close(); metrics.Close() }, nil
}

func (d *Daemon) serveNumbers(what string, l net.Listener, h http.Handler) *auth.Server {
	srv := auth.Listener{}.Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := auth.PeerOf(r).Clear(); err != nil {
			w.Header().Set("Connection", "close")
			http.NewResponseController(w).SetReadDeadline(time.Now()) //nolint:errcheck // what follows is not a body
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		h.ServeHTTP(w, r)
	}), nil)
	srv.WriteTimeout = 5 * time.Minute
	go func() {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			d.log.Error(what+" no longer answers", "err", err)
		}
	}()
	return srv
}

// healthOf returns the health of r as an API type; nil: r has no probe.
func (d *Daemon) healthOf(r record.Record) *wire.Health {
	h, ok := d.watcher.Of(r)
	if !ok {
		return nil
	}
	out := &wire.Health{State: string(h.State), Failures: h.Failures, LastOutput: h.Output}
	if !h.Checked.IsZero() {
		t := h.Checked.UTC().Truncate(time.Microsecond)
		out.CheckedAt = &t
	}
	return out
}
