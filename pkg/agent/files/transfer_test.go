package files

import "testing"

func FuzzMetadata(f *testing.F) {
	f.Add([]byte(`{"path":"/a","owner":null,"mode":644}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		path, m, err := metadataOf(b)
		if err != nil {
			return
		}
		mode, err := fromDigits(m.Mode)
		if path == "" || err != nil || mode > 0o7777 || digits(mode) != m.Mode {
			t.Fatalf("%q %+v %o", path, m, mode)
		}
	})
}
