package upgrade

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// dead is the change back from a version that does not serve. The version that the link current names serves after a
// restart, unless it is the dead one.
func (s site) dead(t *testing.T, out io.Writer, back string) *Change {
	t.Helper()
	s.put(t, "config.toml", fmt.Sprintf("state_dir = %q\n", filepath.Join(s.dir, "state")), 0o600)
	c, err := s.change(out)
	if err != nil {
		t.Fatal(err)
	}
	served, restart := c.Client, c.Restart
	if c.Client, err = client.New("unix://"+filepath.Join(s.dir, "nobody.sock"), ""); err != nil {
		t.Fatal(err)
	}
	now, err := s.root.Named(versions.Current)
	if err != nil {
		t.Fatal(err)
	}
	c.Config, c.To = filepath.Join(s.dir, "config.toml"), back
	c.Restart = func(ctx context.Context) error {
		if current, err := s.root.Named(versions.Current); err != nil || current == now {
			return fmt.Errorf("%s does not start", current)
		}
		c.Client = served
		return restart(ctx)
	}
	return c
}

// TestRescue: a rollback leaves a version that does not serve. If that has brought the state forward, the
// error names the copy from before; with that in its place, the rollback goes on.
func TestRescue(t *testing.T) {
	s := build(t, t.TempDir())
	var out strings.Builder
	err := s.dead(t, &out, before).Run(t.Context())
	if err != nil || !strings.Contains(out.String(), "so nothing can be compared with it") {
		t.Fatalf("back from a dead version: %v\n%s", err, out.String())
	}
	if version, err := s.consistent(); err != nil || version != before {
		t.Errorf("%q, %v", version, err)
	}

	s = build(t, t.TempDir())
	point := func() {
		t.Helper()
		for l, version := range map[versions.Link]string{versions.Current: to, versions.Previous: from} {
			if err := s.root.Point(l, version); err != nil {
				t.Fatal(err)
			}
		}
		s.put(t, "units/sandboxd.service", "unit of "+to, 0o644)
	}
	point() // as a package does; it died before it opened the state
	out.Reset()
	if err := s.dead(t, &out, from).Run(t.Context()); err != nil {
		t.Fatalf("back from a version that did not open the state: %v\n%s", err, out.String())
	}
	point()
	if err := s.open(to); err != nil { // brings it forward
		t.Fatal(err)
	}
	kept := store.KeptName(s.state, old)
	err = s.dead(t, &out, from).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), kept) {
		t.Fatalf("over a newer schema: %v", err)
	}
	if current, err := s.root.Named(versions.Current); err != nil || current != to {
		t.Errorf("after a refusal %q is current, %v", current, err)
	}
	if err := os.Rename(kept, s.state); err != nil {
		t.Fatal(err)
	}
	if err := s.dead(t, &out, from).Run(t.Context()); err != nil {
		t.Errorf("with the copy in its place: %v\n%s", err, out.String())
	}
	if err := s.reads(old); err != nil {
		t.Error(err)
	}
}

// TestBusy: a daemon that lives, and fails one question, is not taken for a dead one: without a comparison the gate
// would pass any version that serves.
func TestBusy(t *testing.T) {
	s := build(t, t.TempDir())
	var out strings.Builder
	c, err := s.change(&out)
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "busy.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	busy := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if strings.HasSuffix(r.URL.Path, "/version") {
			fmt.Fprintf(w, `{"version":%q,"runtimes":["runc"]}`, from)
			return
		}
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprint(w, `{"code":"GENERAL::UNKNOWN_ERROR","message":"the store is busy"}`)
	})}
	go busy.Serve(l) //nolint:errcheck // it is closed
	t.Cleanup(func() { busy.Close() })
	if c.Client, err = client.New("unix://"+socket, ""); err != nil {
		t.Fatal(err)
	}
	if err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "which runs") ||
		!strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("the change goes on: %v\n%s", err, out.String())
	}
	if version, err := s.consistent(); err != nil || version != from {
		t.Errorf("%q, %v", version, err)
	}
}
