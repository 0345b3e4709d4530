package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// listing keeps, beside the digest, what each member of the tar is.
type listing struct {
	*memory
	members map[string]string
}

func (l *listing) Stage(ctx context.Context, r io.Reader, progress func(int64)) (string, string, int64, error) {
	pr, pw := io.Pipe()
	done := make(chan struct{})
	l.members = map[string]string{}
	go func() {
		defer close(done)
		tr := tar.NewReader(pr)
		for h, err := tr.Next(); err == nil; h, err = tr.Next() {
			content := sha256.New()
			_, _ = io.Copy(content, tr)
			l.members[strings.TrimPrefix(h.Name, ".")] = fmt.Sprintf("%c %s %o %d:%d %s %d %x", h.Typeflag, h.Linkname, h.Mode, h.Uid,
				h.Gid, h.ModTime.UTC(), h.Size, content.Sum(nil)[:8])
		}
		_, _ = io.Copy(io.Discard, pr)
	}()
	stage, digest, n, err := l.memory.Stage(ctx, io.TeeReader(r, pw), progress)
	pw.Close()
	<-done
	return stage, digest, n, err
}

// differences are the members that are not alike in two builds.
func differences(a, b map[string]string) (out []string) {
	for _, p := range slices.Sorted(maps.Keys(a)) {
		if a[p] != b[p] {
			out = append(out, p+": "+a[p]+" | "+b[p])
		}
	}
	for _, p := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[p]; !ok {
			out = append(out, p+" is in the second alone")
		}
	}
	return out
}

// Two builds give one image, and it names neither this host nor this hour. Of the
// two minutes base takes one, python a little more.
func TestBuildIsReproducible(t *testing.T) {
	hosttest.Root(t)
	for name, has := range map[string][]string{
		"base":   nil,
		"python": {"/usr/bin/python3", "/usr/bin/pip", "/usr/lib/python3/dist-packages/pip/__init__.py"},
	} {
		if name == "base" || everything {
			t.Run(name, func(t *testing.T) { buildTwice(t, name, has) })
		}
	}
}

// buildTwice builds the image of a recipe of ours, which has these files and
// those of base.
func buildTwice(t *testing.T, name string, has []string) {
	hosttest.Leaks(t, instance.Instance('s'))
	s, m := open(t, "../../rootfs")
	l := &listing{memory: m}
	s.cfg.Layers = l
	var log bytes.Buffer
	day := func() string { return time.Now().UTC().Format(time.DateOnly) }
	build := func() record.Image {
		i, err := s.Build(t.Context(), name, true, &log)
		if err != nil {
			t.Fatal(err, log.String())
		}
		return i
	}
	today := day()
	first, before := build(), l.members
	second := build()
	for day() != today { // builds of one day are the same
		today = day()
		first, before, second = second, l.members, build()
	}
	if first.Digest != second.Digest || first.Layers[0] != second.Layers[0] {
		t.Errorf("two builds: %s and %s; what differs:\n%s", first.Digest, second.Digest,
			strings.Join(differences(before, l.members), "\n"))
	}
	if got, err := s.Resolve(t.Context(), parsed(name+"@"+first.Digest)); err != nil || got.Ref() != name+":latest" {
		t.Errorf("resolve: %+v, %v", got, err)
	}
	if v := first.Config.Labels[versionLabel+"debian"]; v == "" {
		t.Errorf("the image does not tell the version of Debian: %v", first.Config.Labels)
	}
	if v := first.Config.Labels[versionLabel+"python"]; (v != "") != (name == "python") {
		t.Errorf("python %q of %s", v, name)
	}
	for _, p := range append(has, "/workspace/", "/usr/bin/bash", "/usr/bin/curl", "/usr/bin/git", "/usr/bin/less", "/usr/bin/vi",
		"/usr/bin/vim.tiny", "/usr/bin/ps", "/etc/ssl/certs/ca-certificates.crt", "/usr/share/doc/git/copyright") {
		if l.members[p] == "" {
			t.Errorf("the image lacks %s", p)
		}
	}
	for p := range l.members {
		if p == "/etc/hostname" || p == "/etc/resolv.conf" || p == "/etc/machine-id" || strings.HasPrefix(p, "/usr/share/man/man") ||
			strings.HasPrefix(p, "/var/log/") && !strings.HasSuffix(p, "/") || strings.HasPrefix(p, "/var/lib/apt/lists/") &&
			strings.Contains(p, "_dists_") || strings.HasSuffix(p, ".deb") {
			t.Errorf("the image has %s", p)
		}
	}
	left, err := os.ReadDir(s.cfg.TempDir)
	if err != nil || len(left) > 0 {
		t.Errorf("a build left %v, %v", left, err)
	}
}

// watcher cancels when it reads a word.
type watcher struct {
	word   string
	cancel context.CancelFunc
}

func (w *watcher) Write(p []byte) (int, error) {
	if strings.Contains(string(p), w.word) {
		w.cancel()
	}
	return len(p), nil
}

// A cancelled build, and one whose hook fails, leave nothing.
func TestBuildLeavesNothing(t *testing.T) {
	hosttest.Root(t)
	hosttest.Leaks(t, instance.Instance('s'))
	dir := t.TempDir()
	recipe := "variant = \"essential\"\nhooks = ['echo sure >&2; exit 7']\n"
	if err := errors.Join(os.Mkdir(dir+"/bad", 0o755), os.WriteFile(dir+"/bad/recipe.toml", []byte(recipe), 0o644)); err != nil {
		t.Fatal(err)
	}
	s, m := open(t, dir)
	check := func(what string) {
		t.Helper()
		left, err := os.ReadDir(s.cfg.TempDir)
		if err != nil || len(left) > 0 || len(m.images) > 0 || len(m.layers) > 0 {
			t.Errorf("%s left %v, images %v, layers %v, %v", what, left, m.images, m.layers, err)
		}
		for _, p := range processesBelow(s.cfg.TempDir) {
			t.Errorf("%s left process %s", what, p)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := s.Build(ctx, "bad", true, &watcher{"extracting archives", cancel})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled build: %v", err)
	}
	check("a cancelled build")
	_, err = s.Build(t.Context(), "bad", true, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "mmdebstrap failed") {
		t.Errorf("build with a failing hook: %v", err)
	}
	check("a failed build")
}

// processesBelow lists processes that name dir in their arguments or live in it.
func processesBelow(dir string) (found []string) {
	procs, _ := os.ReadDir("/proc")
	for _, p := range procs {
		args, err := os.ReadFile("/proc/" + p.Name() + "/cmdline")
		if err != nil {
			continue
		}
		root, _ := os.Readlink("/proc/" + p.Name() + "/root")
		if strings.Contains(string(args), dir) || strings.HasPrefix(root, dir) {
			found = append(found, p.Name()+" "+strings.ReplaceAll(string(args), "\x00", " "))
		}
	}
	return found
}
