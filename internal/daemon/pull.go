package daemon

import (
	"context"
	"sync"

	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// pulls holds the progress of image pulls for sandboxes.
type pulls struct{ m sync.Map } // by ID: image.Progress

// of returns the progress for people; empty: no pull is under way.
func (p *pulls) of(r *record.Record) string {
	at, ok := p.m.Load(r.ID)
	if !ok {
		return ""
	}
	return pulling(r, at.(image.Progress))
}

func pulling(r *record.Record, at image.Progress) string {
	return "pulling image " + r.Spec.Image.Ref() + ": " + at.String()
}

// fetch pulls the image of a sandbox.
func (d *Daemon) fetch(asker context.Context, r *record.Record, progress func(string)) (record.Image, error) {
	ref, err := image.ParseReference(r.Spec.ImageURI)
	if err != nil {
		return record.Image{}, err
	}
	defer d.pulls.m.Delete(r.ID)
	worth := telling{}
	i, err := d.images.Pull(asker, image.Pull{Ref: ref, Missing: true}, func(at image.Progress) {
		d.pulls.m.Store(r.ID, at)
		if worth.telling(at) {
			progress(pulling(r, at))
		}
	})
	if err == nil {
		progress("image " + r.Spec.Image.Ref() + " is on this host")
	}
	return i, err
}

// telling keeps the progress of one pull from filling the history of its sandbox, which
// has room for some thirty lines. There is a line when the download begins, at each
// tenth of it, and when only unpacking is left.
type telling struct{ mark int64 }

func (t *telling) telling(at image.Progress) bool {
	mark := int64(1)
	switch {
	case at.Stage == image.StageDownload:
		mark = 2 + 10*at.Bytes/max(at.Total, 1)
	case at.Stage == image.StageUnpack && (t.mark < 2 || t.mark >= 12): // not during a download
		mark = 13
	}
	if mark <= t.mark {
		return false
	}
	t.mark = mark
	return true
}
