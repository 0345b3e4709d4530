package backup

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
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

// TestPolicies: a backup has the named policies, with their versions.
func TestPolicies(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	open := func(name string) *store.DB {
		t.Helper()
		db, err := store.Open(filepath.Join(dir, name), store.Options{Reserve: -1})
		if err != nil {
			t.Fatal(err)
		}
		return db
	}
	db := open("before.db")
	defer db.Close()
	for _, mode := range []record.NetworkMode{record.NetworkRules, record.NetworkOpen} {
		v := record.PolicyVersion{Made: time.Unix(1, 0).UTC(), Network: record.Network{Mode: mode}}
		if _, _, err := db.PutPolicy(ctx, "build", false, v); err != nil {
			t.Fatal(err)
		}
	}
	var state, file, out bytes.Buffer
	if _, err := db.Backup(&state); err != nil {
		t.Fatal(err)
	}
	if err := Write(&file, Manifest{}, bytes.NewReader(state.Bytes())); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(&file, &out); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "after.db"), out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	restored := open("after.db")
	defer restored.Close()
	want, _, _ := db.Policy(ctx, "build")
	if got, ok, err := restored.Policy(ctx, "build"); err != nil || !ok || len(got.Versions) != 2 || !reflect.DeepEqual(got, want) {
		t.Errorf("restored %+v, %v, %v; want %+v", got, ok, err, want)
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
		"newer":         {[]member{{"manifest.json", `{"format":3,"version":"v9"}`}, {"sandboxd.db", "x"}}, "v9"},
		"no JSON":       {[]member{{"manifest.json", "{"}, {"sandboxd.db", "x"}}, "manifest"},
		"huge manifest": {[]member{{"manifest.json", strings.Repeat(" ", maxManifest+1)}}, "at most"},
		"sum":           {[]member{{"manifest.json", manifest}, {"sandboxd.db", "x"}}, "damaged"},
		"no state":      {[]member{{"manifest.json", manifest}}, "sandboxd.db"},
		"no data": {
			[]member{{"manifest.json", `{"format":2,"bytes":1,"sha256":"2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}`}, {"sandboxd.db", "x"}},
			"data.json",
		},
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
