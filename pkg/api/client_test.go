package api

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestCodesComeBack holds the two tables together: what a code becomes here,
// the client turns back into the same code, with the same text.
func TestCodesComeBack(t *testing.T) {
	w := newWorld(t)
	c, err := client.New("tcp://"+strings.TrimPrefix(w.url, "http://"), testKey)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	req := wire.CreateRequest{Image: &wire.Image{URI: "python"}, Entrypoint: []string{"x"}}
	for code := range table {
		w.fail = errs.New(code, "what was tried and why it failed")
		_, err := c.Create(t.Context(), req, false)
		if !errs.Is(err, code) || !strings.Contains(err.Error(), "what was tried and why it failed") {
			t.Errorf("%s came back as %s: %v", code, errs.CodeOf(err), err)
		}
	}
	w.fail = nil
	req.Extensions = map[string]string{wire.ExtName: "lab"}
	sb, timing, err := c.CreateTimed(t.Context(), req, true)
	if err != nil || sb.Status.State != wire.Running || timing == "" {
		t.Fatalf("%+v %q %v", sb, timing, err)
	}
	for range 250 {
		if _, err := c.Create(t.Context(),
			wire.CreateRequest{Image: &wire.Image{URI: "python"}, Entrypoint: []string{"x"}, Metadata: map[string]string{"a": "b"}},
			false); err != nil {
			t.Fatal(err)
		}
	}
	if l, err := c.List(t.Context(), client.Filter{States: []string{"running"}, Metadata: map[string]string{"a": "b"}}); len(l) != 250 || err != nil {
		t.Errorf("%d of 250 over two pages, %v", len(l), err)
	}
	if i, err := c.Inspect(t.Context(), "lab"); err != nil || i.ID != sb.ID || i.Host["link"] != "sb-"+sb.ID {
		t.Errorf("%+v %v", i, err)
	}
	w.set(sb.ID, func(r *record.Record) { r.State = record.Deleting })
	if _, err := c.Get(t.Context(), "lab"); !errs.Is(err, errs.NotFound) {
		t.Errorf("one that is being deleted: %v", err)
	}
}
