package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
)

// listing keeps, beside the digest, the names in the tar.
type listing struct {
	*memory
	names map[string]bool
}

func (l *listing) StageLayer(ctx context.Context, r io.Reader, progress func(int64)) (string, string, int64, error) {
	pr, pw := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		tr := tar.NewReader(pr)
		for h, err := tr.Next(); err == nil; h, err = tr.Next() {
			l.names[strings.TrimPrefix(h.Name, ".")] = true
		}
		_, _ = io.Copy(io.Discard, pr)
	}()
	stage, digest, n, err := l.memory.StageLayer(ctx, io.TeeReader(r, pw), progress)
	pw.Close()
	<-done
	return stage, digest, n, err
}

// Two builds give one image, and it names neither this host nor this hour.
func TestBuildIsReproducible(t *testing.T) {
	hosttest.Root(t)
	hosttest.Leaks(t, instance.Instance('s'))
	s, m := open(t, "../../rootfs")
	l := &listing{m, map[string]bool{}}
	s.cfg.Layers = l
	var log bytes.Buffer
	first, err := s.Build(t.Context(), "base", &log)
	if err != nil {
		t.Fatal(err, log.String())
	}
	second, err := s.Build(t.Context(), "base", &log)
	if err != nil {
		t.Fatal(err, log.String())
	}
	if first.Digest != second.Digest || first.Layers[0] != second.Layers[0] {
		t.Errorf("two builds: %s and %s", first.Digest, second.Digest)
	}
	if got, err := s.Resolve(t.Context(), "base@"+first.Digest); err != nil || got.Ref() != "base:latest" {
		t.Errorf("resolve: %+v, %v", got, err)
	}
	for _, p := range []string{"/workspace/", "/usr/bin/bash", "/usr/bin/curl", "/usr/bin/git", "/usr/bin/ps", "/etc/ssl/certs/ca-certificates.crt", "/usr/share/doc/git/copyright"} {
		if !l.names[p] {
			t.Errorf("the image lacks %s", p)
		}
	}
	for p := range l.names {
		if p == "/etc/hostname" || p == "/etc/resolv.conf" || p == "/etc/machine-id" || strings.HasPrefix(p, "/usr/share/man/man") ||
			strings.HasPrefix(p, "/var/log/") && !strings.HasSuffix(p, "/") || strings.HasPrefix(p, "/var/lib/apt/lists/") && strings.Contains(p, "_dists_") || strings.HasSuffix(p, ".deb") {
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
	_, err := s.Build(ctx, "bad", &watcher{"extracting archives", cancel})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled build: %v", err)
	}
	check("a cancelled build")
	_, err = s.Build(t.Context(), "bad", io.Discard)
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
