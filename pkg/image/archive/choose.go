package archive

import (
	"bytes"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// maxListed bounds how many images a manifest.json or an index may list. Each may cost a look at a
// document, and a comparison with all others.
const maxListed = 1000

// found is a manifest of an OCI layout, with the names that its index has for it.
type found struct {
	desc  v1.Descriptor
	names []string
}

// choose finds the one image of a layout. An index may list it once for each of its names, for
// each machine, or both. If it is not there for this machine, but for one other, that is taken:
// its config says so.
func (m *members) choose(index []byte) (found, error) {
	top, err := parseIndex(index)
	if err != nil {
		return found{}, err
	}
	var all []found
	chosen := map[v1.Hash]v1.Descriptor{}
	for _, d := range top {
		if d.MediaType.IsIndex() {
			names := namesIn(d)
			if d, err = m.best(d, chosen, 0); err != nil {
				return found{}, err
			}
			all = append(all, found{d, append(names, namesIn(d)...)})
		} else {
			all = append(all, found{d, namesIn(d)})
		}
	}
	all = m.merge(all)
	if len(all) > 1 && m.machines(all) {
		var descs []v1.Descriptor
		for _, f := range all {
			descs = append(descs, f.desc)
		}
		d, err := m.forHere(descs)
		return found{d, all[0].names}, err
	}
	switch len(all) {
	case 0:
		return found{}, errs.New(errs.Invalid, "the index of the archive lists no image")
	case 1:
		return all[0], nil
	}
	var names []string
	for _, f := range all[:min(len(all), 5)] {
		names = append(names, strings.Join(f.names, "="))
	}
	return found{}, severalImages(len(all), names)
}

// parseIndex returns the images and indexes that an index lists, and leaves out what is about an
// image: attestations of buildx ("unknown/unknown"), signatures.
func parseIndex(b []byte) (list []v1.Descriptor, err error) {
	im, err := v1.ParseIndexManifest(bytes.NewReader(b))
	if err != nil {
		return nil, errs.Wrap(err, errs.Invalid, "an index of the archive cannot be read")
	}
	if n := len(im.Manifests); n > maxListed {
		return nil, errs.New(errs.Invalid, "an index of the archive lists %d images; at most %d are read", n, maxListed)
	}
	for _, d := range im.Manifests {
		about := !isConfig(types.MediaType(d.ArtifactType)) || d.Annotations["vnd.docker.reference.type"] != "" ||
			d.Platform != nil && d.Platform.OS == "unknown"
		if !about && (d.MediaType.IsIndex() || d.MediaType.IsImage() || d.MediaType == types.MediaType("")) {
			list = append(list, d)
		}
	}
	return list, nil
}

func namesIn(d v1.Descriptor) (names []string) {
	for _, k := range []string{"io.containerd.image.name", "org.opencontainers.image.ref.name"} {
		if name := d.Annotations[k]; name != "" {
			names = append(names, name)
		}
	}
	return names
}

// best is the manifest for this machine in the index that d describes. chosen has those of the
// indexes before, so that none is read twice.
func (m *members) best(d v1.Descriptor, chosen map[v1.Hash]v1.Descriptor, depth int) (best v1.Descriptor, err error) {
	if best, ok := chosen[d.Digest]; ok {
		return best, nil
	}
	if depth > 3 {
		return best, errs.New(errs.Invalid, "indexes of the archive are nested too deeply")
	}
	b, err := m.blob(d)
	if err != nil {
		return best, err
	}
	list, err := parseIndex(b)
	if err != nil {
		return best, err
	}
	if len(list) == 0 {
		return best, errs.New(errs.Invalid, "an index of the archive lists no image")
	}
	if best, err = m.forHere(list); err == nil && best.MediaType.IsIndex() {
		best, err = m.best(best, chosen, depth+1)
	}
	chosen[d.Digest] = best // after an error, none is asked for again
	return best, err
}

// merge joins what is listed several times, and drops, among several, what has no config of an
// image: signatures, charts and the like.
func (m *members) merge(all []found) (left []found) {
	for _, f := range all {
		i := slices.IndexFunc(left, func(l found) bool { return l.desc.Digest == f.desc.Digest })
		if i < 0 {
			left = append(left, f)
			continue
		}
		for _, name := range f.names {
			if !slices.Contains(left[i].names, name) {
				left[i].names = append(left[i].names, name)
			}
		}
		if left[i].desc.Platform == nil {
			left[i].desc.Platform = f.desc.Platform
		}
	}
	if len(left) < 2 {
		return left
	}
	return slices.DeleteFunc(left, func(f found) bool {
		b, err := m.blob(f.desc)
		if err != nil {
			return false // that it is missing is said if it is chosen
		}
		manifest, err := v1.ParseManifest(bytes.NewReader(b))
		return err == nil && !isConfig(manifest.Config.MediaType)
	})
}

// isConfig reports whether a media type is that of the config of an image.
func isConfig(t types.MediaType) bool {
	return t == types.OCIConfigJSON || t == types.DockerConfigJSON || t == types.MediaType("")
}

// machines reports whether images are one for several machines: they have one name, or none, and
// say which machine each is for.
func (m *members) machines(all []found) bool {
	return !slices.ContainsFunc(all, func(f found) bool {
		return f.desc.Platform == nil || !slices.Equal(f.names, all[0].names)
	})
}

// forHere chooses among the manifests of one image for several machines: the first for this one
// without a variant, else the first for it, else the first that does not say, else the only one
// for another machine. It leaves out those that are not in the archive: `docker save` lists all
// machines of an image and has mostly one.
func (m *members) forHere(list []v1.Descriptor) (v1.Descriptor, error) {
	here := slices.DeleteFunc(slices.Clone(list), func(d v1.Descriptor) bool { return !m.has(blobName(d.Digest)) })
	if len(here) == 0 && len(list) > 0 {
		_, err := m.find(blobName(list[0].Digest))
		return v1.Descriptor{}, err
	}
	ranks := make([][]v1.Descriptor, 4)
	var others []string
	for _, d := range here {
		rank := rankOf(d.Platform)
		ranks[rank] = append(ranks[rank], d)
		if rank == 3 && len(others) < 20 {
			others = append(others, d.Platform.String())
		}
	}
	for rank, some := range ranks {
		if len(some) > 0 && (rank < 3 || len(some) == 1) {
			return some[0], nil
		}
	}
	return v1.Descriptor{}, errs.New(errs.Unsupported, "the image is for %s, and this host is linux/%s", clip(others), runtime.GOARCH)
}

// rankOf says how well a platform fits this host: 0 best, 3 not.
func rankOf(p *v1.Platform) int {
	switch {
	case p == nil || p.OS+p.Architecture == "":
		return 2
	case p.OS != "linux" || machine(p.Architecture) != runtime.GOARCH:
		return 3
	case p.Variant != "":
		return 1
	}
	return 0
}
