package table

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// ErrTooLong is why a call was given up; the log says how long it took.
var ErrTooLong = errs.New(errs.Unavailable, "it took too long; the host may be overloaded")

// Within does one call, which has a name, under a deadline and between its failpoints. The end of ctx
// cuts it short.
func Within(ctx context.Context, limit time.Duration, name string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, ErrTooLong)
	defer cancel()
	if err := Pass(name, func() error { return f(ctx) }); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", name, err), context.Cause(ctx))
	}
	return nil
}

// Pass does f between two failpoints.
func Pass(name string, f func() error) error {
	if err := failpoint.Pass(name); err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	return failpoint.Pass("after:" + name)
}
