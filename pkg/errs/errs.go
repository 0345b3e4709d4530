// Package errs gives every error of sandboxd a code that survives wrapping and
// the wire.
//
// A code says what a caller may do about an error; the text says what was
// tried, on what, why it failed and what to do. What a client may read (Text)
// and what only the log sees (Err) are separate fields.
package errs

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Code says what a caller may do about an error. The set is closed; one table
// in pkg/api maps it to an HTTP status, one in pkg/client maps it back.
type Code string

// The codes.
const (
	Invalid     Code = "invalid"     // the request can never work
	Denied      Code = "denied"      // the caller may not
	NotFound    Code = "not_found"   // no such object
	Exists      Code = "exists"      // the name is taken
	WrongState  Code = "wrong_state" // works in another state of the object
	Exhausted   Code = "exhausted"   // a limit of this host is reached
	Unsupported Code = "unsupported" // this runtime, pool or build cannot
	Unavailable Code = "unavailable" // works later
	Internal    Code = "internal"    // the default; its text goes to the log only
)

// Error is an error a client may see.
type Error struct {
	Code Code
	Text string // for people; no host paths, no secrets
	Wire string // OpenSandbox error code if a special one is known, as "SANDBOX::INVALID_PARAMETER"
	Err  error  // for the log; may be nil
	// Retry is how soon it may be worth asking again; 0: nobody knows.
	Retry time.Duration
}

// Error returns the text and, for the log, its cause.
func (e *Error) Error() string {
	if e.Err == nil {
		return e.Text
	}
	return e.Text + ": " + e.Err.Error()
}

// Unwrap returns the cause that only the log sees.
func (e *Error) Unwrap() error { return e.Err }

// Count returns how many there are, in words of a message: "1 sandbox", "2 sandboxes".
func Count[N ~int | ~int64](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// New makes an error a client may see.
func New(code Code, format string, args ...any) error {
	return &Error{Code: code, Text: fmt.Sprintf(format, args...)}
}

// Wrap is New with a cause that only the log sees.
func Wrap(err error, code Code, format string, args ...any) error {
	return &Error{Code: code, Text: fmt.Sprintf(format, args...), Err: err}
}

// Wire returns err with the OpenSandbox error code wire; err must be of New or Wrap.
func Wire(err error, wire string) error {
	if e, ok := errors.AsType[*Error](err); ok {
		e.Wire = wire
	}
	return err
}

// Retry returns err with the time after which to ask again; err must be of New
// or Wrap.
func Retry(err error, after time.Duration) error {
	if e, ok := errors.AsType[*Error](err); ok {
		e.Retry = after
	}
	return err
}

// CodeOf returns the code of the outermost Error in err, or Internal.
func CodeOf(err error) Code {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return Internal
}

// Is reports whether the outermost Error in err has the given code.
func Is(err error, code Code) bool { return err != nil && CodeOf(err) == code }

// Lack says what the host lacks, if err is for want of open files or of room on a disk, and what to do; else "".
func Lack(err error) string {
	switch {
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return "sandboxd has reached its limit of open files: run fewer sandboxes, or raise the limit (LimitNOFILE= of its unit)"
	case errors.Is(err, syscall.ENOSPC):
		return "a disk of the host is full: free space on it"
	case errors.Is(err, syscall.EDQUOT):
		return "a quota of a disk is used up: delete files that it counts, or raise it"
	}
	return ""
}
