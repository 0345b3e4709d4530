package api

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Left opens the file that has what a command of an ended sandbox has printed, or its entrypoint
// (agent.OutputOf). The guest may have put anything there.
type Left func(id, command string) (*os.File, error)

// These interfaces are all that the server needs of the rest of the daemon.
// internal/daemon passes the implementations in. Errors made by errs.New reach the
// client, all others are "internal" and reach only the log.
type (
	// Sandboxes creates, finds and ends sandboxes. (sandbox.Manager)
	//
	// An idOrName is an ID or a unique name; an id is an ID that Get has returned. If
	// there is no such sandbox, the error is errs.NotFound.
	Sandboxes interface {
		// Create returns when the intent is durable; from then on ctx does not matter.
		Create(ctx context.Context, s record.Spec) (record.Record, error)
		// Made says what an earlier request with the same key has made, and when. If
		// there is such a request, Create fails with record.CodeRequestRace.
		Made(ctx context.Context, key string) (m record.Made, ok bool, err error)
		// Await blocks while the sandbox is being brought up.
		Await(ctx context.Context, idOrName string) (record.Record, error)
		// Queued reports whether a sandbox waits for its turn to be brought up, or before
		// that for its image.
		Queued(r *record.Record) bool
		Get(ctx context.Context, idOrName string) (record.Record, error)
		List(ctx context.Context) ([]*record.Record, error) // newest first; shared, to be read only
		// Delete returns when the processes are dead and the ID is gone. It succeeds if
		// somebody else is deleting the sandbox. It also takes IDs that Get does not
		// know: those of sandboxes whose deletion failed.
		Delete(ctx context.Context, id string) error
		// Remove is Delete for a sandbox that has ended; for another it fails with errs.WrongState.
		Remove(ctx context.Context, id string) error
		// DeleteEnded deletes a sandbox if it has ended and waits for no restart.
		DeleteEnded(ctx context.Context, id string) (deleted bool, err error)
		// Start starts a sandbox that has ended; see Create and Await.
		Start(ctx context.Context, id string) (record.Record, error)
		// Stop ends a sandbox and keeps it. Its entrypoint has grace to end by itself.
		Stop(ctx context.Context, id string, grace time.Duration) error
		Pause(ctx context.Context, id string) error
		// Hibernate puts the memory of a sandbox on disk until Resume brings it back.
		Hibernate(ctx context.Context, id string) error
		Resume(ctx context.Context, id string) error
		Renew(ctx context.Context, id string, expires time.Time) (record.Record, error)
		// Update changes terms of a sandbox that runs or is paused. It calls change
		// with the present terms.
		Update(ctx context.Context, id string, change func(*record.Terms) error) (record.Record, error)
		// Relabel gives a sandbox another name, unless that is empty, sets the labels given
		// and removes those that are nil. It fails with errs.Exists if the name is taken.
		Relabel(ctx context.Context, id, name string, patch map[string]*string) (record.Record, error)
		// Promote has a copy trade name and expiry with the sandbox that it is a copy of.
		Promote(ctx context.Context, id string) (record.Record, error)
		// Steps says how long each step of the creation took, in order.
		Steps(id string) []Step
		// Life ends when the sandbox has ended. A stream from the sandbox does not end
		// by itself, since its link goes away without a packet.
		Life(id string) context.Context
		// EventsSince sends what happened after the event with this cursor, or since a time,
		// if they are not zero, and then what happens, until ctx ends. The first event may have
		// a cursor alone. A slow reader loses events, not the daemon.
		EventsSince(ctx context.Context, cursor string, at time.Time) <-chan wire.Event
	}
	// Snapshots keeps copies of the files of sandboxes. (sandbox.Snapshots)
	//
	// An idOrName is an ID, or a name that no other snapshot has. If there is no such
	// snapshot, the error is errs.NotFound.
	Snapshots interface {
		// Create returns when the intent is durable; from then on ctx does not matter.
		// With unique, it fails with errs.Exists if another snapshot has the name.
		Create(ctx context.Context, sandbox string, q record.SnapshotRequest) (record.Snapshot, error)
		// Await blocks while the snapshot is being taken.
		Await(ctx context.Context, id string) (record.Snapshot, error)
		Get(ctx context.Context, idOrName string) (record.Snapshot, error)
		List(ctx context.Context) ([]record.Snapshot, error) // newest first
		// Delete fails with errs.WrongState while the snapshot is in use.
		Delete(ctx context.Context, idOrName string) error
		// Use returns a snapshot that is ready, and keeps it until release is called. why
		// says to people what needs a ready one.
		Use(ctx context.Context, idOrName, why string) (snap record.Snapshot, release func(), err error)
	}
	// Diffs compares the files of sandboxes and snapshots. (snapshot)
	Diffs interface {
		// Diff calls emit for each difference between two trees over the same layers.
		// An empty base is the layers alone.
		Diff(ctx context.Context, of, base string, layers []string, emit func(kind, path string) error) error
		// Pack writes the files of a snapshot, without those of its layers, as the tar of a
		// layer.
		Pack(ctx context.Context, snapshot string, w io.Writer) error
	}
	// Images knows the root file systems of this host. (image)
	Images interface {
		// Resolve finds the image of a reference or of an alias. If there is none, the
		// error is errs.NotFound.
		Resolve(ctx context.Context, ref image.Reference) (record.Image, error)
		List(ctx context.Context) ([]record.Image, error)
		// Note says that an image which Resolve found is another version than the
		// reference names; "": it is not.
		Note(ref image.Reference, i record.Image) string
		// Aliases lists the other names of an image.
		Aliases(i record.Image) []string
		// Build makes the image of the recipe name and writes lines to progress. Without
		// replace, as for Import and Pull, it fails with errs.Denied if another image has
		// the name.
		Build(ctx context.Context, name string, replace bool, progress io.Writer) (record.Image, error)
		// Import makes an image of an archive and reports how far it is.
		Import(ctx context.Context, a image.Archive, r io.Reader, progress func(image.Progress)) (record.Image, error)
		// Pull gets an image from a registry. Credentials are in ctx (image.WithAuth).
		Pull(ctx context.Context, p image.Pull, progress func(image.Progress)) (record.Image, error)
		// CanPull reports whether a registry is configured for an image.
		CanPull(ref image.Reference) bool
		// Export writes an archive that Import takes.
		Export(ctx context.Context, i record.Image, w io.Writer) error
		// Commit makes an image of a tar over the layers of base. For the name see Tag.
		Commit(ctx context.Context, base record.Image, as image.Reference, replace bool, tar io.Reader) (record.Image, error)
		// Tag gives an image a further name. If the name is another image's, it fails with
		// errs.Denied unless replace is set.
		Tag(ctx context.Context, ref, as image.Reference, replace bool) (record.Image, error)
		Remove(ctx context.Context, ref image.Reference) (image.Pruned, error)
		// Prune removes unused layers, and with all also unused images; if before is not
		// zero, those that were made before it.
		Prune(ctx context.Context, all bool, before time.Time) (image.Pruned, error)
	}
	// System knows the daemon and its host. (internal/daemon)
	System interface {
		// Info may leave Version empty.
		Info(ctx context.Context) (wire.SystemInfo, error)
		DiskUsage(ctx context.Context) (wire.DiskUsage, error)
		// Drain makes the host refuse new sandboxes, or accept them again. The change
		// is durable when Drain returns.
		Drain(ctx context.Context, on bool) error
		// Backup returns the state as of now. A slow reader delays nobody.
		Backup(ctx context.Context) (io.ReadCloser, error)
	}
	// Backups keeps backups on the target of the configuration. (internal/backup/schedule)
	//
	// If there is no target, the error is errs.WrongState.
	Backups interface {
		List(ctx context.Context) ([]wire.Backup, error)
		Status() (wire.BackupStatus, error)
		// Now takes a backup. It returns when the target has it.
		Now(ctx context.Context) (wire.Backup, error)
		// Drill restores the newest backup beside the state. The error says why it cannot be.
		Drill(ctx context.Context) (wire.BackupDrill, error)
		// Adopt makes backups of other states count; without names, all that are unknown.
		Adopt(ctx context.Context, names []string) ([]wire.Backup, error)
		// Remove removes backups that count as the daemon's, and what only they need. If one of names may
		// not be removed, nothing is.
		Remove(ctx context.Context, names []string) (wire.RemovedBackups, error)
		// Check reads every byte of backups; without names, of all. It calls line for what it finds, and
		// for how far it is. It ends with ctx.
		Check(ctx context.Context, names []string, line func(wire.BackupCheckLine)) (wire.BackupCheck, error)
	}
	// Network knows what the network refuses sandboxes, and why. (internal/daemon)
	Network interface {
		// Denials returns the last denials of a sandbox, with all that the guest can have
		// noticed by now.
		Denials(id string) wire.Denials
		// Denied counts the denials of a sandbox so far.
		Denied(id string) int64
		// Explain says what the policy of a sandbox makes of a target.
		Explain(ctx context.Context, r *record.Record, target spec.Target) (wire.Explanation, error)
	}
	// Volumes keeps named volumes. (sandbox.Volumes)
	Volumes interface {
		// Create fails with errs.Exists if the name is taken. 0 bytes means no limit.
		Create(ctx context.Context, name string, bytes int64) (record.VolumeInfo, error)
		Get(ctx context.Context, name string) (record.VolumeInfo, error)
		List(ctx context.Context) ([]record.VolumeInfo, error) // by name
		// Usage returns the bytes in the volume with this ID.
		Usage(id string) (int64, error)
		// Delete fails with errs.WrongState while a sandbox has it mounted.
		Delete(ctx context.Context, name string) error
		// Prune deletes all volumes that no sandbox has mounted.
		Prune(ctx context.Context) (names []string, err error)
	}
	// Policies keeps named network policies. (sandbox.Policies)
	Policies interface {
		List(ctx context.Context) ([]record.PolicyInfo, error) // by name
		Get(ctx context.Context, name string) (record.PolicyInfo, error)
		// Put adds a version to a policy, which may be new, and moves the sandboxes that
		// follow it. It fails with errs.WrongState if the policy is in the configuration.
		Put(ctx context.Context, name string, v record.PolicyVersion) (record.PolicyEdit, error)
		// Use gives a sandbox that runs or is paused a policy, or a version of one.
		Use(ctx context.Context, id string, use record.PolicyUse) (record.Record, error)
		// Delete fails with errs.WrongState while a sandbox uses the policy.
		Delete(ctx context.Context, name string) error
	}
	// Pools keeps pools of sandboxes that are ready before somebody asks. (pools.Keeper)
	//
	// If there is no such pool, the error is errs.NotFound.
	Pools interface {
		List(ctx context.Context) ([]record.PoolInfo, error) // by name
		Get(ctx context.Context, name string) (record.PoolInfo, error)
		// Create fails with errs.Exists if the name is taken.
		Create(ctx context.Context, p record.Pool) (record.PoolInfo, error)
		// Update and Delete fail with errs.WrongState if the pool is in the configuration.
		Update(ctx context.Context, name string, change func(*record.Pool) error) (record.PoolInfo, error)
		Delete(ctx context.Context, name string) error
	}
	// Vaults keeps the credential vaults of sandboxes. (secrets.Keeper)
	//
	// Bodies are those of OpenSandbox's egress.yaml; with Trusted in its name a method also takes
	// credentials from files and commands of the host. Errors and results have no value of a
	// credential. Without a vault the error is errs.NotFound. A change is durable, and holds for
	// the next request of the guest, when its method returns.
	Vaults interface {
		// Create fails with errs.Exists if there is a vault.
		Create(ctx context.Context, r *record.Record, body []byte) (vault.State, error)
		CreateTrusted(ctx context.Context, r *record.Record, body []byte) (vault.State, error)
		// Patch fails with errs.WrongState if the body expects another revision.
		Patch(ctx context.Context, r *record.Record, body []byte) (vault.State, error)
		PatchTrusted(ctx context.Context, r *record.Record, body []byte) (vault.State, error)
		Get(ctx context.Context, r *record.Record) (vault.State, error)
		Delete(ctx context.Context, r *record.Record) error
	}
	// Stats measures. (cgroups, snapshot, netns)
	Stats interface {
		// Usage may leave out the limits; the server knows them.
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
