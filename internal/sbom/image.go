package sbom

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
)

// Image is what the files of an image say of what is in it.
type Image struct {
	Name     string    `json:"name"`
	OS       OS        `json:"os"`
	Packages []Package `json:"packages"` // by type, name, version and file
	Layers   []string  `json:"layers"`   // their digests, the lowest first
	Notes    []string  `json:"notes"`    // what could not be read, by file
}

// maxNotes is how many notes an image may have.
const maxNotes = 1000

// readImage reads the archive of an image. name is for an image whose archive has none.
func readImage(f io.ReaderAt, size int64, name string) (Image, error) {
	plan, err := archive.Read(f, size)
	if err != nil {
		return Image{}, err
	}
	all := newFiles()
	i := Image{Name: name}
	if len(plan.Tags) > 0 {
		i.Name = cmp.Or(clean(plan.Tags[0]), name)
	}
	for n, l := range plan.Layers {
		if err := addLayer(&all, f, l); err != nil {
			return Image{}, errs.Wrap(err, errs.CodeOf(err), "layer %d of %d", n+1, len(plan.Layers))
		}
		if l.DiffID != "" {
			i.Layers = append(i.Layers, l.DiffID)
		}
	}
	return i, all.gather(&i)
}

// addLayer adds one layer of an archive, and checks its digest.
func addLayer(all *files, f io.ReaderAt, l archive.Layer) error {
	sum := sha256.New()
	first := true
	err := all.add(func() io.ReadCloser {
		r := archive.Unpacked(f, l)
		if !first {
			return r
		}
		first = false
		return struct {
			io.Reader
			io.Closer
		}{io.TeeReader(r, sum), r}
	})
	if err != nil {
		return err
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); l.DiffID != "" && got != l.DiffID {
		return errs.New(errs.Invalid, "it has the digest %s, but the image's config says %.80s: the archive was changed or is damaged", got,
			l.DiffID)
	}
	return nil
}

// read reads a file of a kind. What is wrong with it is a note.
func read(k kind, name string, size int64, content io.Reader) (s said) {
	note := func(format string, args ...any) said {
		s.notes = append(s.notes, fmt.Sprintf(format, args...))
		return s
	}
	if size > limits[k] {
		return note("it has %d bytes, more than the %d that are read", size, limits[k])
	}
	b, err := io.ReadAll(io.LimitReader(content, size))
	if err != nil {
		return note("it cannot be read: %v", err)
	}
	var one Package
	why := ""
	switch k {
	case osRelease:
		var o OS
		if o, why = readOSRelease(b); why == "" {
			s.os = o
		}
	case dpkgStatus:
		s.packages, s.notes = readStatus(b)
	case copyright:
		s.licences = readCopyright(b)
	case metadata:
		one, why = readMetadata(b)
	case packageJSON:
		one, why = readPackageJSON(b)
	}
	switch {
	case why != "":
		return note("it is left out: %s", why)
	case one.Name != "":
		s.packages = []Package{one}
	}
	for i := range s.packages {
		s.packages[i].At = clean("/" + name)
	}
	return s
}

// gather puts together what the files say.
func (fs *files) gather(i *Image) error {
	weight := 0 // of licences, which packages share
	for _, name := range slices.Sorted(maps.Keys(fs.said)) {
		s := fs.said[name]
		if s.os.ID != "" && (i.OS.ID == "" || name == "etc/os-release") { // os-release(5): this one first
			i.OS = s.os
		}
		for _, note := range s.notes {
			if len(i.Notes) < maxNotes {
				i.Notes = append(i.Notes, clean("/"+name+": "+note))
			}
		}
		for _, p := range s.packages {
			if p.Type == deb {
				p.Licences = fs.licences(p.Name)
				if weight += size(p.Licences); weight > maxWeight {
					return errTooMuch
				}
			}
			i.Packages = append(i.Packages, p)
		}
	}
	slices.SortStableFunc(i.Packages, func(a, b Package) int {
		return cmp.Or(strings.Compare(a.Type, b.Type), strings.Compare(a.Name, b.Name), strings.Compare(a.Version, b.Version),
			strings.Compare(a.Arch, b.Arch), strings.Compare(a.At, b.At))
	})
	return nil
}

// licences are those of a Debian package. Its documents may be a link to those of another package
// of the same source (Debian policy §12.5).
func (fs *files) licences(name string) []string {
	const docs = "usr/share/doc"
	for range 4 {
		dir := path.Join(docs, name)
		s, ok := fs.said[dir]
		if !ok {
			s = fs.said[path.Join(dir, "copyright")]
		}
		if s.link == "" {
			return s.licences
		}
		to := path.Join(docs, s.link)
		if !ok {
			to = path.Dir(path.Join(dir, s.link))
		}
		if name = path.Base(to); path.Join(docs, name) != to {
			return nil // elsewhere
		}
	}
	return nil
}

// nameOf is the name of an image whose archive has none: that of the file.
func nameOf(file string) string {
	return clean(strings.TrimSuffix(filepath.Base(file), ".tar"))
}
