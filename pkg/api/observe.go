package api

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The operations that only the API sees from beginning to end. The Manager reports those
// on sandboxes.
const (
	opExec        = "exec"
	opImageBuild  = "image_build"
	opImageImport = "image_import"
	opImagePull   = "image_pull"
	opImageExport = "image_export"
	opImagePrune  = "image_prune"
	opImageRemove = "image_remove"
	opImageTag    = "image_tag"
	opImageCommit = "image_commit"
)

// OperationNames lists the operations that an Answer may name.
func OperationNames() []string {
	return []string{opExec, opImageBuild, opImageImport, opImagePull, opImageExport, opImagePrune, opImageRemove, opImageTag, opImageCommit}
}

// An Answer is a request that is over.
type Answer struct {
	Method string        // as sent: anything
	Route  string        // a pattern of ours, as "/sandboxes/{id}"
	Status int           // 0: the client left before there was one
	Guests bool          // the status may be the guest's choice
	First  time.Duration // until the answer began
	Took   time.Duration // until it ended

	// Op is one of OperationNames, or empty. If it is not empty, Runtime is the
	// sandbox's, and Outcome is "ok", "aborted" or a code of pkg/errs.
	Op      string
	Runtime string
	Outcome string
}

// outcome says in a word how a request ended.
func (in *info) outcome() string {
	switch {
	case in.hungUp || in.status == 0:
		return "aborted"
	case in.err != nil:
		return string(errs.CodeOf(in.err))
	case in.status >= http.StatusInternalServerError:
		return string(errs.Internal)
	case in.status == http.StatusNotFound:
		return string(errs.NotFound)
	case in.status >= http.StatusBadRequest:
		return string(errs.Invalid)
	}
	return "ok"
}

// observe writes the line of a request into the log: the wide line of an operation, an
// error whose answer refers to the log, and at level debug every other request.
func (s *Server) observe(r *http.Request, in *info) {
	took := time.Since(in.start)
	if in.visit.Runs {
		in.op = opExec
	}
	in.actor, in.image = cmp.Or(in.visit.Actor, in.actor), cmp.Or(in.visit.Image, in.image)
	if in.first == 0 {
		in.first = took
	}
	level, msg := slog.LevelDebug, "request"
	if in.op != "" {
		level, msg = slog.LevelInfo, "operation"
	}
	if in.status >= http.StatusInternalServerError && !in.visit.Guest && in.outcome() == string(errs.Internal) {
		level = slog.LevelError // the answer says that the reason is in the log
	}
	ctx := context.Background() // not the request's: the proxy may know better who asked
	if s.cfg.OnAnswer != nil {
		s.cfg.OnAnswer(Answer{
			Method: r.Method, Route: in.route, Status: in.status, Guests: in.visit.Guest, First: in.first, Took: took,
			Op: in.op, Runtime: in.visit.Runtime, Outcome: in.outcome(),
		})
	}
	// Last: what the log tells is counted.
	if s.cfg.Log.Enabled(ctx, level) {
		s.cfg.Log.LogAttrs(ctx, level, msg, in.attrs(r, took)...)
	}
}

// maxLogged bounds the error of a request in the log, in bytes: net/http quotes a whole line
// of what an app answers.
const maxLogged = 8 << 10

func (in *info) attrs(r *http.Request, took time.Duration) []slog.Attr {
	attrs := make([]slog.Attr, 0, 16)
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	add("op", in.op)
	add("sandbox", in.sandbox)
	if in.op != "" {
		add("runtime", in.visit.Runtime)
		add("image", in.image)
	}
	attrs = append(attrs, slog.Duration("dur", took))
	if in.op == "" {
		attrs = append(attrs, slog.String("method", r.Method), slog.String("route", in.route), slog.Int64("bytes", in.bytes))
	} else {
		attrs = append(attrs, slog.Duration("start", in.first), slog.String("outcome", in.outcome()))
	}
	attrs = append(attrs, slog.Int("status", in.status))
	if in.hungUp {
		attrs = append(attrs, slog.Bool("hung_up", true))
	}
	add("request", in.requestID)
	add("actor", in.actor)
	if in.err != nil {
		text, _, _ := strings.Cut(in.err.Error(), record.LastLines)
		add("err", httperr.Clip(strings.ReplaceAll(text, "\n", "; "), maxLogged))
	}
	return attrs
}
