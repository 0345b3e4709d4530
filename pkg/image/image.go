// Package image turns recipes and archives into images, and names into images.
//
// An image is a record: a name and a tag, its layers, and the config that a sandbox
// takes over (environment, directory, user). Package snapshot stores the layers, the
// database stores the records; both are interfaces here.
//
//	recipe ─▶ mmdebstrap ─▶ tar ─┐
//	tar of a root file system ───┼─▶ staged layers ─▶ named layers ─▶ record
//	docker save, OCI layout ─────┤    no names yet     one short lock
//	registry ─▶ blobs ───────────┘
//
// What surprises: Build writes no file of the image. mmdebstrap's tar flows through a
// pipe straight into the layer store, and its digest is the layer's name. So a build is
// repeatable exactly if mmdebstrap's output is. Everything that would make the output
// differ is removed inside, before the tar is made.
package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Layers keeps unpacked layers by the digest of their tar. (snapshot/layer)
type Layers interface {
	// Stage unpacks a tar into a layer without a name. Commit gives it its name, Drop
	// removes it if it has none.
	Stage(ctx context.Context, r io.Reader, progress func(int64)) (stage, digest string, bytes int64, err error)
	Commit(ctx context.Context, stage, digest string) error
	Drop(stage string) error
	// Read writes a layer as a tar, the same each time. ReadStage does so for a layer
	// without a name.
	Read(ctx context.Context, digest string, w io.Writer) error
	ReadStage(ctx context.Context, stage string, w io.Writer) error
	// StageHas reports whether a layer without a name has a file of this name at its top.
	StageHas(stage, name string) (bool, error)
	// Size fails with errs.NotFound if the layer is not here.
	Size(ctx context.Context, digest string) (int64, error)
	Remove(ctx context.Context, digest string) error
	List(ctx context.Context) ([]string, error)
	// Room fails with errs.Exhausted if imports may take no more disk.
	Room() error
}

// DB keeps image records by name and tag. Put replaces; deleting an absent record is no
// error. An unreadable record is listed by its name:tag only, and errs.Internal to Get.
// (store)
type DB interface {
	// PutImage adds an image. Without replace it fails with errs.Denied, in the same
	// transaction, if i's name:tag is an image with another digest.
	PutImage(ctx context.Context, i record.Image, replace bool) error
	GetImage(ctx context.Context, name, tag string) (record.Image, bool, error)
	ListImages(ctx context.Context) (list []record.Image, unreadable []string, err error)
	DeleteImage(ctx context.Context, name, tag string) error
}

// Config says where things are.
type Config struct {
	Layers     Layers
	DB         DB
	RecipesDir string // <RecipesDir>/<name>/recipe.toml
	// TempDir holds the root file systems under construction, a few hundred MB each,
	// and archives while they are read. Only the Store uses it: Open empties it.
	TempDir string
	// Users names the users of a layer, for people.
	Users func(layer string) []string
	// Aliases are other names of images; the first that fits is used. (ParseAliases)
	Aliases []Alias
	// Pools are the images of the configuration's pools, as it names them.
	Pools []string
	// SameVersions refuses an alias of another version than the name says (Store.Note).
	SameVersions bool
	// Registries are asked for images that are not on this host; nil: there are none.
	Registries *registry.Client
	// BlobsDir holds downloads until their image is there. It is kept, so that a pull
	// goes on where it was cut off. Needed with Registries only.
	BlobsDir string
}

// Store makes, finds and removes images.
type Store struct {
	cfg Config
	// One build at a time: each fills a disk and a core.
	build     chan struct{}
	importing chan struct{}
	exporting chan struct{}
	// Held from before a layer has a name until an image names it, so that no sweep
	// removes the layer in between.
	naming sync.Mutex

	flights flights
	blobs   blobs
}

