package fork

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// TestWatch: copies of the sandbox are counted when they run, and nothing else is.
func TestWatch(t *testing.T) {
	of := map[string]string{"source": "", "c1": "source", "c2": "source", "later": "source", "alone": "", "stranger": "other"}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := strings.TrimPrefix(r.URL.Path, "/v1/sandboxes/")
		if id == "lab" {
			id = "source"
		}
		if source, known := of[id]; known {
			sb := wire.Sandbox{ID: id, Sandboxd: &wire.Info{}}
			if source != "" {
				sb.Sandboxd.Fork = &wire.ForkOf{ID: "fork-" + id[:1], Source: source}
			}
			json.NewEncoder(w).Encode(sb) //nolint:errcheck // the client sees it
			return
		}
		if !strings.HasSuffix(r.URL.Path, "/events") || r.URL.Query().Get("since") == "" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for i, e := range []wire.Event{
			{Type: "running", ID: "alone"},
			{Type: "creating", ID: "c1"},
			{Type: "running", ID: "c1"},
			{Type: "running", ID: "stranger"},
			{Type: "running", ID: "gone"},
			{Type: "ended", ID: "c1"},
			{Type: "running", ID: "later"}, // of another fork
			{Type: "running", ID: "c2"},
		} {
			data, _ := json.Marshal(e)
			fmt.Fprintf(w, "id: %d\ndata: %s\n\n", i+1, data)
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	defer s.Close()
	cl, err := client.New(s.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var all []int
	watch(ctx, cl, "lab", time.Now(), func(n int) {
		if all = append(all, n); n == 2 {
			stop()
		}
	})
	if !slices.Equal(all, []int{0, 1, 2}) {
		t.Errorf("counted %v", all)
	}
	watch(t.Context(), cl, "nobody", time.Now(), func(n int) { t.Errorf("of no sandbox: %d", n) })
}

// TestSaid: without a terminal, a fork says every ten seconds how far it is, and no longer than it lasts.
func TestSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		up, clear := said(&out, 200)
		up(3)
		time.Sleep(sayEvery + time.Second)
		up(7)
		time.Sleep(sayEvery)
		clear()
		time.Sleep(time.Minute)
		if got, want := out.String(), "fork: 3 of 200 copies are made\nfork: 7 of 200 copies are made\n"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
}
