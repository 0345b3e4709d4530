package gateway

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// lostTime is how long the daemon may take to notice that a sandbox has ended, after its streams broke.
const lostTime = 3 * time.Second

// lost returns a function that says why the stream of a command, or of code, was cut: the sandbox has ended
// under it, or hibernates. On gVisor that is how a command meets the memory limit, and the error is the one that runc
// has. It is nil if the client has left or may not hear it, and if the sandbox runs on.
func (g *Gateway) lost(ctx context.Context, path string, rec *record.Record) func() *agent.EventError {
	return func() *agent.EventError {
		if httperr.Revoked(ctx) != nil {
			return nil
		}
		if _, ended := errors.AsType[*errs.Error](context.Cause(ctx)); ctx.Err() != nil && !ended {
			return nil // the client has left
		}
		wait := time.NewTimer(lostTime)
		defer wait.Stop()
		select {
		case <-g.cfg.Sandboxes.Life(rec.ID).Done():
		case <-ctx.Done():
		case <-wait.C:
		}
		reason := g.lostReason(context.WithoutCancel(ctx), path, rec)
		if reason == "" {
			return nil
		}
		why := &agent.EventError{Name: "CommandExecError", Value: "-1", Traceback: []string{"signal: killed", reason}}
		if path == "/code" {
			why.Name, why.Value = agent.ContextDied, reason // SDKs show the value; it is no exit code
		}
		return why
	}
}

// lostReason is why a sandbox no longer answers, in a line that begins with a word for programs; "": it runs on.
func (g *Gateway) lostReason(ctx context.Context, path string, was *record.Record) string {
	now, err := g.cfg.Sandboxes.Get(ctx, was.ID)
	switch {
	case errs.Is(err, errs.NotFound) && !was.Expires.IsZero() && !time.Now().Before(was.Expires):
		return fmt.Sprintf("%s: the timeout of sandbox %s passed", record.Expired, was.ID)
	case errs.Is(err, errs.NotFound), err == nil && now.State == record.Deleting:
		return fmt.Sprintf("deleted: sandbox %s was removed", was.ID)
	case err != nil:
		return ""
	case now.Reason == record.OOM && (now.State == record.Ended || now.State == record.Stopping):
		return outOfMemory(path, was)
	case now.State == record.Ended, now.State == record.Stopping:
		return fmt.Sprintf("%s: sandbox %s ended: %s", now.Reason, was.ID, now.Message)
	case now.Hibernation != nil:
		return fmt.Sprintf("hibernated: sandbox %s went into hibernation, and the command goes on when it is resumed", was.ID)
	case !was.Started.IsZero() && !now.Started.Equal(was.Started):
		return fmt.Sprintf("restarted: sandbox %s ended, and was started again", was.ID)
	}
	return ""
}