// Open returns a Store, and removes the remains of a killed build.
func Open(cfg Config) (*Store, error) {
	if err := os.RemoveAll(cfg.TempDir); err != nil {
		return nil, fmt.Errorf("remove leftovers of image builds: %w", err)
	}
	if err := os.MkdirAll(cfg.TempDir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory of image builds: %w", err)
	}
	if cfg.BlobsDir != "" {
		if err := os.MkdirAll(cfg.BlobsDir, 0o700); err != nil {
			return nil, fmt.Errorf("make directory of downloads: %w", err)
		}
	}
	return &Store{
		cfg: cfg, build: make(chan struct{}, 1), importing: make(chan struct{}, imports), exporting: make(chan struct{}, exports),
		flights: flights{m: map[flightKey]*flight{}},
		blobs:   blobs{dir: cfg.BlobsDir, room: cfg.Layers.Room, used: map[string]int{}},
	}, nil
}

// Resolve finds the image of a reference: the image with this name on this host or, if
// there is none, the one that the name is an alias of. With a digest and no tag, it
// searches every tag of the name. It fails with errs.NotFound if this host has no such
// image, or with Config.SameVersions only an alias of another version.
func (s *Store) Resolve(ctx context.Context, ref Reference) (record.Image, error) {
	i, err := s.local(ctx, ref)
	if !errs.Is(err, errs.NotFound) {
		return i, err
	}
	a, ok := s.alias(ref)
	if ref.Digest != "" || !ok {
		return i, err
	}
	i, ok, err = s.cfg.DB.GetImage(ctx, a.to.Name, a.to.Tag)
	switch {
	case err != nil:
		return record.Image{}, fmt.Errorf("resolve image %s, an alias of %s: %w", ref.URI, a.Image, err)
	case !ok:
		return record.Image{}, errs.New(errs.NotFound, "image %s is an alias of %s (images.aliases of the configuration), and neither "+
			"is on this host; create the second with `sandboxctl image build %s` or `sandboxctl image import`", ref.URI, a.Image, a.to.Name)
	case s.cfg.SameVersions && a.another(ref, i):
		return record.Image{}, errs.New(errs.NotFound, "image %s is not on this host; its alias %s (%s) is another version, which "+
			"images.other_versions of the configuration refuses; name %s itself, or import the image with `sandboxctl image import`",
			ref.URI, i.Ref(), versionsOf(i), i.Name)
	}
	return i, nil
}

// local is Resolve without aliases.
func (s *Store) local(ctx context.Context, ref Reference) (record.Image, error) {
	if ref.Digest != "" && ref.Tag == "" {
		return s.byDigest(ctx, ref)
	}
	tag := cmp.Or(ref.Tag, DefaultTag)
	i, ok, err := s.cfg.DB.GetImage(ctx, ref.Name, tag)
	switch {
	case err != nil:
		return record.Image{}, fmt.Errorf("resolve image %s: %w", ref.URI, err)
	case ref.Digest != "" && !(ok && known(i, ref.Digest)):
		if pulled, here, err := s.cfg.DB.GetImage(ctx, ref.Name, ref.kept()); err == nil && here && known(pulled, ref.Digest) {
			return pulled, nil
		} else if !ok {
			return record.Image{}, s.unknown(ref)
		}
		return record.Image{}, errs.New(errs.NotFound, "image %s:%s on this host has the digest %s, not %s; `sandboxctl image ls` lists "+
			"the images of this host", ref.Name, tag, i.Digest, ref.Digest)
	case !ok:
		return record.Image{}, s.unknown(ref)
	}
	return i, nil
}

// known reports whether a digest is one of an image: its own here, or one from the
// registry that it was pulled from.
func known(i record.Image, digest string) bool {
	return i.Digest == digest || slices.Contains(i.Sources, digest)
}

func (s *Store) byDigest(ctx context.Context, ref Reference) (record.Image, error) {
	all, _, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return record.Image{}, fmt.Errorf("resolve image %s: %w", ref.Name, err)
	}
	for _, i := range all {
		if i.Name == ref.Name && known(i, ref.Digest) {
			return i, nil
		}
	}
	return record.Image{}, errs.New(errs.NotFound, "no image %s on this host has the digest %s; `sandboxctl image ls` lists the images of "+
		"this host", ref.Name, ref.Digest)
}

