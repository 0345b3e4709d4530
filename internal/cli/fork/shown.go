package fork

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// shown returns what fork does. Meanwhile it shows on standard error how many of count copies have come up: as a bar
// on a terminal, else a line every ten seconds.
func shown(ctx context.Context, cl *client.Client, sandbox string, count int, fork func() (wire.Fork, error)) (wire.Fork, error) {
	bar, since := command.Bar{On: os.Stderr}, time.Now()
	up, clear := func(n int) { bar.Count("copies", n, count) }, bar.Clear
	if !command.IsTerminal(os.Stderr) {
		up, clear = said(os.Stderr, count)
	}
	ctx, stop := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { watch(ctx, cl, sandbox, since, up) })
	f, err := fork()
	stop()
	watching.Wait()
	clear()
	return f, err
}

// sayEvery is how often a fork says how far it is if there is no terminal.
const sayEvery = 10 * time.Second

// said writes to w how many of count copies have come up, every ten seconds until clear is called.
func said(w io.Writer, count int) (up func(n int), clear func()) {
	var now atomic.Int64
	var saying sync.WaitGroup
	done := make(chan struct{})
	saying.Go(func() {
		tick := time.NewTicker(sayEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Fprintf(w, "fork: %d of %s made\n", now.Load(), errs.Count(count, "copy is", "copies are"))
			case <-done:
				return
			}
		}
	})
	return func(n int) { now.Store(int64(n)) }, func() { close(done); saying.Wait() }
}

// watch calls up with the number of copies of a sandbox that have come up since then, as soon as
// it knows the sandbox and with each copy, until ctx ends. They are those of one fork: of the first
// that a copy comes up of. It returns at an error: fork has the same one, or goes on without a bar.
func watch(ctx context.Context, cl *client.Client, sandbox string, since time.Time, up func(n int)) {
	source, err := cl.Get(ctx, sandbox)
	if err != nil {
		return
	}
	n, fork := 0, ""
	up(n)
	for e, err := range cl.Events(ctx, since, client.Notices{}) {
		if err != nil {
			return
		}
		if e.Type != "running" {
			continue
		}
		sb, err := cl.Get(ctx, e.ID)
		of := forkOf(sb)
		if err != nil || of == nil || of.Source != source.ID || fork != "" && of.ID != fork {
			continue
		}
		fork, n = of.ID, n+1
		up(n)
	}
}
