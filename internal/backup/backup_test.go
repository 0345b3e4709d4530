package backup

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"strings"
	"testing"
	"time"
)

func written(t *testing.T, state string) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Write(&b, Manifest{Version: "v1", Instance: "t", Taken: time.Now().UTC()}, strings.NewReader(state)); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestRoundTrip(t *testing.T) {
	var out bytes.Buffer
	m, err := Read(bytes.NewReader(written(t, "the state")), &out)
	if err != nil || out.String() != "the state" || m.Instance != "t" || m.Bytes != 9 {
		t.Errorf("%+v, %q, %v", m, out.String(), err)
	}
}

// TestCut refuses a backup that ends early, at every byte, and one in which any
// byte of the contents is another.
func TestCut(t *testing.T) {
	whole := written(t, strings.Repeat("the state", 100))
	for n := range whole {
		if _, err := Read(bytes.NewReader(whole[:n]), io.Discard); err == nil {
			t.Fatalf("%d of %d bytes were enough", n, len(whole))
		}
	}
	for at := 10; at < len(whole); at++ { // gzip's header says nothing of the contents
		bad := bytes.Clone(whole)
		bad[at] ^= 0x10
		var out bytes.Buffer
		if _, err := Read(bytes.NewReader(bad), &out); err == nil && out.String() != strings.Repeat("the state", 100) {
			t.Fatalf("byte %d may be any", at)
		}
	}
}

// TestForeign refuses archives of others, and says what is wrong.
func TestForeign(t *testing.T) {
	type member struct{ name, text string }
	manifest := `{"format":1,"bytes":1,"sha256":"` + strings.Repeat("0", 64) + `"}`
	for name, c := range map[string]struct {
		members []member
		want    string
	}{
		"empty":         {nil, "manifest.json"},
		"order":         {[]member{{"sandboxd.db", "x"}}, "want manifest.json"},
		"path":          {[]member{{"../manifest.json", manifest}}, "want manifest.json"},
		"newer":         {[]member{{"manifest.json", `{"format":2,"version":"v9"}`}, {"sandboxd.db", "x"}}, "v9"},
		"no JSON":       {[]member{{"manifest.json", "{"}, {"sandboxd.db", "x"}}, "manifest"},
		"huge manifest": {[]member{{"manifest.json", strings.Repeat(" ", maxManifest+1)}}, "at most"},
		"sum":           {[]member{{"manifest.json", manifest}, {"sandboxd.db", "x"}}, "damaged"},
		"no state":      {[]member{{"manifest.json", manifest}}, "sandboxd.db"},
	} {
		var b bytes.Buffer
		zw := gzip.NewWriter(&b)
		tw := tar.NewWriter(zw)
		for _, m := range c.members {
			if err := tw.WriteHeader(&tar.Header{Name: m.name, Size: int64(len(m.text)), Mode: 0o600}); err != nil {
				t.Fatal(err)
			}
			io.WriteString(tw, m.text)
		}
		tw.Close()
		zw.Close()
		if _, err := Read(&b, io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Read(strings.NewReader("SQLite format 3"), io.Discard); err == nil || !strings.Contains(err.Error(), "system backup") {
		t.Errorf("no gzip: %v", err)
	}
}
