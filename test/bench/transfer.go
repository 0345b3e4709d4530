package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/sandboxd/sandboxd/pkg/client"
)

const mega = 1e6

// noise is the content of files: incompressible and without holes.
var noise = func() []byte {
	b := make([]byte, 8<<20)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(b) // never fails
	return b
}()

// noiseReader reads n bytes, repeating noise.
func noiseReader(n int64) io.Reader { return io.LimitReader(&endless{}, n) }

type endless struct{ at int }

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, noise[e.at:])
	e.at = (e.at + n) % len(noise)
	return n, nil
}

// swallow reads r to its end in large pieces. io.Discard would read 8 KiB at a time, and
// the bench would measure that.
func swallow(r io.Reader) (int64, error) {
	return io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, make([]byte, 256<<10))
}

// files: 100 MB in and out through the proxy, against cp in the sandbox.
func files(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		t := transfer{b: b, size: 100 << 20, put: "file_put_100MB", get: "file_get_100MB", n: b.times(8, 2)}
		if err := t.on(ctx, rt); err != nil {
			return err
		}
	}
	return nil
}

// gigabyte: the same with 1 GB, twice the memory of the sandbox, and the memory that the
// agent uses for it.
func gigabyte(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		t := transfer{b: b, size: 1 << 30, put: "upload_1GB", get: "download_1GB", n: b.times(5, 1), peaks: true, putRatio: 0.8}
		if err := t.on(ctx, rt); err != nil {
			return err
		}
	}
	return nil
}

// A transfer measures one file, in and out.
type transfer struct {
	b        *bench
	size     int64 // bytes
	put, get string
	n        int
	peaks    bool    // measure the agent's memory, too
	putRatio float64 // goal of uploads on gVisor against cp; 0: none

	id string // of the sandbox
}

func (t *transfer) on(ctx context.Context, rt string) (err error) {
	r := request(rt)
	r.ResourceLimits = map[string]string{"disk": "4Gi"} // a file, its copy, and an upload that replaces the copy
	sb, err := t.b.createOf(ctx, r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.b.drop(ctx, sb.ID)) }()
	t.id = sb.ID
	if err := t.upload(ctx, "/root/source"); err != nil {
		return err
	}
	cp := t.rate(ctx, func() error {
		_, err := t.b.exec(ctx, t.id, "cp", "--reflink=never", "/root/source", "/root/copy")
		return err
	})
	const baseline = "cp --reflink=never inside the sandbox"
	g := pick(rt, goal{minRatio: 0.5}, goal{minP50: 200})
	upload := func() error { return t.upload(ctx, "/root/copy") }
	puts, cps, err := turns(t.n, 1, t.rate(ctx, upload), cp)
	if err != nil {
		return err
	}
	ofPut := pick(rt, g, goal{minP50: g.minP50, minRatio: t.putRatio})
	t.b.add(row(t.put, rt, "MB/s", puts, baseline, cps, ofPut))
	download := func() error { return t.download(ctx, "/root/source") }
	gets, cps, err := turns(t.n, 0, t.rate(ctx, download), cp)
	if err != nil {
		return err
	}
	t.b.add(row(t.get, rt, "MB/s", gets, baseline, cps, g))
	if !t.peaks {
		return nil
	}
	for _, f := range []struct {
		name string
		do   func() error
	}{{t.put, upload}, {t.get, download}} {
		peak, err := t.b.agentPeak(ctx, t.id, f.do)
		if err != nil {
			return err
		}
		t.b.add(row(f.name+"_agent_memory", rt, "MiB", []float64{peak}, "", nil, goal{maxP50: 32}))
	}
	return nil
}

func (t *transfer) upload(ctx context.Context, path string) error {
	return t.b.cl.Files(t.id).Put(ctx, []client.Upload{{Path: path, Mode: 644, Size: t.size, Open: func() (io.ReadCloser, error) {
		return io.NopCloser(noiseReader(t.size)), nil
	}}})
}

func (t *transfer) download(ctx context.Context, path string) error {
	r, err := t.b.cl.Files(t.id).Download(ctx, path)
	if err != nil {
		return err
	}
	defer r.Close()
	n, err := swallow(r)
	if err == nil && n != t.size {
		err = fmt.Errorf("read %d of %d bytes", n, t.size)
	}
	return err
}

// rate measures f and then, outside of the measured time, removes what f made.
func (t *transfer) rate(ctx context.Context, f func() error) func() (float64, error) {
	return func() (float64, error) {
		start := time.Now()
		err := f()
		took := time.Since(start)
		if err == nil {
			_, err = t.b.exec(ctx, t.id, "rm", "-rf", "/root/copy")
		}
		return float64(t.size) / mega / took.Seconds(), err
	}
}

// The files of one batch, as in a checkout.
const (
	smallFiles = 10_000
	smallSize  = 2 << 10 // bytes
	perDir     = 100
)

// manyFiles: 10,000 small files in one upload, against cp -r of them in the sandbox.
func manyFiles(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		if err := b.manyFilesOn(ctx, rt); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) manyFilesOn(ctx context.Context, rt string) (err error) {
	sb, err := b.create(ctx, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(ctx, sb.ID)) }()
	upload := func(dir string) error {
		batch := make([]client.Upload, smallFiles)
		for i := range batch {
			from := (i * smallSize) % (len(noise) - smallSize)
			batch[i] = client.Upload{
				Path: fmt.Sprintf("%s/d%02d/f%02d", dir, i/perDir, i%perDir), Mode: 644, Size: smallSize,
				Open: func() (io.ReadCloser, error) {
					return io.NopCloser(bytes.NewReader(noise[from : from+smallSize])), nil
				},
			}
		}
		return b.cl.Files(sb.ID).Put(ctx, batch)
	}
	if err := upload("/root/source"); err != nil {
		return err
	}
	rate := func(f func() error) func() (float64, error) {
		return func() (float64, error) {
			start := time.Now()
			err := f()
			took := time.Since(start)
			if err == nil {
				_, err = b.exec(ctx, sb.ID, "rm", "-rf", "/root/copy")
			}
			return smallFiles / took.Seconds(), err
		}
	}
	puts, cps, err := turns(b.times(5, 2), 1, rate(func() error { return upload("/root/copy") }), rate(func() error {
		_, err := b.exec(ctx, sb.ID, "cp", "-r", "--reflink=never", "/root/source", "/root/copy")
		return err
	}))
	if err != nil {
		return err
	}
	b.add(row("upload_10000_files", rt, "files/s", puts, "cp -r --reflink=never of them inside the sandbox", cps, goal{minRatio: 0.5}))
	peak, err := b.agentPeak(ctx, sb.ID, func() error { return upload("/root/copy") })
	if err != nil {
		return err
	}
	b.add(row("upload_10000_files_agent_memory", rt, "MiB", []float64{peak}, "", nil, goal{maxP50: 32}))
	return nil
}
