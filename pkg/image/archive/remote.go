package archive

import (
	"bytes"
	"encoding/json"
	"runtime"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// MaxDocument bounds a manifest, an index and a config of a registry, in bytes. The
// distribution specification makes registries accept at least 4 MiB.
const MaxDocument = 4 << 20

// maxBlob bounds the size in a descriptor, so that sums of sizes do not overflow: 1
// TiB.
const maxBlob = 1 << 40

// A Blob is how a document of a registry describes another document, or a layer.
type Blob struct {
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
}

// Manifest is the content of a document of a registry, which is a manifest or an index.
type Manifest struct {
	// Next is the manifest for this machine, if the document is an index; then all else
	// is empty.
	Next   *Blob  `json:"next,omitempty"`
	Config Blob   `json:"config"`
	Layers []Blob `json:"layers"` // lowest first
}

// Config is the content of the config of an image.
type Config struct {
	DiffIDs []string                   `json:"diffIDs"` // lowest first
	Config  record.ImageConfig         `json:"config"`
	Unused  map[string]json.RawMessage `json:"unused,omitempty"` // see record.Image
}

// Plan joins the two. Where the layers lie, and whether they are compressed, is not
// known yet: of each Span only the size is set.
func (m Manifest) Plan(c Config) (Plan, error) {
	if n := len(c.DiffIDs); n != len(m.Layers) || n > MaxLayers {
		return Plan{}, layerCount(n, len(m.Layers))
	}
	p := Plan{Config: c.Config, Unused: c.Unused}
	for i, l := range m.Layers {
		p.Layers = append(p.Layers, Layer{Span: Span{Size: l.Size}, DiffID: c.DiffIDs[i], Digest: l.Digest})
	}
	p.Layers = once(p.Layers)
	return p, nil
}

func layerCount(config, manifest int) error {
	return errs.New(errs.Invalid, "the config of the image names %d layers and its manifest %d; want the same number, at most %d", config,
		manifest, MaxLayers)
}

// Packed reports whether a layer that begins with magic is compressed.
func Packed(magic []byte) bool {
	return bytes.HasPrefix(magic, gzipMagic) || bytes.HasPrefix(magic, zstdMagic)
}

// manifestOf reads a document of a registry. The content decides its kind; its
// media type is only a claim.
func manifestOf(b []byte) (Manifest, error) {
	var has struct {
		Manifests, Layers, Config, FSLayers json.RawMessage
	}
	if err := json.Unmarshal(b, &has); err != nil {
		return Manifest{}, errs.Wrap(err, errs.Invalid, "the manifest of the image is not JSON")
	}
	index, image := has.Manifests != nil, has.Layers != nil || has.Config != nil
	switch {
	case has.FSLayers != nil:
		return Manifest{}, errs.New(errs.Unsupported, "the manifest of the image has the old format schema 1, which names no config: push "+
			"the image again with a newer tool")
	case index && image: // each reader would choose another one (CVE-2021-41190)
		return Manifest{}, errs.New(errs.Invalid, "the manifest of the image is an index and a manifest at once")
	case index:
		return indexOf(b)
	case !image:
		return Manifest{}, errs.New(errs.Invalid, "the manifest of the image names neither layers nor manifests")
	}
	in, err := v1.ParseManifest(bytes.NewReader(b))
	if err != nil {
		return Manifest{}, errs.Wrap(err, errs.Invalid, "the manifest of the image cannot be read")
	}
	if n := len(in.Layers); n > MaxLayers || n == 0 && !isConfig(in.Config.MediaType) {
		return Manifest{}, errs.New(errs.Invalid, "the manifest of the image names %d layers; want 1 to %d (an artifact that is not an "+
			"image has none)", n, MaxLayers)
	}
	var m Manifest
	if m.Config, err = blobOf(in.Config); err != nil {
		return m, err
	}
	for i, l := range in.Layers {
		if l.MediaType != types.MediaType("") && (!l.MediaType.IsLayer() || !l.MediaType.IsDistributable()) {
			return m, errs.New(errs.Unsupported, "layer %d of the image has the media type %.100q; want a tar layer of docker or OCI, "+
				"plain or compressed with gzip or zstd", i+1, l.MediaType)
		}
		b, err := blobOf(l)
		if err != nil {
			return m, err
		}
		m.Layers = append(m.Layers, b)
	}
	return m, nil
}

// indexOf chooses the manifest of an index that runs here: the first without a variant,
// else the first.
func indexOf(b []byte) (Manifest, error) {
	in, err := v1.ParseIndexManifest(bytes.NewReader(b))
	if err != nil {
		return Manifest{}, errs.Wrap(err, errs.Invalid, "the index of the image cannot be read")
	}
	var best *v1.Descriptor
	var others []string
	for i := range in.Manifests {
		d := &in.Manifests[i]
		if !d.MediaType.IsIndex() && !d.MediaType.IsImage() && d.MediaType != types.MediaType("") {
			continue
		}
		if rankOf(d.Platform) == 3 {
			if len(others) < 20 && d.Platform.OS != "unknown" { // an attestation is
				others = append(others, d.Platform.String())
			}
			continue
		}
		plain := d.Platform == nil || d.Platform.Variant == ""
		if best == nil || plain && best.Platform != nil && best.Platform.Variant != "" {
			best = d
		}
	}
	if best == nil {
		return Manifest{}, errs.New(errs.Unsupported, "the image is for %s, and this host is linux/%s", clip(others), runtime.GOARCH)
	}
	next, err := blobOf(*best)
	return Manifest{Next: &next}, err
}

func blobOf(d v1.Descriptor) (Blob, error) {
	if d.Size < 0 || d.Size > maxBlob {
		return Blob{}, errs.New(errs.Invalid, "the manifest of the image says that %s has %d bytes", d.Digest, d.Size)
	}
	return Blob{Digest: d.Digest.String(), Size: d.Size}, nil
}
