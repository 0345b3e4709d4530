package upgrade

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// asks is how many sandboxes are asked at a time.
const asks = 8

// ask does something with each sandbox, a few at a time, and returns an error or nil for each.
func (c *Change) ask(ctx context.Context, ids []string, do func(ctx context.Context, id string) error) []error {
	all := make([]error, len(ids))
	var wg sync.WaitGroup
	turn := make(chan struct{}, asks)
	for i, id := range ids {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			all[i] = do(ctx, id)
		})
	}
	wg.Wait()
	return all
}

// answers asks the agent of a sandbox once.
func (c *Change) answers(ctx context.Context, id string) error {
	_, err := c.Client.Commands(id).List(ctx)
	return err
}

// silent is a sandbox that has not answered.
type silent struct {
	id   string
	last error // what the last question got
}

// The pauses between questions to the sandboxes that are silent, and how long one question may take.
const (
	firstPause = 200 * time.Millisecond
	lastPause  = 5 * time.Second
	askLimit   = 15 * time.Second
)

// alive returns when each sandbox has answered, or has ended for a reason of its own. It fails if one was lost; and if
// one is silent when ctx ends, and not earlier: the daemon waits for an agent for five seconds, and on a busy host a
// good agent takes longer.
func (c *Change) alive(ctx context.Context, ids []string) error {
	began, left := time.Now(), make([]silent, len(ids))
	for i, id := range ids {
		left[i].id = id
	}
	for asked, pause := 1, firstPause; ; asked, pause = asked+1, min(2*pause, lastPause) {
		var err error
		if left, err = c.askAgain(ctx, left); err != nil || len(left) == 0 {
			return err
		}
		if asked == 1 {
			fmt.Fprintf(c.Out, "%s not answer yet, and will be asked again; one is %s\n",
				errs.Count(len(left), "sandbox does", "sandboxes do"), left[0].id)
		}
		next := time.NewTimer(pause)
		select {
		case <-next.C:
			continue
		case <-ctx.Done():
			next.Stop()
		}
		var all []error
		for _, s := range left {
			all = append(all, fmt.Errorf("sandbox %s runs, and does not answer: it was asked %s in %s, and the last answer was: %w", s.id,
				errs.Count(asked, "time", "times"), time.Since(began).Round(100*time.Millisecond), s.last))
		}
		return few(all)
	}
}

// askAgain asks sandboxes once, and returns those that run and are silent. It fails if some were lost.
func (c *Change) askAgain(ctx context.Context, who []silent) (left []silent, err error) {
	ids := make([]string, len(who))
	for i, s := range who {
		ids[i] = s.id
	}
	var all []error
	for i, answer := range c.ask(ctx, ids, c.answersSoon) {
		if answer == nil {
			continue
		}
		if ctx.Err() != nil && who[i].last != nil { // that is no answer
			answer = who[i].last
		}
		sb, err := c.Client.Get(ctx, ids[i])
		switch {
		case errs.Is(err, errs.NotFound):
		case err != nil, sb.Status.State == wire.Running:
			left = append(left, silent{ids[i], answer})
		case slices.Contains(lost, sb.Status.Reason):
			all = append(all, fmt.Errorf("sandbox %s has ended: %s", ids[i], sb.Status.Reason))
		}
	}
	return left, few(all)
}

// answersSoon is answers for a sandbox of which others wait for their turn.
func (c *Change) answersSoon(ctx context.Context, id string) error {
	soon, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	err := c.answers(soon, id)
	if soon.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("nothing within %s: %w", askLimit, err)
	}
	return err
}

// lost are the reasons of ends that a daemon causes, or does not prevent. Any other end is the
// sandbox's own or a client's.
var lost = []string{"killed", "runtime_crash", "host_reboot"}

// few joins the first of many errors.
func few(all []error) error {
	if len(all) > 3 {
		all = append(all[:3:3], fmt.Errorf("and %d more sandboxes", len(all)-3))
	}
	return errors.Join(all...)
}
