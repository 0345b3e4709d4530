package archive

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Plan says what an archive holds. A child that read hostile bytes made it: the daemon
// checks spans against the file, and digests against the bytes.
type Plan struct {
	Layers []Layer            `json:"layers"` // lowest first; none: an image without files
	Config record.ImageConfig `json:"config"`
	Tags   []string           `json:"tags"` // the names in the archive; often none
	// Unused are the fields of the config that a sandbox does not take over: see record.Image.
	Unused map[string]json.RawMessage `json:"unused,omitempty"`
}

// Layer is one layer of an archive.
type Layer struct {
	Span
	DiffID string `json:"diffID"`           // of the layer, uncompressed
	Digest string `json:"digest,omitempty"` // of the span, if a manifest has it
	Packed bool   `json:"packed"`           // compressed
}

// MaxLayers is how many layers overlayfs stacks in one mount on every kernel from 6.1,
// and docker's own limit.
const MaxLayers = 127

// planOf reads an archive of size bytes. args may hold the one format that is accepted.
func planOf(f io.ReaderAt, size int64, args []string) (Plan, error) {
	m, err := scan(f, size)
	if err != nil {
		return Plan{}, err
	}
	want := ""
	if len(args) > 0 {
		want = args[0]
	}
	var p Plan
	var config []byte
	switch {
	case want != "oci" && m.has("manifest.json"):
		p, config, err = m.dockerPlan()
	case want != "docker" && m.has("index.json"):
		p, config, err = m.ociPlan()
	default:
		hint := "if it is a root file system, use --format rootfs"
		if m.has("repositories") {
			hint = "it is of a docker before 1.10: load it into a newer one, and save it again"
		}
		return p, errs.New(errs.Invalid, "the image archive has neither a manifest.json (`docker save`) nor an index.json (OCI layout); %s",
			hint)
	}
	if err != nil {
		return p, err
	}
	return p, m.finish(&p, config)
}

// dockerPlan reads manifest.json of `docker save`.
func (m *members) dockerPlan() (p Plan, config []byte, err error) {
	b, err := m.read("manifest.json")
	if err != nil {
		return p, nil, err
	}
	var all tarball.Manifest
	if err := json.Unmarshal(b, &all); err != nil {
		return p, nil, errs.Wrap(err, errs.Invalid, "manifest.json of the archive cannot be read")
	}
	if len(all) > maxListed {
		return p, nil, errs.New(errs.Invalid, "manifest.json of the archive lists %d images; at most %d are read", len(all), maxListed)
	}
	var images tarball.Manifest
	for i, d := range all { // some programs repeat an image for each of its names
		if i > 0 && d.Config == images[0].Config && slices.Equal(d.Layers, images[0].Layers) {
			images[0].RepoTags = append(images[0].RepoTags, d.RepoTags...)
		} else {
			images = append(images, d)
		}
	}
	if len(images) != 1 {
		var names []string
		for _, d := range images[:min(len(images), 5)] {
			names = append(names, strings.Join(d.RepoTags, "="))
		}
		return p, nil, severalImages(len(images), names)
	}
	p.Tags = images[0].RepoTags
	if config, err = m.read(images[0].Config); err != nil {
		return p, nil, err
	}
	for _, name := range images[0].Layers {
		s, err := m.find(name)
		if err != nil {
			return p, nil, err
		}
		p.Layers = append(p.Layers, Layer{Span: s})
	}
	return p, config, nil
}

func severalImages(n int, names []string) error {
	return errs.New(errs.Invalid, "the archive holds %d images (%s): save them one at a time", n, clip(names))
}

// clip quotes what an archive says, shortened: a child that says more is not heard.
func clip(list []string) string { return fmt.Sprintf("%.300s", fmt.Sprintf("%.100q", list)) }

// ociPlan reads index.json of an OCI image layout.
func (m *members) ociPlan() (p Plan, config []byte, err error) {
	b, err := m.read("index.json")
	if err != nil {
		return p, nil, err
	}
	image, err := m.choose(b)
	if err != nil {
		return p, nil, err
	}
	if b, err = m.blob(image.desc); err != nil {
		return p, nil, err
	}
	manifest, err := v1.ParseManifest(bytes.NewReader(b))
	if err != nil {
		return p, nil, errs.Wrap(err, errs.Invalid, "the manifest of the image cannot be read")
	}
	for _, name := range image.names { // some programs write only a tag there, which is no name
		if strings.ContainsAny(name, ":/") {
			p.Tags = append(p.Tags, name)
		}
	}
	if config, err = m.blob(manifest.Config); err != nil {
		return p, nil, err
	}
	for _, l := range manifest.Layers {
		s, err := m.find(blobName(l.Digest))
		if err != nil {
			return p, nil, err
		}
		p.Layers = append(p.Layers, Layer{Span: s, Digest: l.Digest.String()})
	}
	return p, config, nil
}

func blobName(h v1.Hash) string { return path.Join("blobs", h.Algorithm, h.Hex) }

// blob returns the document with a digest.
func (m *members) blob(d v1.Descriptor) ([]byte, error) {
	b, err := m.read(blobName(d.Digest))
	if err != nil {
		return nil, err
	}
	if got, _, err := v1.SHA256(bytes.NewReader(b)); err != nil || got != d.Digest {
		return nil, errs.New(errs.Invalid, "blob %s of the archive has the digest %s: it was changed or is damaged", d.Digest, got)
	}
	return b, nil
}

// finish reads the config and gives each layer its diffID.
func (m *members) finish(p *Plan, config []byte) error {
	c, err := configOf(config)
	if err != nil {
		return err
	}
	if n := len(c.DiffIDs); n != len(p.Layers) || n > MaxLayers {
		return layerCount(n, len(p.Layers))
	}
	for i := range p.Layers {
		l := &p.Layers[i]
		l.DiffID = c.DiffIDs[i]
		var magic [4]byte
		if l.Size >= int64(len(magic)) {
			if _, err := m.f.ReadAt(magic[:], l.At); err != nil {
				return fmt.Errorf("read layer %d: %w", i, err)
			}
		}
		l.Packed = Packed(magic[:])
	}
	p.Layers = once(p.Layers)
	if len(p.Tags) > 100 {
		p.Tags = p.Tags[:100]
	}
	p.Config, p.Unused = c.Config, c.Unused
	return nil
}

// once removes equal layers except the topmost: that one adds and hides again whatever
// a lower one does, and overlayfs refuses one directory twice.
func once(layers []Layer) (left []Layer) {
	for i, l := range layers {
		again := false
		for _, above := range layers[i+1:] {
			again = again || above.DiffID == l.DiffID
		}
		if !again {
			left = append(left, l)
		}
	}
	return left
}
