package httperr

import (
	"context"
	"errors"
)

// A Revocation is why a request ended that was admitted.
type Revocation struct{ err error }

func (r *Revocation) Error() string { return r.err.Error() }

// Unwrap is the refusal of any further request.
func (r *Revocation) Unwrap() error { return r.err }

// Revoke makes a Revocation of a refusal.
func Revoke(err error) error { return &Revocation{err} }

// Revoked is why ctx ended, if something that admitted its request is no longer there; else nil.
func Revoked(ctx context.Context) error {
	if r, ok := errors.AsType[*Revocation](context.Cause(ctx)); ok {
		return r.err
	}
	return nil
}

// During is ctx for as long as life lasts; its cause then is that of life. Call leave in the end.
func During(ctx, life context.Context) (_ context.Context, leave context.CancelFunc) {
	if life == nil || life.Done() == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(life, func() { cancel(context.Cause(life)) }) // no goroutine waits: there may be 1,000 terminals
	return ctx, func() { stop(); cancel(nil) }
}
