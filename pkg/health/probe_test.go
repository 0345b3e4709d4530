package health

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// probed is a sandbox with a probe that is tried every five seconds.
func probed(id string, policy record.RestartPolicy) record.Record {
	r := box(id, policy, 0)
	r.Spec.Ready = record.Probe{
		Command: "check", Interval: 5 * time.Second, Timeout: time.Second, StartPeriod: 20 * time.Second,
		Retries: 3,
	}
	return r
}

func TestBecomesReady(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, w *Watcher) {
		m.answer("not yet", errors.New("exit code 1"))
		m.put(probed("a", record.RestartNo))
		synctest.Wait()
		ready := make(chan error)
		r := m.box("a")
		go func() { ready <- w.Await(t.Context(), r) }()
		time.Sleep(19 * time.Second)
		if h, _ := w.Of(r); h.State != Starting || h.Failures != 0 || h.Output != "exit code 1: not yet" ||
			time.Since(h.Checked) > 2*time.Second {
			t.Errorf("%+v", h)
		}
		if n := m.tried(); n < 15 || n > 40 {
			t.Errorf("%d tries in 19 seconds", n)
		}
		m.answer("fine", nil)
		time.Sleep(2 * time.Second)
		if err := <-ready; err != nil {
			t.Error(err)
		}
		if h, ok := w.Of(r); !ok || h.State != Healthy || h.Output != "fine" {
			t.Errorf("%+v", h)
		}
		before := m.tried()
		time.Sleep(time.Minute)
		if n := m.tried() - before; n < 10 || n > 14 {
			t.Errorf("%d tries in a minute", n)
		}
		m.answer("", errors.New("gone"))
		time.Sleep(20 * time.Second)
		if h, _ := w.Of(r); h.State != Unhealthy || h.Failures < 3 {
			t.Errorf("%+v", h)
		}
		m.answer("", nil)
		time.Sleep(6 * time.Second)
		synctest.Wait()
		m.mu.Lock()
		got := strings.Join(m.said, ", ")
		m.mu.Unlock()
		if got != "a healthy, a unhealthy, a healthy" || len(m.recycles()) > 0 {
			t.Errorf("said %s; recycled %v", got, m.recycles())
		}
	})
}

// TestRecycled: with a policy, what never becomes ready is started anew, with
// the same back-off.
func TestRecycled(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, w *Watcher) {
		m.answer("", errors.New("no"))
		m.put(probed("a", record.RestartOnFailure))
		synctest.Wait()
		r := m.box("a")
		if err := w.Await(t.Context(), r); err != nil {
			t.Error(err)
		}
		if d := time.Since(m.began); d < 25*time.Second || d > 40*time.Second {
			t.Errorf("it was given up after %v", d)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		now := m.box("a")
		if len(m.recycles()) != 1 || m.recycles()[0] != "a: no" || now.State != record.Running || now.Restarts != 1 {
			t.Errorf("%v, %+v", m.recycles(), now)
		}
		if h, ok := w.Of(now); !ok || h.State != Starting {
			t.Errorf("its new life begins with %+v", h)
		}
	})
}

// TestPaused: a paused sandbox is not tried, and feels as before.
func TestPaused(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, w *Watcher) {
		m.answer("", nil)
		m.put(probed("a", record.RestartAlways))
		time.Sleep(10 * time.Second)
		r := m.box("a")
		r.State = record.Paused
		m.put(r)
		synctest.Wait()
		before := m.tried()
		time.Sleep(time.Hour)
		if n := m.tried(); n != before {
			t.Errorf("%d tries while it was paused", n-before)
		}
		if h, _ := w.Of(r); h.State != Healthy {
			t.Errorf("%+v", h)
		}
		r.State = record.Running
		m.put(r)
		time.Sleep(time.Minute)
		synctest.Wait()
		if m.tried() == before || len(m.recycles()) > 0 {
			t.Errorf("%d tries, recycled %v", m.tried()-before, m.recycles())
		}
	})
}

// TestStandsStill: what a sandbox does not answer while it stands still for a
// snapshot does not count, and what it does not answer afterwards does.
func TestStandsStill(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, w *Watcher) {
		m.answer("", nil)
		m.put(probed("a", record.RestartAlways))
		time.Sleep(10 * time.Second)
		r := m.box("a")
		m.answer("", errors.New("no"))
		stand := func(still bool) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.stands = still
		}
		stand(true)
		time.Sleep(time.Hour)
		if h, _ := w.Of(r); h.State != Healthy || len(m.recycles()) > 0 {
			t.Errorf("%+v, recycled %v", h, m.recycles())
		}
		stand(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(m.recycles()) == 0 {
			t.Error("it is believed to stand still for ever")
		}
	})
}

// TestHangs: a probe that hangs is a failure after its time, and holds up
// neither another sandbox nor a deletion.
func TestHangs(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, w *Watcher) {
		m.probe = func(ctx context.Context, _ string) (string, error) {
			<-ctx.Done()
			return "", ctx.Err()
		}
		r := probed("a", record.RestartNo)
		r.Spec.Ready.Port, r.Spec.Ready.StartPeriod = 80, 0
		m.put(r)
		m.put(probed("b", record.RestartNo))
		time.Sleep(19 * time.Second)
		a, b := m.box("a"), m.box("b")
		if h, _ := w.Of(a); h.State != Unhealthy || h.Output != "no answer within 1s" {
			t.Errorf("%+v", h)
		}
		m.answer("", nil)
		time.Sleep(10 * time.Second)
		if h, _ := w.Of(b); h.State != Healthy {
			t.Errorf("%+v", h)
		}
		waits := make(chan error)
		b.Started = time.Now() // a life that is not known yet
		go func() { waits <- w.Await(t.Context(), b) }()
		synctest.Wait()
		m.remove("b")
		if err := <-waits; err != nil {
			t.Error(err)
		}
	})
}
