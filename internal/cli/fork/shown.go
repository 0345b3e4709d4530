package fork

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// shown returns what fork does. If standard error is a terminal, it shows there how many of
// count copies have come up meanwhile.
func shown(ctx context.Context, cl *client.Client, sandbox string, count int, fork func() (wire.Fork, error)) (wire.Fork, error) {
	if !command.IsTerminal(os.Stderr) {
		return fork()
	}
	bar, since := command.Bar{On: os.Stderr}, time.Now()
	ctx, stop := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { watch(ctx, cl, sandbox, since, func(n int) { bar.Count("copies", n, count) }) })
	f, err := fork()
	stop()
	watching.Wait()
	bar.Clear()
	return f, err
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
