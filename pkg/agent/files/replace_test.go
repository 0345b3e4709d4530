package files

import (
	"bytes"
	"io"
	"testing"
)

func FuzzReplace(f *testing.F) {
	f.Add([]byte("aaaa"), []byte("aa"), []byte("b"), byte(1))
	f.Fuzz(func(t *testing.T, in, old, with []byte, n byte) {
		if len(old) == 0 {
			return
		}
		in = bytes.Repeat(in, 1+int(n)*int(n)) // over the chunk's end
		var out bytes.Buffer
		count, err := replaceStream(&out, bytes.NewReader(in), old, with)
		if err != nil || count != bytes.Count(in, old) || !bytes.Equal(out.Bytes(), bytes.ReplaceAll(in, old, with)) {
			t.Fatalf("%d %v", count, err)
		}
	})
}

func TestReplaceAcrossChunks(t *testing.T) {
	for _, off := range []int{256<<10 - 3, 256<<10 - 1, 256 << 10, 512<<10 - 4} {
		in := append(bytes.Repeat([]byte("."), off), "needle..."...)
		var out bytes.Buffer
		n, err := replaceStream(&out, iotestHalf{bytes.NewReader(in)}, []byte("needle"), nil)
		if n != 1 || err != nil || out.Len() != off+3 {
			t.Errorf("at %d: %d %v %d", off, n, err, out.Len())
		}
	}
}

// iotestHalf reads half of what is asked.
type iotestHalf struct{ r io.Reader }

func (h iotestHalf) Read(b []byte) (int, error) { return h.r.Read(b[:(len(b)+1)/2]) }
