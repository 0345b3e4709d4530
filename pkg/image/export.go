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
	"maps"
	"path"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// exports is how many exports may run at once: each holds the names of a directory in
// memory for as long as its client reads.
const exports = 4

// Export writes an image as `docker save` does since Docker 25: an OCI archive, which is the
// tar of an OCI image layout, with the manifest.json of older versions. `docker load`,
// `podman load`, `skopeo copy oci-archive:` and Import read it. Layers are made into tars
// anew. So a layer that came from another program's archive, or from a registry, gets another
// digest than the one it was imported with. A layer that was built here, or that Import took
// from an export, keeps its digest (see ownDigest). Each layer is read twice, because its size
// and digest come first. Export fails with errs.Unavailable while too many others run.
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
	write := func(name string, b []byte) error {
		if err := tw.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: name, Mode: 0o444, Size: int64(len(b)),
			ModTime: time.Unix(0, 0),
		}); err != nil {
			return err
		}
		_, err := tw.Write(b)
		return err
	}
	put := func(v any, kind types.MediaType) (d v1.Descriptor, err error) {
		b, err := json.Marshal(v)
		if err != nil {
			return d, err
		}
		d.MediaType = kind
		if d.Digest, d.Size, err = v1.SHA256(bytes.NewReader(b)); err != nil {
			return d, err
		}
		return d, write(blobName(d.Digest), b)
	}
	architecture, variant := i.Config.Machine()
	config := v1.ConfigFile{
		Architecture: architecture, Variant: variant, OS: "linux", Created: v1.Time{Time: i.Created},
		Config: v1.Config{
			Env: i.Config.Env, WorkingDir: i.Config.Workdir, User: i.Config.User, Labels: i.Config.Labels,
			Entrypoint: i.Config.Entrypoint, Cmd: i.Config.Cmd, StopSignal: i.Config.StopSignal,
		},
		RootFS: v1.RootFS{Type: "layers"},
	}
	docker := tarball.Descriptor{RepoTags: []string{i.Ref()}}
	manifest := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	for _, l := range i.Layers {
		d, err := s.putLayer(ctx, tw, l)
		if err != nil {
			return err
		}
		manifest.Layers = append(manifest.Layers, d)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, d.Digest)
		config.History = append(config.History, v1.History{Created: v1.Time{Time: i.Created}, CreatedBy: "sandboxd"})
		docker.Layers = append(docker.Layers, blobName(d.Digest))
	}
	whole, err := withUnused(config, i.Unused)
	if err != nil {
		return err
	}
	if manifest.Config, err = put(whole, types.OCIConfigJSON); err != nil {
		return err
	}
	docker.Config = blobName(manifest.Config.Digest)
	desc, err := put(manifest, types.OCIManifestSchema1)
	if err != nil {
		return err
	}
	desc.Annotations = map[string]string{"io.containerd.image.name": dockersName(i), "org.opencontainers.image.ref.name": i.Tag}
	for _, f := range []struct {
		name string
		v    any
	}{
		{"index.json", v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{desc}}},
		{"oci-layout", map[string]string{"imageLayoutVersion": "1.0.0"}},
		{"manifest.json", tarball.Manifest{docker}},
	} {
		b, err := json.Marshal(f.v)
		if err == nil {
			err = write(f.name, b)
		}
		if err != nil {
			return err
		}
	}
	return tw.Close()
}

// withUnused adds to a config the fields that are kept for exports only, as they came.
func withUnused(config v1.ConfigFile, unused map[string]json.RawMessage) (any, error) {
	if len(unused) == 0 {
		return config, nil
	}
	b, err := json.Marshal(config.Config)
	if err != nil {
		return nil, err
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(b, &fields); err != nil {
		return nil, err
	}
	maps.Copy(fields, unused)
	return struct {
		v1.ConfigFile
		Config map[string]json.RawMessage `json:"config"` // in place of the other one
	}{config, fields}, nil
}

func blobName(h v1.Hash) string { return path.Join("blobs", h.Algorithm, h.Hex) }

// dockersName is the whole name that docker gives an image: a name without a host is one of
// docker.io.
func dockersName(i record.Image) string {
	host, _, ok := strings.Cut(i.Name, "/")
	switch {
	case !ok:
		return "docker.io/library/" + i.Ref()
	case !strings.ContainsAny(host, ".:") && host != "localhost":
		return "docker.io/" + i.Ref()
	}
	return i.Ref()
}

// putLayer adds the tar of a layer, named by its digest.
func (s *Store) putLayer(ctx context.Context, tw *tar.Writer, layer string) (d v1.Descriptor, err error) {
	h := sha256.New()
	size := &counted{}
	if err := s.cfg.Layers.Read(ctx, layer, io.MultiWriter(h, size)); err != nil {
		return d, err
	}
	sum := v1.Hash{Algorithm: strings.TrimSuffix(digestPrefix, ":"), Hex: hex.EncodeToString(h.Sum(nil))}
	d = v1.Descriptor{MediaType: types.OCIUncompressedLayer, Digest: sum, Size: size.n}
	if err := tw.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: blobName(sum), Mode: 0o444, Size: size.n,
		ModTime: time.Unix(0, 0),
	}); err != nil {
		return d, err
	}
	return d, s.cfg.Layers.Read(ctx, layer, tw)
}

const digestPrefix = "sha256:"

type counted struct{ n int64 }

func (c *counted) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}
