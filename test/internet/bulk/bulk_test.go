package bulk

import (
	"bytes"
	"io"
	"slices"
	"testing"
	"testing/iotest"
)

func TestBulk(t *testing.T) {
	b, err := io.ReadAll(Reader(100_001))
	if err != nil || len(b) != 100_001 {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	for what, r := range map[string]io.Reader{
		"as they come": bytes.NewReader(b), "one by one": iotest.OneByteReader(bytes.NewReader(b)),
		"made one by one": iotest.OneByteReader(Reader(100_001)),
	} {
		if n, err := Check(r); n != 100_001 || err != nil {
			t.Errorf("%s: %d, %v", what, n, err)
		}
	}
	moved := slices.Concat(b[:8192], b[16384:24576], b[8192:16384], b[24576:])
	for what, other := range map[string][]byte{
		"lost": slices.Concat(b[:8000], b[8008:]), "doubled": slices.Concat(b[:8192], b[:8192], b[8192:]), "moved": moved,
	} {
		if _, err := Check(bytes.NewReader(other)); err == nil {
			t.Errorf("%s: nobody sees it", what)
		}
	}
	if n, err := Check(iotest.TimeoutReader(bytes.NewReader(b))); err == nil {
		t.Errorf("a body that breaks off is one of %d bytes", n)
	}
}
