// Package image turns recipes into images and names into images.
//
// An image is a record: a name and a tag, the layers below it, and what a
// sandbox takes over from it (environment, directory, user). Layers are kept by
// another, the storage of package snapshot; records by a third, the database;
// both are interfaces here.
//
// What surprises: Build writes no file of the image. mmdebstrap's tar flows
// through a pipe straight into the layer store, and its digest is the layer's
// name. So a build is repeatable exactly if mmdebstrap's output is, and all that
// would make it differ is removed inside, before the tar is made.
package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Layers keeps unpacked layers by the digest of their tar. (snapshot)
type Layers interface {
	ImportLayer(ctx context.Context, r io.Reader, progress func(int64)) (digest string, bytes int64, err error)
	RemoveLayer(ctx context.Context, digest string) error
	ListLayers(ctx context.Context) ([]string, error)
}

// DB keeps image records by name and tag. Put replaces; deleting what is
// absent is fine. (store)
type DB interface {
	PutImage(ctx context.Context, i record.Image) error
	GetImage(ctx context.Context, name, tag string) (record.Image, bool, error)
	ListImages(ctx context.Context) ([]record.Image, error)
	DeleteImage(ctx context.Context, name, tag string) error
}

// Config says where things are.
type Config struct {
	Layers     Layers
	DB         DB
	RecipesDir string // <RecipesDir>/<name>/recipe.toml
	// TempDir holds the root file systems under construction, a few hundred MB
	// each. It is the Store's alone: Open empties it.
	TempDir string
	// InUse reports whether a sandbox stands on a layer.
	InUse func(layer string) bool
}

// Store makes, finds and removes images.
type Store struct {
	cfg Config
	// One build at a time: each fills a disk and a core.
	build chan struct{}
	// Held for reading from before a layer exists until an image names it, so
	// that no sweep takes it in between.
	naming sync.RWMutex
}

// Open returns a Store, and removes what a killed build left.
func Open(cfg Config) (*Store, error) {
	if err := os.RemoveAll(cfg.TempDir); err != nil {
		return nil, fmt.Errorf("remove leftovers of image builds: %w", err)
	}
	if err := os.MkdirAll(cfg.TempDir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory of image builds: %w", err)
	}
	return &Store{cfg: cfg, build: make(chan struct{}, 1)}, nil
}

// DefaultTag is what a reference without a tag means.
const DefaultTag = "latest"

// Reference is a parsed image URI.
type Reference struct {
	Name   string
	Tag    string // empty if the URI had none
	Digest string // of the image, or empty
}

// The grammar of github.com/distribution/reference, in short: an optional host
// with a port, components of lower-case letters and digits with single
// separators, a tag, a digest.
var (
	nameForm   = regexp.MustCompile(`^[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*$`)
	tagForm    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// ParseReference parses name[:tag][@sha256:…]. It fails with errs.Invalid.
func ParseReference(uri string) (Reference, error) {
	var r Reference
	bad := func(what string) (Reference, error) {
		return Reference{}, errs.New(errs.Invalid, "image %.200q: %s; want name[:tag][@sha256:<64 hex digits>], lower case", uri, what)
	}
	rest, digest, pinned := strings.Cut(uri, "@")
	if pinned && !digestForm.MatchString(digest) {
		return bad("the digest is not one")
	}
	r.Name, r.Digest = rest, digest
	if i := strings.LastIndexByte(rest, ':'); i > strings.LastIndexByte(rest, '/') {
		r.Name, r.Tag = rest[:i], rest[i+1:]
		if !tagForm.MatchString(r.Tag) {
			return bad("the tag is not one")
		}
	}
	if len(r.Name) > 255 || !nameForm.MatchString(r.Name) {
		return bad("the name is not one")
	}
	return r, nil
}

// Resolve finds the image a URI names. With a digest and no tag, every tag of
// the name is looked at. It fails with errs.Invalid if uri is no reference and
// with errs.NotFound if this host has no such image.
func (s *Store) Resolve(ctx context.Context, uri string) (record.Image, error) {
	ref, err := ParseReference(uri)
	if err != nil {
		return record.Image{}, err
	}
	if ref.Digest != "" && ref.Tag == "" {
		return s.byDigest(ctx, ref)
	}
	tag := ref.Tag
	if tag == "" {
		tag = DefaultTag
	}
	i, ok, err := s.cfg.DB.GetImage(ctx, ref.Name, tag)
	switch {
	case err != nil:
		return record.Image{}, fmt.Errorf("resolve image %s: %w", uri, err)
	case !ok:
		return record.Image{}, errs.New(errs.NotFound, "image %s is not on this host; `sandboxctl image ls` shows what is, `sandboxctl image build` makes more", uri)
	case ref.Digest != "" && ref.Digest != i.Digest:
		return record.Image{}, errs.New(errs.NotFound, "image %s:%s on this host has the digest %s, not %s; `sandboxctl image ls` shows what is here", ref.Name, tag, i.Digest, ref.Digest)
	}
	return i, nil
}

func (s *Store) byDigest(ctx context.Context, ref Reference) (record.Image, error) {
	all, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return record.Image{}, fmt.Errorf("resolve image %s: %w", ref.Name, err)
	}
	for _, i := range all {
		if i.Name == ref.Name && i.Digest == ref.Digest {
			return i, nil
		}
	}
	return record.Image{}, errs.New(errs.NotFound, "no image %s on this host has the digest %s; `sandboxctl image ls` shows what is here", ref.Name, ref.Digest)
}

