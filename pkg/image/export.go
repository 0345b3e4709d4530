package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// exports is how many exports may run at once: each holds the names of a directory in
// memory for as long as its client reads.
const exports = 4

// Export writes an image as `docker save` does: `docker load`, `podman load` and Import
// read it. Layers are made into tars anew. So a layer that came from another program's
// archive, or from a registry, gets another digest than the one it was imported with. A
// layer that was built here, or that Import took from an export, keeps its digest (see
// ownDigest). Each layer is read twice, because its size and digest come first. Export
// fails with errs.Unavailable while too many others run.
func (s *Store) Export(ctx context.Context, i record.Image, w io.Writer) error {
	select {
	case s.exporting <- struct{}{}:
		defer func() { <-s.exporting }()
	default:
		return errs.New(errs.Unavailable, "%d images are being exported, the maximum at a time; try again later", exports)
	}
	if err := s.export(ctx, i, w); err != nil {
		return fmt.Errorf("export image %s: %w", i.Ref(), err)
	}
	return nil
}

func (s *Store) export(ctx context.Context, i record.Image, w io.Writer) error {
	tw := tar.NewWriter(w)
	put := func(name string, b []byte) error {
		if err := tw.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: name, Mode: 0o444, Size: int64(len(b)),
			ModTime: time.Unix(0, 0),
		}); err != nil {
			return err
		}
		_, err := tw.Write(b)
		return err
	}
	config := v1.ConfigFile{
		Architecture: runtime.GOARCH, OS: "linux", Created: v1.Time{Time: i.Created},
		Config: v1.Config{
			Env: i.Config.Env, WorkingDir: i.Config.Workdir, User: i.Config.User, Labels: i.Config.Labels,
			Entrypoint: i.Config.Entrypoint, Cmd: i.Config.Cmd,
		},
		RootFS: v1.RootFS{Type: "layers"},
	}
	manifest := tarball.Descriptor{RepoTags: []string{i.Ref()}}
	for _, l := range i.Layers {
		sum, err := s.putLayer(ctx, tw, l)
		if err != nil {
			return err
		}
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, sum)
		config.History = append(config.History, v1.History{Created: v1.Time{Time: i.Created}, CreatedBy: "sandboxd"})
		manifest.Layers = append(manifest.Layers, sum.Hex+".tar")
	}
	b, err := json.Marshal(config)
	if err != nil {
		return err
	}
	sum, _, err := v1.SHA256(bytes.NewReader(b))
	if err != nil {
		return err
	}
	manifest.Config = sum.Hex + ".json"
	if err := put(manifest.Config, b); err != nil {
		return err
	}
	if b, err = json.Marshal(tarball.Manifest{manifest}); err != nil {
		return err
	}
	if err := put("manifest.json", b); err != nil {
		return err
	}
	return tw.Close()
}

// putLayer adds the tar of a layer, named by its digest.
func (s *Store) putLayer(ctx context.Context, tw *tar.Writer, layer string) (v1.Hash, error) {
	h := sha256.New()
	size := &counted{}
	if err := s.cfg.Layers.Read(ctx, layer, io.MultiWriter(h, size)); err != nil {
		return v1.Hash{}, err
	}
	sum := v1.Hash{Algorithm: strings.TrimSuffix(digestPrefix, ":"), Hex: hex.EncodeToString(h.Sum(nil))}
	if err := tw.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: sum.Hex + ".tar", Mode: 0o444, Size: size.n,
		ModTime: time.Unix(0, 0),
	}); err != nil {
		return v1.Hash{}, err
	}
	return sum, s.cfg.Layers.Read(ctx, layer, tw)
}

const digestPrefix = "sha256:"

type counted struct{ n int64 }

func (c *counted) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}
