package daemon

import (
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/image"
)

// TestTelling: a pull of any length and number of layers is a few lines.
func TestTelling(t *testing.T) {
	var said []string
	tell := &telling{}
	hear := func(at image.Progress) {
		if tell.telling(at) {
			said = append(said, at.String())
		}
	}
	const mib = 1 << 20
	hear(image.Progress{Stage: image.StageResolve})
	for n := int64(0); n <= 1000; n++ {
		hear(image.Progress{Stage: image.StageDownload, Bytes: n * mib, Total: 1000 * mib})
		if n%10 == 5 { // beside it, what has come is unpacked
			hear(image.Progress{Stage: image.StageUnpack, Layer: int(n/10) + 1, Layers: 101})
		}
	}
	hear(image.Progress{Stage: image.StageUnpack, Layer: 101, Layers: 101})
	if len(said) != 13 || !slices.Equal(said[:3], []string{
		"asking the registry", "downloaded 0 of 1000 MiB",
		"downloaded 100 of 1000 MiB",
	}) || said[12] != "unpacking layer 101 of 101" {
		t.Errorf("%d lines: %q", len(said), said)
	}
	said, tell = nil, &telling{} // all layers were here but one, which is empty
	hear(image.Progress{Stage: image.StageUnpack, Layer: 1, Layers: 1})
	if len(said) != 1 {
		t.Errorf("%q", said)
	}
}
