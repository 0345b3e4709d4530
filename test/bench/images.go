package main

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/test/bench/carry"
)

// The imported image: 1 GB in as many files as a large image has.
const (
	importBytes = 1 << 30
	importFiles = 20_000
)

// imports measures an import against tar -x of the same tar, both until everything is on
// disk: once for a root file system, once for its `docker save`.
func imports(ctx context.Context, b *bench) (err error) {
	dir, err := os.MkdirTemp(filepath.Join(inst.StateDir()), "bench-import-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	size := int64(importBytes)
	if b.quick {
		size /= 32
	}
	rootfs, saved := filepath.Join(dir, "rootfs.tar"), filepath.Join(dir, "saved.tar")
	if err := writeRootfs(rootfs, size); err != nil {
		return err
	}
	if err := writeSaved(saved, rootfs); err != nil {
		return err
	}
	extract := func() (float64, error) {
		into := filepath.Join(dir, "tree")
		if err := os.Mkdir(into, 0o755); err != nil {
			return 0, err
		}
		start := time.Now()
		out, err := exec.CommandContext(ctx, "tar", "-C", into, "--numeric-owner", "-xpf", rootfs).CombinedOutput()
		if err != nil {
			return 0, fmt.Errorf("tar: %w: %s", err, out)
		}
		err = syncDir(into)
		took := time.Since(start).Seconds()
		return took, errors.Join(err, os.RemoveAll(into), syncDir(dir))
	}
	for _, c := range []struct {
		name, file string
		g          goal
	}{{"import_1GB", rootfs, goal{maxRatio: 1.5}}, {"import_1GB_docker_save", saved, goal{}}} {
		ours := func() (float64, error) {
			f, err := os.Open(c.file)
			if err != nil {
				return 0, err
			}
			defer f.Close()
			fi, err := f.Stat()
			if err != nil {
				return 0, err
			}
			start := time.Now()
			_, err = b.cl.Images().Import(ctx, client.Archive{Name: "bench-import", Size: fi.Size(), Body: f}, nil)
			took := time.Since(start).Seconds()
			if err != nil {
				return 0, err
			}
			_, err = b.cl.Images().Remove(ctx, "bench-import")
			return took, errors.Join(err, syncDir(dir))
		}
		a, t, err := turns(b.times(5, 1), 1, ours, extract)
		if err != nil {
			return err
		}
		b.add(row(c.name, "-", "s", a, "tar -x of the root file system, and sync", t, c.g))
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// writeRootfs writes a tar of importFiles files with incompressible content and with the
// sizes of a typical image: most of them are small.
func writeRootfs(name string, size int64) (err error) {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	noise := make([]byte, 1<<20)
	rng := rand.NewChaCha8([32]byte{})
	_, _ = rng.Read(noise) // never fails
	w := bufio.NewWriterSize(f, 1<<20)
	tw := tar.NewWriter(w)
	small := size / 4 / importFiles
	for i := range importFiles {
		n := small
		if i%100 == 0 { // every hundredth file is large; these have three quarters of all bytes
			n = size * 3 / 4 / (importFiles / 100)
			d := fmt.Sprintf("usr/lib/d%03d/", i/100)
			if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d, Mode: 0o755}); err != nil {
				return err
			}
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("usr/lib/d%03d/f%03d", i/100, i%100), Mode: 0o644, Size: n}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		for n > 0 {
			part := noise[:min(n, int64(len(noise)))]
			if _, err := tw.Write(part); err != nil {
				return err
			}
			n -= int64(len(part))
		}
	}
	return errors.Join(tw.Close(), w.Flush())
}

// writeSaved writes an archive of one layer in the form of `docker save`.
func writeSaved(name, layer string) (err error) {
	in, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer in.Close()
	h := sha256.New()
	n, err := io.Copy(h, in)
	if err != nil {
		return err
	}
	sum := hex.EncodeToString(h.Sum(nil))
	config, err := json.Marshal(map[string]any{
		"os":     "linux",
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + sum}},
	})
	if err != nil {
		return err
	}
	manifest := `[{"Config":"config.json","RepoTags":["bench:1"],"Layers":["` + sum + `/layer.tar"]}]`
	if _, err := in.Seek(0, io.SeekStart); err != nil {
		return err
	}
	out, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	tw := tar.NewWriter(out)
	for _, m := range []struct {
		name string
		size int64
		r    io.Reader
	}{
		{sum + "/layer.tar", n, in},
		{"config.json", int64(len(config)), strings.NewReader(string(config))},
		{"manifest.json", int64(len(manifest)), strings.NewReader(manifest)},
	} {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: m.name, Mode: 0o644, Size: m.size}); err != nil {
			return err
		}
		if _, err := io.Copy(tw, m.r); err != nil {
			return err
		}
	}
	return tw.Close()
}

// bundles measures the installation of a bundle with the images base and python, against a copy
// of it and unpacking the same files.
func bundles(ctx context.Context, b *bench) (err error) {
	dir, err := os.MkdirTemp(inst.StateDir(), "bench-bundle-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	names := []string{image, "python"}
	for _, name := range names {
		if err := b.ensureImage(ctx, name); err != nil {
			return err
		}
		if err := export(ctx, b.cl, name, filepath.Join(dir, "images")); err != nil {
			return err
		}
	}
	load, err := carry.Pack(ctx, dir, b.bin, filepath.Join(b.root, "build/tools/packages"), filepath.Join(inst.RunDir(), "sandboxd.sock"))
	if err != nil {
		return err
	}
	ours := func() (float64, error) {
		for _, name := range names {
			if _, err := b.cl.Images().Remove(ctx, name); err != nil {
				return 0, err
			}
		}
		if err := syncDir(dir); err != nil {
			return 0, err
		}
		return load.Install(ctx) // with it the images are there again
	}
	a, c, err := turns(b.times(7, 1), 1, ours, func() (float64, error) { return load.Unpack(ctx) })
	if err != nil {
		return err
	}
	b.add(row("bundle_install", "-", "s", a, "cp of it, then zstd, tar and dpkg-deb of the same files, and sync", c, goal{maxRatio: 1.5}))
	size, err := load.Bytes()
	if err != nil {
		return err
	}
	b.add(row("bundle_size", "-", "MB", []float64{float64(size) / 1e6}, "", nil, goal{maxP50: 150}))
	return nil
}

// export writes the archive of an image into dir.
func export(ctx context.Context, cl *client.Client, name, dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, name+".tar"))
	if err != nil {
		return err
	}
	return errors.Join(cl.Images().Export(ctx, name, f), f.Close())
}
