package upgrade

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// view is what a daemon says of itself and of its sandboxes.
type view struct {
	version  string
	warning  string
	runtimes []string
	answer   []string // ids of running sandboxes whose agents answer
}

// asks is how many sandboxes are asked at a time.
const asks = 8

func (c *Change) look(ctx context.Context) (*view, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Limit)
	defer cancel()
	v, err := c.Client.Version(ctx)
	if err != nil {
		return nil, err
	}
	see := &view{version: v.Version, runtimes: v.Runtimes}
	if see.warning, err = c.Client.System().Health(ctx); err != nil {
		return nil, err
	}
	running, err := c.Client.List(ctx, client.Filter{States: []string{wire.Running}})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, sb := range running {
		ids = append(ids, sb.ID)
	}
	for i, err := range c.ask(ctx, ids) {
		if err == nil {
			see.answer = append(see.answer, ids[i])
		}
	}
	return see, nil
}

// ask asks the agents of sandboxes, and returns an error or nil for each.
func (c *Change) ask(ctx context.Context, ids []string) []error {
	answers := make([]error, len(ids))
	var wg sync.WaitGroup
	turn := make(chan struct{}, asks)
	for i, id := range ids {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			_, answers[i] = c.Client.Commands(id).List(ctx)
		})
	}
	wg.Wait()
	return answers
}

// gate returns why the new version is not good.
func (c *Change) gate(ctx context.Context, j *versions.Journal, before *view) error {
	if err := c.ran(ctx, j.To); err != nil {
		return err
	}
	warning, err := c.Client.System().Health(ctx)
	if err != nil {
		return fmt.Errorf("ask for its health: %w", err)
	}
	if warning != "" && warning != before.warning {
		return fmt.Errorf("it reports a fault that %s did not report: %s", j.From, warning)
	}
	if err := c.alive(ctx, before.answer); err != nil {
		return err
	}
	fmt.Fprintf(c.Out, "%s\n", errs.Count(len(before.answer), "sandbox answers", "sandboxes answer"))
	return c.create(ctx, j, before.runtimes)
}

// ran fails if another version than want answers.
func (c *Change) ran(ctx context.Context, want string) error {
	v, err := c.Client.Version(ctx)
	if err != nil {
		return fmt.Errorf("ask for its version: %w", err)
	}
	if v.Version != want {
		return fmt.Errorf("the daemon that answers is of version %s, not %s: does its service start %s/%s?",
			v.Version, want, c.Root, versions.Current)
	}
	return nil
}

// lost are the reasons of ends that a daemon causes, or does not prevent. Any other end is the
// sandbox's own or a client's.
var lost = []string{"killed", "runtime_crash", "host_reboot"}

// alive fails if one of the sandboxes was lost.
func (c *Change) alive(ctx context.Context, ids []string) error {
	var all []error
	for i, silent := range c.ask(ctx, ids) {
		if silent == nil {
			continue
		}
		sb, err := c.Client.Get(ctx, ids[i])
		switch {
		case errs.Is(err, errs.NotFound):
		case err != nil:
			all = append(all, fmt.Errorf("look for sandbox %s: %w", ids[i], err))
		case sb.Status.State == wire.Running:
			all = append(all, fmt.Errorf("sandbox %s runs, and does not answer: %w", ids[i], silent))
		case slices.Contains(lost, sb.Status.Reason):
			all = append(all, fmt.Errorf("sandbox %s has ended: %s", ids[i], sb.Status.Reason))
		}
	}
	if len(all) > 3 {
		all = append(all[:3], fmt.Errorf("and %d more sandboxes", len(all)-3))
	}
	return errors.Join(all...)
}

// create makes a sandbox on each runtime, and deletes it.
func (c *Change) create(ctx context.Context, j *versions.Journal, runtimes []string) error {
	asker := client.Trying(c.Client, j.Nonce)
	images, err := asker.Images().List(ctx)
	if err != nil {
		return fmt.Errorf("list the images: %w", err)
	}
	if len(images) == 0 {
		fmt.Fprintln(c.Out, "there are no images, so no sandbox was created to try the runtimes")
		return nil
	}
	smallest := slices.MinFunc(images, func(a, b wire.ImageInfo) int { return cmp.Compare(a.Bytes, b.Bytes) })
	for _, runtime := range runtimes {
		life := int64(10 * time.Minute / time.Second) // if this program dies
		sb, err := asker.Create(ctx, wire.CreateRequest{
			Image: &wire.Image{URI: smallest.Name + ":" + smallest.Tag}, Timeout: &life,
			Metadata: map[string]string{"sandboxd.trial": "true"}, ResourceLimits: map[string]string{"memory": "128Mi"},
			Extensions: map[string]string{wire.ExtRuntime: runtime, wire.ExtIdle: "true"},
		}, true)
		if errs.Is(err, errs.Exhausted) {
			fmt.Fprintf(c.Out, "no sandbox on %s was created to try it, because the host is full: %v\n", runtime, err)
			continue
		}
		if err == nil {
			err = asker.Delete(ctx, sb.ID)
		}
		if err != nil {
			return fmt.Errorf("create and delete a sandbox of the image %s on %s: %w", smallest.Name, runtime, err)
		}
		fmt.Fprintf(c.Out, "a new sandbox on %s came up\n", runtime)
	}
	return nil
}
