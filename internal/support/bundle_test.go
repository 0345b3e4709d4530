package support

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// members reads a bundle.
func members(t *testing.T, b []byte) map[string]string {
	t.Helper()
	zr, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for tr := tar.NewReader(zr); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimPrefix(h.Name, "sandboxd-support/")] = string(text)
	}
}

// hostWith makes a host, without a daemon, on which every secret there can be
// has PLANTED in it.
func hostWith(t *testing.T) (*config.Config, record.Record) {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key := write("key", "PLANTED-key-1\nPLANTED-key-2\n")
	write("state/endpoint-secret", "PLANTED-endpoint-secret")
	cfg, err := config.Load(write("config.toml", `# PLANTED-comment
state_dir = "`+dir+`/state"
run_dir = "`+dir+`/run"
libexec_dir = "`+dir+`/libexec"
[listen]
tcp = "127.0.0.1:1"
api_key_file = "`+key+`"
`))
	if err != nil {
		t.Fatal(err)
	}
	db, err := store.Open(filepath.Join(cfg.StateDir, "sandboxd.db"), store.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	r := record.Record{
		ID: "aabcdefghijk", State: record.Ended, Reason: record.Exited, Token: "PLANTED-token", Message: "PLANTED-message",
		LastOutput: "PLANTED-output",
		Spec: record.Spec{
			Name: "PLANTED-name", Runtime: "runc", Entrypoint: []string{"/bin/sh", "PLANTED-argument"},
			Env: map[string]string{"KEY": `PLANTED-env with "quotes"`}, Labels: map[string]string{"team": "PLANTED-label"},
			Extensions:    map[string]string{"x": "PLANTED-extension"},
			NetworkPolicy: []byte(`{"egress":[{"target":"PLANTED-policy"}]}`),
		},
	}
	if err := errors.Join(db.Insert(t.Context(), &r), db.Close()); err != nil {
		t.Fatal(err)
	}
	return cfg, r
}

// TestNoSecrets plants secrets everywhere and looks for them in the bundle.
func TestNoSecrets(t *testing.T) {
	cfg, r := hostWith(t)
	var b bytes.Buffer
	if err := Write(t.Context(), &b, cfg, "v1"); err != nil {
		t.Fatal(err)
	}
	all := members(t, b.Bytes())
	for name, text := range all {
		if i := strings.Index(text, "PLANTED"); i >= 0 {
			t.Errorf("%s: …%s…", name, text[max(0, i-40):min(len(text), i+40)])
		}
	}
	for name, want := range map[string]string{
		"README": "It does not contain", "versions.json": "v1", "config.json": `"StateDir"`, "doctor.json": `"check": "kernel"`,
		"sandboxes.json": r.ID, "errors.txt": "system-info.json",
	} {
		if !strings.Contains(all[name], want) {
			t.Errorf("%s does not say %q:\n%s", name, want, all[name])
		}
	}
	if !strings.Contains(all["sandboxes.json"], `"entrypointArgs": 2`) || !strings.Contains(all["sandboxes.json"], `"reason": "exited"`) {
		t.Errorf("%s", all["sandboxes.json"])
	}
}

// TestScrub takes out of a log what a daemon should never have put there.
func TestScrub(t *testing.T) {
	cfg, r := hostWith(t)
	line := `level=ERROR msg=create sandbox=aabcdefghijk err="PLANTED-token PLANTED-key-2: PLANTED-env with \"quotes\", PLANTED-argument, PLANTED-endpoint-secret, \"PLANTED-env with \\\"quotes\\\"\", \"\\\"PLANTED-env with \\\\\\\"quotes\\\\\\\"\\\"\""` + "\n"
	got := scrubber(cfg, []record.Record{r}).Replace(line)
	if strings.Contains(got, "PLANTED") || !strings.Contains(got, "sandbox=aabcdefghijk") {
		t.Error(got)
	}
}

// TestUnreadableStore leaves the log out: what to cut out of it is not known.
func TestUnreadableStore(t *testing.T) {
	cfg, _ := hostWith(t)
	if err := os.WriteFile(filepath.Join(cfg.StateDir, "sandboxd.db"), []byte("no store"), 0o600); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := Write(t.Context(), &b, cfg, "v1"); err != nil {
		t.Fatal(err)
	}
	all := members(t, b.Bytes())
	if _, ok := all["journal.txt"]; ok || !strings.Contains(all["errors.txt"], "log is left out") ||
		!strings.Contains(all["errors.txt"], "damaged") {
		t.Errorf("%s", all["errors.txt"])
	}
}
