package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// origin is who chose the content of an image that gets a name.
type origin int

const (
	fromClient   origin = iota // the sender of an archive, or of a request to commit or tag
	fromRecipe                 // the author of the recipe by that name
	fromRegistry               // the registry that is configured for the name
)

// other fails with record.NotReplaced if clients that say the name of i get another
// image now, by this name or by an alias, and with record.NotGiven if they get none, but
// the configuration or a recipe says where that image is to come from. A client that may
// not replace images would otherwise decide what all get later.
func (s *Store) other(ctx context.Context, i record.Image, from origin) error {
	is, here, err := s.cfg.DB.GetImage(ctx, i.Name, i.Tag)
	switch {
	case err != nil:
		return record.NotReplaced(i, "in a record that cannot be read")
	case here && is.Digest != i.Digest:
		return record.NotReplaced(i, "digest "+is.Digest)
	case here:
		return nil
	}
	ref := Reference{Name: i.Name, Tag: i.Tag}
	if a, ok := s.alias(ref); ok {
		is, here, err = s.cfg.DB.GetImage(ctx, a.to.Name, a.to.Tag)
		unused := err == nil && here && s.cfg.SameVersions && a.another(ref, is) // Resolve does not follow it
		switch {
		case unused:
		case err != nil || here && is.Digest != i.Digest:
			return record.NotReplaced(i, "as an alias of "+a.Image+", by images.aliases of the configuration")
		case here:
			return nil
		}
	}
	if from != fromClient {
		return nil
	}
	why, err := s.keptFor(ref)
	if err != nil {
		return fmt.Errorf("name image %s: %w", i.Ref(), err)
	}
	if why != "" {
		return record.NotGiven(i, why)
	}
	return nil
}

// keptFor says what an image that is not here is to be, if the configuration or a recipe
// says so; otherwise it is "".
func (s *Store) keptFor(ref Reference) (why string, err error) {
	if a, ok := s.alias(ref); ok {
		return "an alias of " + a.Image + ", by images.aliases of the configuration", nil
	}
	for _, a := range s.cfg.Aliases {
		if a.to.Name == ref.Name && a.to.Tag == ref.kept() {
			return "the image of the alias " + a.Name + ", by images.aliases of the configuration", nil
		}
	}
	if recipeForm.MatchString(ref.Name) && ref.kept() == DefaultTag {
		switch _, err := os.Stat(filepath.Join(s.cfg.RecipesDir, ref.Name, "recipe.toml")); {
		case err == nil:
			return "that of the recipe " + ref.Name + " (`sandboxctl image build " + ref.Name + "`)", nil
		case !errors.Is(err, fs.ErrNotExist):
			return "", fmt.Errorf("look for a recipe of that name: %w", err)
		}
	}
	for _, uri := range s.cfg.Pools {
		if p, err := ParseReference(uri); err == nil && p.Name == ref.Name && p.kept() == ref.kept() {
			return "that of a [[pool]] of the configuration", nil
		}
	}
	if host := s.cfg.Registries.Host(ref.Name); host != "" {
		return "pulled from the registry " + host + ", by [[registries]] of the configuration", nil
	}
	return "", nil
}

// name gives staged layers and then the image its names, the one in its record and those of
// also: from here on they are no garbage. Without replace, a name keeps the image that it has,
// or for which it is kept, and then no name is given.
func (s *Store) name(ctx context.Context, i record.Image, layers []staged, from origin, replace bool, also ...Reference,
) (_ record.Image, err error) {
	i.Created = time.Now().UTC()
	if i.Tag == "" {
		i.Tag = DefaultTag
	}
	for _, l := range layers {
		i.Layers = append(i.Layers, l.digest)
		i.Bytes += l.bytes
	}
	if i.Digest, err = digestOf(i.Layers, i.Config); err != nil {
		return i, err
	}
	named := []record.Image{i}
	for _, ref := range also {
		named = append(named, i)
		named[len(named)-1].Name, named[len(named)-1].Tag = ref.Name, ref.kept()
	}
	s.naming.Lock()
	defer s.naming.Unlock()
	for j := range named {
		if replace {
			break
		}
		n := &named[j]
		if err := s.other(ctx, *n, from); err != nil { // before its layers have names
			return i, err
		}
		if is, here, err := s.cfg.DB.GetImage(ctx, n.Name, n.Tag); err != nil {
			return i, err
		} else if here {
			n.Unused = is.Unused // which no digest covers, and exports have
		}
	}
	for _, l := range layers {
		if l.stage != "" {
			err = s.cfg.Layers.Commit(ctx, l.stage, l.digest)
		} else {
			_, err = s.cfg.Layers.Size(ctx, l.digest)
		}
		if errs.Is(err, errs.NotFound) {
			return i, errs.Wrap(err, errs.Unavailable, "layer %s was removed while the image that shares it was imported; import the "+
				"image again", l.digest)
		}
		if err != nil {
			return i, err
		}
	}
	for _, n := range named {
		if err := s.cfg.DB.PutImage(ctx, n, replace); err != nil {
			return i, err
		}
	}
	return named[0], nil
}

// namesOf are the names of an image in its archive that it can have here.
func namesOf(tags []string) (names []Reference) {
	for _, t := range tags {
		// docker writes alpine, podman and others the full name.
		if rest, ok := strings.CutPrefix(strings.TrimPrefix(t, "index."), "docker.io/"); ok {
			t = strings.TrimPrefix(rest, "library/")
		}
		ref, err := ParseReference(t)
		same := func(r Reference) bool { return r.Name == ref.Name && r.kept() == ref.kept() }
		if err == nil && ref.Digest == "" && !slices.ContainsFunc(names, same) {
			names = append(names, ref)
		}
	}
	return names
}
