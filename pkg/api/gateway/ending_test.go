package gateway

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

const killed = `{"type":"error","timestamp":2,"error":{"ename":"CommandExecError","evalue":"-1","traceback":["signal: killed"]}}` + "\n\n"

// TestKilledStreamInPieces: buffers of any size, and a reader that gives data
// and the end at once.
func TestKilledStreamInPieces(t *testing.T) {
	for size := len(killed); size < 4*len(killed); size += 7 {
		k := &told{
			ReadCloser: io.NopCloser(iotest.DataErrReader(strings.NewReader(killed))),
			killed:     func() string { return strings.Repeat("because ", 20) },
			denied:     func() string { return "" },
		}
		var all []byte
		b := make([]byte, size)
		for {
			n, err := k.Read(b)
			all = append(all, b[:n]...)
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if got := string(all); !strings.HasSuffix(got, "because \"]}}\n\n") || strings.Count(got, "signal: killed") != 1 {
			t.Fatalf("through %d bytes: %s", size, got)
		}
	}
}
