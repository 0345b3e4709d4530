package upgrade

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
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
	answer   []string          // ids of running sandboxes whose agents answer
	noSweep  string            // why the sweep rests; "": it does not
	sweep    error             // of the sweep
	pools    map[string]string // by name: why no member can be made
	tried    map[string]tried  // by runtime

	// dead is why the daemon does not answer; then the rest is of the state file. nil: it answers.
	dead   error
	state  string
	kept   string // what the state was before this version brought it forward; "": there is no such copy
	keptAt time.Time
}

func (c *Change) look(parent context.Context) (*view, error) {
	ctx, cancel := context.WithTimeout(parent, c.Limit)
	defer cancel()
	v, err := c.Client.Version(ctx)
	if err != nil {
		return nil, &unserved{err}
	}
	see := &view{version: v.Version, runtimes: v.Runtimes}
	if see.warning, err = c.Client.System().Health(ctx); err != nil {
		return nil, err
	}
	info, err := c.Client.System().Info(ctx)
	if err != nil {
		return nil, err
	}
	see.noSweep = info.NoSweep
	running, err := c.Client.List(ctx, client.Filter{States: []string{wire.Running}})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, sb := range running {
		ids = append(ids, sb.ID)
	}
	for i, err := range c.ask(ctx, ids, c.answers) {
		if err == nil {
			see.answer = append(see.answer, ids[i])
		}
	}
	if see.pools, err = c.pools(ctx); err != nil {
		return nil, err
	}
	if len(info.Strays) == 0 { // else no version creates sandboxes
		c.measure(parent, see)
	}
	return see, nil
}

// measure tries the version that runs, so that the new one can be compared with it. What it does not do in time
// counts as what it cannot do.
func (c *Change) measure(ctx context.Context, see *view) {
	ctx, cancel := context.WithTimeout(ctx, c.Limit)
	defer cancel()
	fmt.Fprintf(c.Out, "trying %s, to compare\n", see.version)
	see.sweep = c.sweep(ctx)
	var err error
	if see.tried, err = c.tryAll(ctx, prober{Client: c.Client, expires: true}, see.runtimes, nil); err != nil {
		fmt.Fprintf(c.Out, "nothing was tried: %v\n", err)
	}
	for _, runtime := range see.runtimes {
		for _, err := range see.tried[runtime].worse(tried{image: see.tried[runtime].image}) {
			fmt.Fprintf(c.Out, "no fault of the new version, because it fails already: %v\n", err)
		}
	}
}

// pools says of each pool why no member of it can be made.
func (c *Change) pools(ctx context.Context) (map[string]string, error) {
	all, err := c.Client.System().Pools().List(ctx)
	why := map[string]string{}
	for _, p := range all {
		why[p.Name] = p.Status.Message
	}
	return why, err
}

// sweep has the daemon sweep now, which mends and removes.
func (c *Change) sweep(ctx context.Context) error {
	cfg, err := config.Load(c.Config)
	if err != nil {
		return err
	}
	admin := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", cfg.Listen.AdminSocket)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandboxd/sweep", nil)
	if err != nil {
		return err
	}
	res, err := admin.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode/100 != 2 {
		said, _ := io.ReadAll(io.LimitReader(res.Body, maxSaid))
		return fmt.Errorf("%s: %s", res.Status, bytes.TrimSpace(said))
	}
	return nil
}

// maxSaid bounds, in bytes, what is shown of an answer.
const maxSaid = 4 << 10

// gate returns why the new version is not good. If the version of before did not run, the new one is
// good when it serves: to go back could only be worse.
func (c *Change) gate(ctx context.Context, j *versions.Journal, before *view) error {
	if err := c.ran(ctx, j.To); err != nil {
		return err
	}
	err := c.good(ctx, j, before)
	if err != nil && before.dead != nil {
		fmt.Fprintf(c.Out, "%s serves, and stays, because %s did not serve; but: %v\n", j.To, j.From, err)
		return nil
	}
	return err
}

// good returns why the new version, which serves, is not as good as the one before.
func (c *Change) good(ctx context.Context, j *versions.Journal, before *view) error {
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
	info, err := c.Client.System().Info(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("ask for its system information: %w", err)
	case info.NoSweep != "" && before.noSweep == "" && before.dead == nil:
		return fmt.Errorf("it sweeps nothing, and %s did: %s", j.From, info.NoSweep)
	case len(info.Strays) > 0: // as mayCreate in internal/daemon: also the version of before would create none
		fmt.Fprintf(c.Out, "no sandbox was created to try the runtimes, because the host has %s that the state does not know: %s\n",
			errs.Count(len(info.Strays), "sandbox", "sandboxes"), info.NoSweep)
		return nil
	}
	if err := c.tries(ctx, j, before); err != nil {
		return err
	}
	return c.keeps(ctx, j, before)
}

// tries returns why sandboxes of the new version are not as good as those of the one before.
func (c *Change) tries(ctx context.Context, j *versions.Journal, before *view) error {
	p := prober{Client: client.Trying(c.Client, j.Nonce), expires: !j.Holds()}
	after, err := c.tryAll(ctx, p, before.runtimes, before.tried)
	if err != nil {
		return err
	}
	var all []error
	for _, runtime := range before.runtimes {
		now, was := after[runtime], before.tried[runtime]
		if now.skipped != "" {
			fmt.Fprintf(c.Out, "no sandbox on %s was created to try it, because %s\n", runtime, now.skipped)
			continue
		}
		worse := now.worse(was)
		all = append(all, worse...)
		if len(worse) == 0 && now.image != "" {
			fmt.Fprintf(c.Out, "a new sandbox on %s came up: %s\n", runtime, now.passed())
			for _, err := range now.worse(tried{image: now.image}) {
				fmt.Fprintf(c.Out, "not counted, because %s was not known to do it: %v\n", j.From, err)
			}
		}
	}
	if len(after) == 0 {
		fmt.Fprintln(c.Out, "there are no images, so no sandbox was created to try the runtimes")
	}
	return errors.Join(all...)
}

// keeps returns why what the new version does by itself is not as good as before. While a new schema is tried,
// the sweep rests.
func (c *Change) keeps(ctx context.Context, j *versions.Journal, before *view) error {
	if err := c.restores(ctx, c.Root.Program(c.To, "sandboxd"), c.Client.System().Backup); err != nil {
		return fmt.Errorf("restore a backup that it makes: %w", err)
	}
	if !j.Holds() {
		if err := c.sweep(ctx); err != nil && before.sweep == nil {
			return fmt.Errorf("its sweep fails: %w", err)
		}
	}
	pools, err := c.pools(ctx)
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		if before, ok := before.pools[name]; ok && before == "" && pools[name] != "" {
			err = errors.Join(err, fmt.Errorf("the pool %s: %s", name, pools[name]))
		}
	}
	return err
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
