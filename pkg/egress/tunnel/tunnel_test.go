package tunnel

import (
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

func TestBits(t *testing.T) {
	for s, want := range map[string]float64{"": 0, "aaaa": 0, "ab": 2, "a.b": 2, "abcd": 8, "aab": 3 * 0.9183} {
		if got := Bits(s); math.Abs(got-want) > 0.001 {
			t.Errorf("%q: %v bits, want %v", s, got, want)
		}
	}
}

// TestOrdinary: what programs ask for in a minute is far below the limits, and may be asked
// again.
func TestOrdinary(t *testing.T) {
	var w Watch
	now := time.Unix(600, 0)
	for range 3 {
		for i := range MaxNames {
			if over := w.Admit("*.cloudfront.net", fmt.Sprintf("d%09x.cloudfront.net", i*0x9e37), now); over != "" {
				t.Fatalf("name %d: %s", i, over)
			}
		}
	}
	if over := w.Admit("*.cloudfront.net", "www.cloudfront.net", now); !strings.Contains(over, "2000 names below *.cloudfront.net") {
		t.Errorf("one more: %q", over)
	}
	if over := w.Admit("*.example.com", "www.example.com", now); over != "" {
		t.Error("another wildcard:", over)
	}
	if over := w.Admit("*.cloudfront.net", "www.cloudfront.net", now.Add(time.Minute)); over != "" {
		t.Error("a minute later:", over)
	}
}

// TestTunnel: a file that is sent by names does not get far.
func TestTunnel(t *testing.T) {
	for _, size := range []int{10, 20, 35, 140} { // bytes in a name
		var w Watch
		now := time.Unix(600, 0)
		sent, refused := 0, false
		for range 3 * MaxNames {
			b := make([]byte, size)
			rand.Read(b)
			data := strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b))
			var labels []string
			for len(data) > 60 {
				labels, data = append(labels, data[:60]), data[60:]
			}
			name := strings.Join(append(labels, data, "evil.example"), ".")
			if w.Admit("*.evil.example", name, now) == "" {
				sent += size
			} else {
				refused = true
			}
		}
		if most := (MaxBits + freeBits*MaxNames) / 8 * 5 / 3; sent > most || !refused {
			t.Errorf("%d bytes a name: %d bytes passed, want at most %d", size, sent, most)
		}
	}
}
