package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Remove deletes the image of a reference, and those of its layers that no other image
// has, and returns what it removed. It fails with errs.WrongState, and removes nothing,
// while a sandbox uses one of those layers; with errs.NotFound if there is no such image.
// If its record cannot be read, Remove deletes the record only.
func (s *Store) Remove(ctx context.Context, ref Reference) (p Pruned, err error) {
	s.naming.Lock()
	defer s.naming.Unlock()
	i, err := s.local(ctx, ref) // removing by an alias must not remove its image
	if errs.Is(err, errs.Internal) {
		return s.removeUnreadable(ctx, ref, err)
	}
	if err != nil {
		return p, err
	}
	all, bad, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return p, fmt.Errorf("remove image %s: %w", ref.URI, err)
	}
	own := s.own(i, all)
	users, err := s.forget(ctx, i, own)
	if err != nil {
		return p, fmt.Errorf("remove image %s: %w", ref.URI, err)
	}
	if len(users) > 0 {
		return p, errs.New(errs.WrongState, "image %s is in use by %s; remove these first (`sandboxctl rm`, `sandboxctl snapshot rm`)",
			i.Ref(), some(users))
	}
	p.Images = []string{i.Ref()}
	if len(bad) == 0 { // else the sweep does, when all records can be read again
		err = s.removeLayers(ctx, own, &p)
	}
	if err != nil {
		return p, fmt.Errorf("remove image %s: %w; the next sweep tries again", ref.URI, err)
	}
	return p, nil
}

// removeLayers removes layers and adds them to p; absent is fine: an image may have a layer
// twice. It goes on after an error.
func (s *Store) removeLayers(ctx context.Context, layers []string, p *Pruned) (err error) {
	for _, l := range layers {
		n, serr := s.cfg.Layers.Size(ctx, l)
		if errs.Is(serr, errs.NotFound) {
			continue
		}
		rerr := s.cfg.Layers.Remove(ctx, l)
		if rerr == nil {
			p.Layers, p.Bytes = append(p.Layers, l), p.Bytes+n
		}
		err = errors.Join(err, serr, rerr)
	}
	return err
}

// removeUnreadable removes a record that cannot be read; why is the reason. Its layers
// are not known; the sweep finds them.
func (s *Store) removeUnreadable(ctx context.Context, ref Reference, why error) (p Pruned, err error) {
	_, bad, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return p, fmt.Errorf("remove image %s: %w", ref.URI, err)
	}
	i := record.Image{Name: ref.Name, Tag: cmp.Or(ref.Tag, DefaultTag)}
	if !slices.Contains(bad, i.Ref()) {
		return p, why
	}
	if err := s.cfg.DB.DeleteImage(ctx, i.Name, i.Tag); err != nil {
		return p, fmt.Errorf("remove image %s: %w", ref.URI, err)
	}
	p.Images = []string{i.Ref()}
	return p, nil
}

// Pruned is what a prune, or the removal of one image, removed.
type Pruned struct {
	Images []string // name:tag
	Layers []string // digests
	Bytes  int64    // of files in the layers, and of the remains of unfinished pulls
}

// Prune removes layers that neither an image nor a sandbox needs and the remains of
// unfinished pulls. With all it also removes every image that no sandbox uses. If before is
// not zero, images that were made here later and unfinished pulls stay. It fails with
// errs.WrongState while the record of an image cannot be read: that image may need any
// layer.
func (s *Store) Prune(ctx context.Context, all bool, before time.Time) (Pruned, error) {
	p, err := s.prune(ctx, all, before)
	if !before.IsZero() {
		return p, err
	}
	n, berr := s.blobs.sweep(0, 0)
	p.Bytes += n
	return p, errors.Join(err, berr)
}

func (s *Store) prune(ctx context.Context, all bool, before time.Time) (p Pruned, err error) {
	s.naming.Lock()
	defer s.naming.Unlock()
	images, bad, err := s.cfg.DB.ListImages(ctx)
	if err != nil {
		return p, fmt.Errorf("prune images: %w", err)
	}
	if len(bad) > 0 {
		return p, errs.New(errs.WrongState, "nothing was pruned: the record of image %s cannot be read, so it may need any layer; remove "+
			"it (`sandboxctl image rm`), and build or import it again", some(bad))
	}
	if all {
		for _, i := range images {
			if !before.IsZero() && !i.Created.Before(before) {
				continue
			}
			users, err := s.forget(ctx, i, i.Layers)
			if err != nil {
				return p, fmt.Errorf("prune images: %w", err)
			}
			if len(users) == 0 {
				p.Images = append(p.Images, i.Ref())
			}
		}
		images = slices.DeleteFunc(images, func(i record.Image) bool { return slices.Contains(p.Images, i.Ref()) })
	}
	layers, err := s.cfg.Layers.List(ctx)
	if err != nil {
		return p, fmt.Errorf("prune images: %w", err)
	}
	needed := named(images)
	layers = slices.DeleteFunc(layers, func(l string) bool { return needed[l] || len(s.cfg.Users(l)) > 0 })
	if err := s.removeLayers(ctx, layers, &p); err != nil {
		return p, fmt.Errorf("prune images: %w", err)
	}
	return p, nil
}

// Sweep removes layers that neither an image nor a sandbox needs, for example after a
// rebuild, and remains of unfinished pulls that are too old or too large. Layers of
// builds, imports and pulls in progress have no names yet, so it does not see them.
func (s *Store) Sweep(ctx context.Context) error {
	_, err := s.prune(ctx, false, time.Time{})
	if errs.Is(err, errs.WrongState) {
		err = nil // the store has logged it
	}
	_, berr := s.blobs.sweep(blobsFor, blobsMax)
	return errors.Join(err, berr)
}

// forget removes the record of i, unless a sandbox uses one of layers. A caller that
// has just looked the image up may use it a moment later. So forget removes the record
// first, checks again, and puts the record back if there is a user now: without the
// record no new sandbox can use the image.
func (s *Store) forget(ctx context.Context, i record.Image, layers []string) (users []string, err error) {
	if users = s.users(layers); len(users) > 0 {
		return users, nil
	}
	if err := s.cfg.DB.DeleteImage(ctx, i.Name, i.Tag); err != nil {
		return nil, err
	}
	if users = s.users(layers); len(users) > 0 {
		return users, s.cfg.DB.PutImage(context.WithoutCancel(ctx), i, true)
	}
	return nil, nil
}

// users names the sandboxes that use layers.
func (s *Store) users(layers []string) (users []string) {
	for _, l := range layers {
		for _, u := range s.cfg.Users(l) {
			if !slices.Contains(users, u) {
				users = append(users, u)
			}
		}
	}
	return users
}

// own are the layers that only i has.
func (s *Store) own(i record.Image, all []record.Image) []string {
	others := slices.DeleteFunc(slices.Clone(all), func(o record.Image) bool { return o.Ref() == i.Ref() })
	shared := named(others)
	return slices.DeleteFunc(slices.Clone(i.Layers), func(l string) bool { return shared[l] })
}

// named is the set of all layers that images name.
func named(images []record.Image) map[string]bool {
	set := map[string]bool{}
	for _, i := range images {
		for _, l := range i.Layers {
			set[l] = true
		}
	}
	return set
}

// some names a few of many.
func some(names []string) string {
	const few = 5
	if n := len(names); n > few {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), n-few)
	}
	return strings.Join(names, ", ")
}
