package pressure

import (
	"context"
	"io"

	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Snapshots takes no snapshot while the pool is full.
type Snapshots struct {
	*sandbox.Snapshots
	Ladder *Ladder
}

// Create refuses, or takes a snapshot.
func (s Snapshots) Create(ctx context.Context, idOrName string, q record.SnapshotRequest) (record.Snapshot, error) {
	if err := s.Ladder.Room("another snapshot", Pool); err != nil {
		return record.Snapshot{}, err
	}
	return s.Snapshots.Create(ctx, idOrName, q)
}

// Volumes adds no volume while the pool is full.
type Volumes struct {
	*sandbox.Volumes
	Ladder *Ladder
}

// Create refuses, or adds a volume.
func (v Volumes) Create(ctx context.Context, name string, bytes int64) (record.VolumeInfo, error) {
	if err := v.Ladder.Room("another volume", Pool); err != nil {
		return record.VolumeInfo{}, err
	}
	return v.Volumes.Create(ctx, name, bytes)
}

// Images adds no image while the disk of the state directory is full.
type Images struct {
	*image.Store
	Ladder *Ladder
}

func (i Images) room() error { return i.Ladder.Room("another image", State) }

// Build refuses, or builds an image.
func (i Images) Build(ctx context.Context, name string, replace bool, progress io.Writer) (record.Image, error) {
	if err := i.room(); err != nil {
		return record.Image{}, err
	}
	return i.Store.Build(ctx, name, replace, progress)
}

// Import refuses, or imports an image.
func (i Images) Import(ctx context.Context, a image.Archive, r io.Reader, progress func(image.Progress)) (record.Image, error) {
	if err := i.room(); err != nil {
		return record.Image{}, err
	}
	return i.Store.Import(ctx, a, r, progress)
}

// Pull refuses, or pulls an image.
func (i Images) Pull(ctx context.Context, p image.Pull, progress func(image.Progress)) (record.Image, error) {
	if err := i.room(); err != nil {
		return record.Image{}, err
	}
	return i.Store.Pull(ctx, p, progress)
}

// Commit refuses, or makes an image of a snapshot.
func (i Images) Commit(ctx context.Context, base record.Image, as image.Reference, replace bool, tar io.Reader) (record.Image, error) {
	if err := i.room(); err != nil {
		return record.Image{}, err
	}
	return i.Store.Commit(ctx, base, as, replace, tar)
}