// unknown is the error for an image that is not here and cannot be pulled.
func (s *Store) unknown(ref Reference) error {
	var names []string
	for _, a := range s.cfg.Aliases {
		names = append(names, a.Name)
	}
	slices.Sort(names)
	aliases := "images.aliases of the configuration has none"
	if len(names) > 0 {
		aliases = "images.aliases of the configuration has " + some(names)
	}
	tail := "no registry is configured for it ([[registries]] of the configuration); `sandboxctl image build` and `sandboxctl image " +
		"import` create images without a registry"
	if host := s.cfg.Registries.Host(ref.Name); host != "" {
		tail = fmt.Sprintf("`sandboxctl image pull %s` pulls it from registry %s", ref.URI, host)
	}
	return errs.New(errs.NotFound, "image %s is not on this host: there is no %s (`sandboxctl image ls`) and no alias for it (%s); %s",
		ref.URI, ref, aliases, tail)
}

// Commit makes an image of what a sandbox has written over the layers of base. It comes
// as the tar of a layer. The config is that of base. A name that is another image's, or
// kept for one, is taken as by Tag. If the reader fails or ctx is cancelled, nothing is left.
func (s *Store) Commit(ctx context.Context, base record.Image, as Reference, replace bool, r io.Reader) (record.Image, error) {
	im := &importer{s: s, ref: as, progress: func(Progress) {}}
	defer im.drop()
	i, err := im.commit(ctx, base, replace, r)
	if err != nil {
		return record.Image{}, fmt.Errorf("make image %s: %w", as.URI, err)
	}
	return i, nil
}

func (im *importer) commit(ctx context.Context, base record.Image, replace bool, r io.Reader) (record.Image, error) {
	i := record.Image{Name: im.ref.Name, Tag: im.ref.kept(), Config: base.Config}
	if im.ref.Digest != "" {
		return i, errs.New(errs.Invalid, "image %.200q: a digest is computed, not given; leave it out", im.ref.URI)
	}
	if n := len(base.Layers); n >= archive.MaxLayers {
		return i, errs.New(errs.Unsupported, "image %s has %d layers, and no image can have more than %d", base.Ref(), n, archive.MaxLayers)
	}
	select {
	case im.s.importing <- struct{}{}:
		defer func() { <-im.s.importing }()
	case <-ctx.Done():
		return i, ctx.Err()
	}
	for _, l := range base.Layers {
		if here, err := im.here(ctx, l); err != nil {
			return i, err
		} else if !here {
			return i, errs.New(errs.Internal, "layer %s of image %s is not on this host", l, base.Ref())
		}
	}
	if err := im.stage(ctx, r, "", nil); err != nil {
		return i, err
	}
	return im.s.name(ctx, i, im.layers, fromClient, replace)
}

// Tag gives an image a further name. If the name is that of another image, or kept for
// one, it is that of this one afterwards, if replace is set; else Tag fails with
// errs.Denied.
func (s *Store) Tag(ctx context.Context, ref, as Reference, replace bool) (record.Image, error) {
	if as.Digest != "" {
		return record.Image{}, errs.New(errs.Invalid, "image %.200q: a name cannot have a digest; leave it out", as.URI)
	}
	s.naming.Lock() // so that the image and its layers stay meanwhile
	defer s.naming.Unlock()
	i, err := s.Resolve(ctx, ref)
	if err != nil {
		return i, err
	}
	i.Name, i.Tag = as.Name, as.kept()
	if !replace {
		if err := s.other(ctx, i, fromClient); err != nil {
			return i, err
		}
	}
	return i, s.cfg.DB.PutImage(ctx, i, replace)
}

// List returns the images of this host that can be read.
func (s *Store) List(ctx context.Context) ([]record.Image, error) {
	all, _, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return all, nil
}

// digestOf is the digest of an image, made of its layers and config: equal images have
// equal digests, whenever and under whatever name they were made.
func digestOf(layers []string, c record.ImageConfig) (string, error) {
	b, err := json.Marshal(struct {
		Layers []string           `json:"layers"`
		Config record.ImageConfig `json:"config"`
	}{layers, c})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}