// List returns the images of this host.
func (s *Store) List(ctx context.Context) ([]record.Image, error) {
	all, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return all, nil
}

// Remove forgets the image a URI names, and removes those of its layers that
// no other image has. It fails with errs.WrongState, and removes nothing, while
// a sandbox stands on one of those; with errs.NotFound if there is no such image.
func (s *Store) Remove(ctx context.Context, uri string) error {
	i, err := s.Resolve(ctx, uri)
	if err != nil {
		return err
	}
	s.naming.Lock()
	defer s.naming.Unlock()
	all, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return fmt.Errorf("remove image %s: %w", uri, err)
	}
	shared := named(slices.DeleteFunc(all, func(o record.Image) bool { return o.Name == i.Name && o.Tag == i.Tag }))
	for _, l := range i.Layers {
		if !shared[l] && s.cfg.InUse(l) {
			return errs.New(errs.WrongState, "image %s is in use by a sandbox; `sandboxctl ps -a` shows which, delete those first", i.Ref())
		}
	}
	if err := s.cfg.DB.DeleteImage(ctx, i.Name, i.Tag); err != nil {
		return fmt.Errorf("remove image %s: %w", uri, err)
	}
	for _, l := range i.Layers {
		if !shared[l] {
			err = errors.Join(err, s.cfg.Layers.RemoveLayer(ctx, l))
		}
	}
	if err != nil {
		return fmt.Errorf("remove image %s: %w; the next sweep tries again", uri, err)
	}
	return nil
}

// Sweep removes layers that neither an image nor a sandbox needs, as a rebuilt
// image leaves them. While an image is being built it does nothing.
func (s *Store) Sweep(ctx context.Context) error {
	if !s.naming.TryLock() {
		return nil
	}
	defer s.naming.Unlock()
	layers, err := s.cfg.Layers.ListLayers(ctx)
	if err != nil {
		return fmt.Errorf("sweep layers: %w", err)
	}
	all, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return fmt.Errorf("sweep layers: %w", err)
	}
	needed := named(all)
	for _, l := range layers {
		if !needed[l] && !s.cfg.InUse(l) {
			err = errors.Join(err, s.cfg.Layers.RemoveLayer(ctx, l))
		}
	}
	if err != nil {
		return fmt.Errorf("sweep layers: %w", err)
	}
	return nil
}

// named is the set of layers that images name.
func named(images []record.Image) map[string]bool {
	set := map[string]bool{}
	for _, i := range images {
		for _, l := range i.Layers {
			set[l] = true
		}
	}
	return set
}

// digestOf is the digest of an image: of its layers and config, so that equal
// images have equal digests, whenever and under whatever name they were made.
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
