package e2e_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// TestEndsSoon: of a certificate that ends soon, the log, an event, a metric and the doctor tell. When
// it is renewed they do not.
func TestEndsSoon(t *testing.T) {
	ca := newAuthority(t)
	ca.ends = 10 * time.Minute // of 70, so less than a third is left
	ca.serve("one")
	h := newHost(t, daemontest.Options{Listen: ca.config()})
	for e, err := range h.api.Events(t.Context(), time.Now().Add(-time.Hour), client.Notices{}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type != "expires" {
			continue
		}
		if e.ID != "" || e.Reason != "listen.tls_cert" || !strings.Contains(e.Message, `the certificate "CN=one" in `+ca.dir) {
			t.Errorf("%+v", e)
		}
		break
	}
	if !strings.Contains(h.Log(), `msg="ends soon" what=listen.tls_cert name="CN=one"`) {
		t.Error("the log does not tell")
	}
	left := func() (seconds, notice float64) {
		t.Helper()
		for line := range strings.Lines(scrape(t, h.Daemon)) {
			labels := fmt.Sprintf(`{file="%s/tls.crt",what="listen.tls_cert"} `, ca.dir)
			if v, ok := strings.CutPrefix(line, "sandboxd_validity_left_seconds"+labels); ok {
				_, _ = fmt.Sscan(v, &seconds)
			}
			if v, ok := strings.CutPrefix(line, "sandboxd_validity_notice_seconds"+labels); ok {
				_, _ = fmt.Sscan(v, &notice)
			}
		}
		return seconds, notice
	}
	if seconds, notice := left(); seconds <= 0 || seconds >= notice || notice > 70*60/3+1 {
		t.Errorf("%v s are left, and it is said from %v s on", seconds, notice)
	}
	check := func() finding {
		t.Helper()
		found, _ := doctor(t, h.Config) // an error: some other check fails
		i := slices.IndexFunc(found, func(f finding) bool { return f.Check == "certificates" })
		if i < 0 {
			t.Fatalf("the doctor does not check certificates: %+v", found)
		}
		return found[i]
	}
	if f := check(); f.Status != "warn" || !strings.Contains(f.Detail, "CN=one") {
		t.Errorf("the doctor: %+v", f)
	}
	ca.ends = time.Hour
	ca.serve("two")
	sweepNow(t, h)
	if seconds, notice := left(); seconds <= notice {
		t.Errorf("renewed: %v s are left, and it is said from %v s on", seconds, notice)
	}
	if f := check(); f.Status != "ok" {
		t.Errorf("the doctor, of the renewed one: %+v", f)
	}
}

// sweepNow has the daemon do at once what it does each minute.
func sweepNow(t *testing.T, h host) {
	t.Helper()
	if status, body := askBy(t, http.MethodPost, adminSocket(h.Daemon), "/sweep"); status != http.StatusNoContent {
		t.Errorf("sweep: %d %.80s", status, body)
	}
}
