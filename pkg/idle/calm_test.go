package idle

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestCalm: sandboxes that nobody uses are paused before their time, after a while in which they were
// looked at; those in use, those that compute, and those whose policy deletes them are not.
func TestCalm(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, w *Watcher) {
		for id, action := range map[string]record.IdleAction{
			"pause": record.IdlePause, "hibernate": record.IdleHibernate, "stop": record.IdleStop, "kill": record.IdleKill,
			"used": record.IdlePause, "just": record.IdlePause,
		} {
			m.put(id, action)
		}
		synctest.Wait()
		calm := func(paused ...string) {
			t.Helper()
			w.Calm(t.Context(), "the disk is nearly full")
			synctest.Wait()
			want := map[string]bool{}
			for _, id := range paused {
				want[id] = true
			}
			all, _ := m.List(t.Context())
			for _, r := range all {
				is := r.State == record.Paused && r.Asleep()
				if is != want[r.ID] || is && r.Message != "nobody used it, and the disk is nearly full" {
					t.Errorf("%s is %s (%s)", r.ID, r.State, r.Message)
				}
			}
		}
		use := func(id string) (leave func()) {
			t.Helper()
			r, err := m.Get(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			return w.mustUse(t, &r)
		}
		leave := use("used")
		calm() // the first look
		time.Sleep(calmAfter - time.Second)
		use("just")()
		calm() // too soon
		m.use(0.5)
		time.Sleep(time.Second)
		calm()
		time.Sleep(calmAfter)
		calm() // they compute
		m.use(0)
		time.Sleep(10 * time.Second)
		use("just")()
		time.Sleep(calmAfter - 10*time.Second)
		calm("pause", "hibernate", "stop")
		time.Sleep(calmAfter)
		calm("pause", "hibernate", "stop", "just")
		leave()
		use("stop")() // a use wakes it, and its own time begins
		calm("pause", "hibernate", "just")
		time.Sleep(5 * time.Minute) // there was room meanwhile
		calm("pause", "hibernate", "just")
		time.Sleep(calmAfter)
		calm("pause", "hibernate", "just", "used", "stop")
	})
}
