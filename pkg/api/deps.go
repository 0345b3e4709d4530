package api

import (
	"context"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// These are what the server needs of the rest of the daemon, and no more;
// internal/daemon puts the real ones behind it. Errors made by errs.New reach the
// client, all others are "internal" and reach only the log.
type (
	// Sandboxes creates, finds and ends sandboxes. (sandbox.Manager)
	//
	// Where idOrName stands, a unique name is as good as an ID; where id stands
	// it is an ID that Get has returned. What does not exist is errs.NotFound.
	Sandboxes interface {
		// Create returns when the intent is durable; from then on ctx does not matter.
		Create(ctx context.Context, s record.Spec) (record.Record, error)
		// Made says what was made for the key of a request, and when. Create
		// refuses one that has made something with record.CodeRequestRace.
		Made(ctx context.Context, key string) (m record.Made, ok bool, err error)
		// Await blocks while the sandbox is being brought up.
		Await(ctx context.Context, idOrName string) (record.Record, error)
		Get(ctx context.Context, idOrName string) (record.Record, error)
		List(ctx context.Context) ([]*record.Record, error) // newest first; shared, to be read only
		// Delete returns when the processes are dead and the ID is gone. It
		// succeeds on a sandbox that is being deleted by somebody else, and
		// may know IDs that Get does not: what is left of a failed delete.
		Delete(ctx context.Context, id string) error
		// Start brings one that has ended up again; see Create and Await.
		Start(ctx context.Context, id string) (record.Record, error)
		// Stop ends one and keeps it. Its entrypoint has grace to end by itself.
		Stop(ctx context.Context, id string, grace time.Duration) error
		Pause(ctx context.Context, id string) error
		Resume(ctx context.Context, id string) error
		Renew(ctx context.Context, id string, expires time.Time) (record.Record, error)
		// Update changes terms of a sandbox that runs or is paused: change gets
		// the present ones.
		Update(ctx context.Context, id string, change func(*record.Terms) error) (record.Record, error)
		// PatchLabels sets the labels given and removes those that are nil.
		PatchLabels(ctx context.Context, id string, patch map[string]*string) (record.Record, error)
		// Steps says how long each step of the creation took, in order.
		Steps(id string) []Step
		// Life ends when the sandbox has ended: what streams from it will not
		// end by itself, since its link is gone without a word.
		Life(id string) context.Context
		// Subscribe sends what happens until ctx ends. A slow reader loses events, not the daemon.
		Subscribe(ctx context.Context) <-chan wire.Event
	}
	// Snapshots keeps copies of the files of sandboxes. (sandbox.Snapshots)
	//
	// A name is as good as an ID if no other snapshot has it. What does not
	// exist is errs.NotFound.
	Snapshots interface {
		// Create returns when the intent is durable; from then on ctx does not matter.
		Create(ctx context.Context, sandbox, name string) (record.Snapshot, error)
		// Await blocks while the snapshot is being taken.
		Await(ctx context.Context, id string) (record.Snapshot, error)
		Get(ctx context.Context, idOrName string) (record.Snapshot, error)
		List(ctx context.Context) ([]record.Snapshot, error) // newest first
		Delete(ctx context.Context, idOrName string) error
	}
	// Diffs compares the files of sandboxes and snapshots. (snapshot)
	Diffs interface {
		// Diff calls emit for what is different between two trees over the same
		// layers; an empty base is the layers alone.
		Diff(ctx context.Context, of, base string, layers []string, emit func(kind, path string) error) error
	}
	// Images knows the root file systems of this host. (image)
	Images interface {
		// Resolve finds an image, or the one that the reference is an alias of. An
		// unknown one is errs.NotFound.
		Resolve(ctx context.Context, ref image.Reference) (record.Image, error)
		List(ctx context.Context) ([]record.Image, error)
		// Aliases lists the other names of an image.
		Aliases(i record.Image) []string
		// Build makes the image of the recipe name and writes lines to progress.
		Build(ctx context.Context, name string, progress io.Writer) (record.Image, error)
		// Import makes an image of an archive and reports how far it is.
		Import(ctx context.Context, a image.Archive, r io.Reader, progress func(image.Progress)) (record.Image, error)
		// Pull gets an image from a registry. Credentials are in ctx (image.WithAuth).
		Pull(ctx context.Context, p image.Pull, progress func(image.Progress)) (record.Image, error)
		// CanPull reports whether a registry is configured for an image.
		CanPull(ref image.Reference) bool
		// Export writes an archive that Import takes.
		Export(ctx context.Context, i record.Image, w io.Writer) error
		Remove(ctx context.Context, ref image.Reference) error
		// Prune removes layers that nobody needs, with all also images.
		Prune(ctx context.Context, all bool) (image.Pruned, error)
	}
	// System knows the daemon and its host. (internal/daemon)
	System interface {
		// Info needs to fill no Version.
		Info(ctx context.Context) (wire.SystemInfo, error)
		DiskUsage(ctx context.Context) (wire.DiskUsage, error)
		// Drain has the host take no new sandboxes, or take them again. It is
		// durable when it returns.
		Drain(ctx context.Context, on bool) error
		// Backup is the state as of now, ready to be read: reading it slowly
		// holds up nobody.
		Backup(ctx context.Context) (io.ReadCloser, error)
	}
	// Volumes keeps named volumes. (sandbox.Volumes)
	Volumes interface {
		// Create fails with errs.Exists if there is one of the name; 0 bytes is no limit.
		Create(ctx context.Context, name string, bytes int64) (record.VolumeInfo, error)
		Get(ctx context.Context, name string) (record.VolumeInfo, error)
		List(ctx context.Context) ([]record.VolumeInfo, error) // by name
		// Usage returns the bytes in one, by its ID.
		Usage(id string) (int64, error)
		// Delete fails with errs.WrongState while a sandbox has it mounted.
		Delete(ctx context.Context, name string) error
		// Prune deletes all that no sandbox has mounted.
		Prune(ctx context.Context) (names []string, err error)
	}
	// Stats measures. (cgroups, snapshot, netns)
	Stats interface {
		// Usage needs to fill no limits; the server knows them.
		Usage(ctx context.Context, r *record.Record) (wire.Usage, error)
		// OOMKills counts the processes of a sandbox that were killed for its memory.
		OOMKills(id string) (int64, error)
	}
)

// Step is one step of a creation and how long it took.
type Step struct {
	Name string
	Took time.Duration
}
