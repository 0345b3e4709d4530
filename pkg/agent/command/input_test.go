package command

import (
	"context"
	"os"
	"runtime"
	"testing"
)

// TestPartAfterPart: a client that leaves as its part is written does not spoil the next one.
func TestPartAfterPart(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	in := input{file: w}
	gone, leave := context.WithCancel(t.Context())
	leave()
	for range 500 {
		in.write(gone, []byte("x")) //nolint:errcheck // it may fail: its client is gone
		runtime.Gosched()
		if err := in.write(t.Context(), []byte("y")); err != nil {
			t.Fatalf("the next part: %v", err)
		}
	}
}
