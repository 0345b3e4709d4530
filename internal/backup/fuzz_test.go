package backup

import (
	"bytes"
	"compress/gzip"
	"io"
	"testing"
	"time"
)

// FuzzRead: what is read as a backup is the store that its manifest describes, and is
// written again as the same.
func FuzzRead(f *testing.F) {
	var b bytes.Buffer
	m := Manifest{Version: "v1", Instance: "t", Taken: time.Unix(1800000000, 0).UTC()}
	if err := Write(&b, m, bytes.NewReader([]byte("the state"))); err != nil {
		f.Fatal(err)
	}
	f.Add(tarOf(f, b.Bytes()))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, tar []byte) {
		var packed, state, again, same bytes.Buffer
		zw := gzip.NewWriter(&packed)
		if _, err := zw.Write(tar); err != nil || zw.Close() != nil {
			t.Fatal(err)
		}
		m, err := Read(&packed, &state)
		if err != nil {
			return
		}
		if m.Format != Format || m.Bytes != int64(state.Len()) {
			t.Fatalf("%d bytes are read as %+v", state.Len(), m)
		}
		if err := Write(&again, m, bytes.NewReader(state.Bytes())); err != nil {
			t.Fatal(err)
		}
		if m2, err := Read(&again, &same); err != nil || m2.SHA256 != m.SHA256 || !bytes.Equal(same.Bytes(), state.Bytes()) {
			t.Fatalf("%+v comes back as %+v, %v", m, m2, err)
		}
	})
}

// tarOf is what is compressed in a backup: inputs are changed there, behind the checksum
// of gzip.
func tarOf(f *testing.F, b []byte) []byte {
	f.Helper()
	zr, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		f.Fatal(err)
	}
	tar, err := io.ReadAll(zr)
	if err != nil {
		f.Fatal(err)
	}
	return tar
}
