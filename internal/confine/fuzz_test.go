package confine

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// FuzzLastWords: a child that was taken over may say anything before it dies. It is
// refused as the child's input is, or it is an error of this host; never another one.
func FuzzLastWords(f *testing.F) {
	f.Add([]byte("noise\n{\"code\":\"invalid\",\"text\":\"the archive is cut off\"}\n"), uint16(7))
	f.Add([]byte(`{"code":"denied","text":"x\ud800"}`), uint16(1))
	f.Add(bytes.Repeat([]byte("<"), maxTail), uint16(100))
	f.Add([]byte("fatal error: runtime: out of memory"), uint16(1000))
	f.Fuzz(func(t *testing.T, said []byte, step uint16) {
		words := &tail{}
		for rest := said; len(rest) > 0; {
			n := min(int(step)+1, len(rest))
			words.Write(rest[:n]) //nolint:errcheck // never fails
			rest = rest[n:]
		}
		if len(words.b) > maxTail {
			t.Fatalf("%d bytes are kept", len(words.b))
		}
		died := errors.New("exit status 1")
		heard := func(words *tail) error {
			p := &Process{words: words, limits: limits{cpu: time.Hour, data: maxData}, done: make(chan error, 1)}
			p.done <- died
			return p.Wait()
		}
		err := heard(words)
		switch c := errs.CodeOf(err); c {
		case errs.Invalid, errs.Unsupported, errs.Exhausted, errs.NotFound, errs.Internal:
		default:
			t.Fatalf("%q: %s", said, c)
		}
		if !errors.Is(err, died) || !utf8.ValidString(err.Error()) || len(err.Error()) > 4*maxTail {
			t.Fatalf("%q: %q", said, err)
		}
		own := &tail{b: words.b}
		own.Write(lastWords(errs.New(errs.Invalid, "bad: %s", said))) //nolint:errcheck // never fails
		if err := heard(own); !errs.Is(err, errs.Invalid) || !strings.HasPrefix(err.Error(), "bad: ") {
			t.Fatalf("what a child says of %q is heard as %v", said, err)
		}
	})
}
