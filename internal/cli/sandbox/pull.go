package sandbox

import (
	"context"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// pullShown pulls an image that the daemon's host does not have, and shows the progress on
// the terminal. The daemon would pull it anyway.
// An image that no registry is configured for is no error here: the creation says more
// about it.
func pullShown(ctx context.Context, cl *client.Client, image string) error {
	if _, err := cl.Images().Inspect(ctx, image); !errs.Is(err, errs.NotFound) {
		return nil //nolint:nilerr // if the daemon cannot be asked, the creation says so
	}
	bar, begun := command.Bar{On: os.Stderr}, false
	im, err := cl.Images().Pull(ctx, image, nil, func(p wire.ImportProgress) {
		if !begun {
			fmt.Fprintf(os.Stderr, "Unable to find image '%s' locally\n", text.Printable(image))
		}
		begun = true
		bar.Image(p)
	})
	bar.Clear()
	switch {
	case err != nil && !begun && ctx.Err() == nil:
		return nil //nolint:nilerr // see above
	case err != nil:
		return err
	}
	fmt.Fprintf(os.Stderr, "Status: Downloaded newer image for %s\n", text.Printable(im.Name+":"+im.Tag))
	return nil
}
