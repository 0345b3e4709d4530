package terminate

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// MaxValue is the longest value of a credential, in bytes: that of pkg/egress/vault.
	MaxValue = 64 << 10

	// maxName is the longest name of a credential or a binding, in bytes: that of the same.
	maxName = 128

	maxValues  = 16               // that the daemon is asked for at a time; more wait for their turn
	valueLimit = 10 * time.Second // for the daemon to answer, with the wait: it may run a command
)

// ParseValueRequest reads the name of the credential of which a child asks the Value. A child
// may have written anything, and any number of them: whether its sandbox has such a credential,
// and how many are read at a time, is for the caller.
func ParseValueRequest(b []byte) (credential string, err error) {
	if len(b) == 0 || !isPlain(string(b), maxName) {
		return "", errForm
	}
	return string(b), nil
}

// A Value is what the daemon answers about a credential: its value, or why there is none.
type Value struct {
	Bytes []byte // as they are to be used, at most MaxValue; none: there is no value
	Text  string // why there is no value, without a part of one; at most MaxValue bytes
}

// Format hides the value.
func (v Value) Format(f fmt.State, _ rune) { io.WriteString(f, "[redacted]") } //nolint:errcheck // fmt keeps no errors

// Append writes v as the body of a message.
func (v Value) Append(b []byte) []byte {
	if len(v.Bytes) > 0 {
		return append(append(b, 1), v.Bytes...)
	}
	return append(append(b, 0), v.Text...)
}

// ParseValue reads what Append has written.
func ParseValue(b []byte) (Value, error) {
	switch {
	case len(b) < 1, len(b) > 1+MaxValue, b[0] > 1, b[0] == 1 && len(b) == 1:
		return Value{}, errForm
	case b[0] == 1:
		return Value{Bytes: b[1:]}, nil
	}
	return Value{Text: string(b[1:])}, nil
}

// values asks for values of credentials, for one Judge: a name may mean another value for the
// next one. It keeps none.
type values struct {
	ask   func(ctx context.Context, credential string) ([]byte, error)
	turns chan struct{}

	mu   sync.Mutex
	open map[string]*asked // by the name of the credential
}

// An asked is a question that is open, however many requests wait for its answer.
type asked struct {
	done  chan struct{} // closed when what follows is there
	value []byte
	err   error
}

// of returns the value of a credential. If ctx ends before, the question stays open for others.
func (v *values) of(ctx context.Context, credential string) ([]byte, error) {
	v.mu.Lock()
	a := v.open[credential]
	if a == nil {
		a = &asked{done: make(chan struct{})}
		v.open[credential] = a
		go v.answer(a, credential)
	}
	v.mu.Unlock()
	select {
	case <-a.done:
		return a.value, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the value of the credential %q: %w", credential, ctx.Err())
	}
}

func (v *values) answer(a *asked, credential string) {
	ctx, cancel := context.WithTimeout(context.Background(), valueLimit)
	defer cancel()
	select {
	case v.turns <- struct{}{}:
		a.value, a.err = v.ask(ctx, credential)
		<-v.turns
	case <-ctx.Done():
		a.err = fmt.Errorf("%d other credentials are asked for: %w", maxValues, ctx.Err())
	}
	if a.err != nil {
		a.err = fmt.Errorf("ask the daemon for the value of the credential %q: %w", credential, a.err)
	}
	v.mu.Lock()
	delete(v.open, credential)
	v.mu.Unlock()
	close(a.done)
}
