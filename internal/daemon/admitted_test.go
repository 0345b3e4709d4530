package daemon

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestQueued: the answer to a creation waits for none whose turn or image is to come.
func TestQueued(t *testing.T) {
	queue := admission.NewQueue(1)
	a := &admitted{gate: &admission.Gate{Queue: queue}}
	here := record.Spec{ImageURI: "python:3", Image: record.Image{Layers: []string{"sha256:a"}}}
	first, second, far := &record.Record{ID: "first", Spec: here}, &record.Record{ID: "second", Spec: here}, &record.Record{ID: "far"}
	far.Spec.ImageURI = "registry.example.com/far"
	now, later := queue.Enter(t.Context(), first.ID), queue.Enter(t.Context(), second.ID)
	defer later.Done()
	if a.Queued(first) || !a.Queued(second) || !a.Queued(far) {
		t.Errorf("first %t, second %t, far %t", a.Queued(first), a.Queued(second), a.Queued(far))
	}
	now.Done()
	<-later.Came()
	if a.Queued(second) {
		t.Error("the turn of the second has come")
	}
	restored := &record.Record{ID: "restored", Spec: record.Spec{Snapshot: "snap-x"}}
	if a.Queued(restored) {
		t.Error("one of a snapshot needs no image")
	}
}
