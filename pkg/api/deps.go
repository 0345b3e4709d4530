package api

import (
	"context"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// What the server needs of the rest of the daemon, and no more; internal/daemon
// puts the real ones behind it. Errors made by errs.New reach the client, all
// others are "internal" and reach only the log.
type (
	// Sandboxes creates, finds and ends sandboxes. (sandbox.Manager)
	//
	// Where idOrName stands, a unique name is as good as an ID; where id stands
	// it is an ID that Get has returned. What does not exist is errs.NotFound.
	Sandboxes interface {
		// Create returns when the intent is durable; from then on ctx does not matter.
		Create(ctx context.Context, s record.Spec) (record.Record, error)
		// Await blocks while the sandbox is Creating.
		Await(ctx context.Context, idOrName string) (record.Record, error)
		Get(ctx context.Context, idOrName string) (record.Record, error)
		List(ctx context.Context) ([]record.Record, error)
		// Delete returns when the processes are dead and the ID is gone. It
		// succeeds on a sandbox that is being deleted by somebody else, and
		// may know IDs that Get does not: what is left of a failed delete.
		Delete(ctx context.Context, id string) error
		Pause(ctx context.Context, id string) error
		Resume(ctx context.Context, id string) error
		Renew(ctx context.Context, id string, expires time.Time) (record.Record, error)
		// PatchLabels sets the labels given and removes those that are nil.
		PatchLabels(ctx context.Context, id string, patch map[string]*string) (record.Record, error)
		// Steps says how long each step of the creation took, in order.
		Steps(id string) []Step
		// Done is closed when the sandbox has ended: what streams from it will
		// not end by itself, since its link is gone without a word.
		Done(id string) <-chan struct{}
		// Subscribe sends what happens until ctx ends. A slow reader loses events, not the daemon.
		Subscribe(ctx context.Context) <-chan wire.Event
	}
	// Images knows the root file systems of this host. (image)
	Images interface {
		// Resolve finds name[:tag][@digest]. Unknown is errs.NotFound.
		Resolve(ctx context.Context, uri string) (record.Image, error)
		List(ctx context.Context) ([]record.Image, error)
		// Build makes the image of the recipe name and writes lines to progress.
		Build(ctx context.Context, name string, progress io.Writer) (record.Image, error)
		Remove(ctx context.Context, ref string) error
	}
	// Agents reaches into sandboxes. (agent)
	Agents interface {
		// Transport returns pooled connections to the agent of r. Whatever goes
		// through it is given the agent's token, so the server has authorised it
		// before; the host of the request's URL does not matter to it.
		Transport(r record.Record) http.RoundTripper
		// Dial connects to a port at the address of r. What listens on loopback
		// only refuses that, and is reached through the agent's /proxy/{port}.
		Dial(ctx context.Context, r record.Record, port uint16) (net.Conn, error)
	}
	// Stats measures. (cgroups, snapshot, netns)
	Stats interface {
		// Usage needs to fill no limits; the server knows them.
		Usage(ctx context.Context, id string) (wire.Usage, error)
	}
)

// Step is one step of a creation and how long it took.
type Step struct {
	Name string
	Took time.Duration
}
