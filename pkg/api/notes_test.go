package api

import (
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestNotes: a sandbox whose image is another version than its name says, and one with
// more memory than the host, say so in every answer that shows them.
func TestNotes(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.HostMemoryBytes = 24<<30 - 4096 })
	create := func(image, memory string) wire.Sandbox {
		t.Helper()
		return w.do("POST", "/v1/sandboxes",
			`{"image":{"uri":"`+image+`"},"entrypoint":["x"],"resourceLimits":{"memory":"`+memory+`"}}`).sandbox(t)
	}
	const version = "image python:3.13 is python:latest (python 3.11.2)"
	const memory = "the memory limit of 1Ti is more than the 24575 MiB that this host has: the host's memory runs out first"
	for _, c := range []struct {
		image, memory string
		want          []string
	}{
		{"python", "24Gi", []string{strings.Replace(memory, "1Ti", "24Gi", 1)}},
		{"python", "1Gi", nil},
		{"python:3.11-slim", "1Gi", nil},
		{"python:3.13", "1Gi", []string{version}},
		{"python:3.13", "1Ti", []string{version, memory}},
	} {
		made := create(c.image, c.memory)
		got := w.do("GET", "/v1/sandboxes/"+made.ID, "").sandbox(t)
		inspected := w.do("GET", "/v1/sandboxes/"+made.ID+"/inspect", "").sandbox(t) // its first fields
		for where, sb := range map[string]wire.Sandbox{"create": made, "get": got, "inspect": inspected} {
			if !slices.Equal(sb.Sandboxd.Notes, c.want) {
				t.Errorf("%s with %s, %s: %q, want %q", c.image, c.memory, where, sb.Sandboxd.Notes, c.want)
			}
		}
	}
	sb := create("python", "1Gi")
	w.set(sb.ID, func(r *record.Record) { r.State = record.Running })
	grown := w.do("PATCH", "/v1/sandboxes/"+sb.ID+"/limits", `{"resourceLimits":{"memory":"1Ti"}}`).sandbox(t)
	if !slices.Equal(grown.Sandboxd.Notes, []string{memory}) {
		t.Errorf("after an update: %q", grown.Sandboxd.Notes)
	}
}
