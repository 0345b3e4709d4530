package e2e_test

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestIdempotencyKey asks for one sandbox many times: at once, of a daemon that
// died before it answered, of the next one, and when the sandbox is gone.
func TestIdempotencyKey(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			body := fmt.Sprintf(`{"image":{"uri":"base"},"entrypoint":["tail","-f","/dev/null"],"resourceLimits":{"memory":"128Mi"},"extensions":{"sandboxd.runtime":%q}}`, runtime)
			ask := func(key, body string) (answer, string) {
				t.Helper()
				a := l.request("POST", "/v1/sandboxes?wait=true", strings.NewReader(body), "Idempotency-Key", key)
				var sb wire.Sandbox
				if err := json.Unmarshal([]byte(a.body), &sb); err != nil {
					t.Fatal(err)
				}
				return a, sb.ID
			}
			race, lost := rand.Text(), rand.Text() // notes outlive a run of this test
			var wg sync.WaitGroup
			ids := make([]string, 8)
			for i := range ids {
				wg.Go(func() { _, ids[i] = ask(race, body) })
			}
			wg.Wait()
			for _, id := range ids {
				if id == "" || id != ids[0] {
					t.Fatalf("asked at once: %q", ids)
				}
			}

			h.Stop()
			if err := h.StartArmed("after:store:insert=kill"); err != nil {
				t.Fatal(err)
			}
			if a, err := l.try("POST", "/v1/sandboxes", strings.NewReader(body), "Idempotency-Key", lost); err == nil {
				t.Fatalf("a daemon that died answered %d %s", a.status, a.body)
			}
			<-h.Ended()
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			if a, id := ask(race, body); a.status != 202 || id != ids[0] || a.header.Get("Idempotency-Replayed") != "true" {
				t.Errorf("after the restart: %d %s, want %s", a.status, a.body, ids[0])
			}
			l.answers(t, ids[0])
			a, id := ask(lost, body)
			if a.status != 202 || a.header.Get("Idempotency-Replayed") != "true" {
				t.Errorf("whose answer was lost: %d %s", a.status, a.body)
			}
			if all := strings.Fields(l.ok("ps", "-a", "-q")); len(all) != 2 {
				t.Errorf("there are %q, want %s and %s", all, ids[0], id)
			}
			if a, _ := ask(race, strings.Replace(body, "128Mi", "256Mi", 1)); a.status != 409 ||
				!strings.Contains(a.body, "IDEMPOTENCY_KEY_REUSED") {
				t.Errorf("another body: %d %s", a.status, a.body)
			}
			l.ok("rm", "-f", ids[0])
			if a, _ := ask(race, body); a.status != 409 || !strings.Contains(a.body, "IDEMPOTENCY_KEY_SPENT") {
				t.Errorf("of one that is gone: %d %s", a.status, a.body)
			}
			h.deleteAll(t)
		})
	}
}
