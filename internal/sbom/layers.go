package sbom

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	imports "github.com/sandboxd/sandboxd/pkg/snapshot/layer"
)

// kind is what a file of an image says.
type kind int

const (
	nothing kind = iota
	osRelease
	dpkgStatus
	copyright
	metadata
	packageJSON
)

// limits are the most bytes that a file of a kind may have. The status of a Debian with all of its
// desktops has 6 MB.
var limits = map[kind]int64{
	osRelease: 64 << 10, dpkgStatus: 64 << 20, copyright: 4 << 20, metadata: 4 << 20, packageJSON: 4 << 20,
}

const statusFile = "var/lib/dpkg/status"

// Where an image without dpkg has a file for each package, beside which are files of sums.
const statusDir = "var/lib/dpkg/status.d/"

var (
	inDoc     = regexp.MustCompile(`^usr/share/doc/[^/]+/copyright$`)
	ofPython  = regexp.MustCompile(`(?:^|/)[^/]+(?:\.dist-info/METADATA|\.egg-info/PKG-INFO|\.egg-info)$`)
	ofNodeJS  = regexp.MustCompile(`(?:^|/)node_modules/(?:@[^/]+/)?[^/@.][^/]*/package\.json$`)
	docOfAny  = regexp.MustCompile(`^usr/share/doc/([^/]+)$`)
	plainName = regexp.MustCompile(`^[^/]+$`)
)

// kindOf is what the file of a name may say.
func kindOf(name string) kind {
	switch below, isStatus := strings.CutPrefix(name, statusDir); {
	case name == "etc/os-release", name == "usr/lib/os-release":
		return osRelease
	case name == statusFile, isStatus && plainName.MatchString(below) && !strings.HasSuffix(below, ".md5sums"):
		return dpkgStatus
	case inDoc.MatchString(name):
		return copyright
	case ofPython.MatchString(name):
		return metadata
	case ofNodeJS.MatchString(name):
		return packageJSON
	}
	return nothing
}

// said is what one file of an image says.
type said struct {
	packages []Package
	os       OS
	licences []string
	link     string // where a symbolic link leads, if it is of the documents of a package
	notes    []string
}

// weight is about how many bytes of memory it takes.
func (s said) weight() (n int) {
	for _, p := range s.packages {
		n += 200 + len(p.Name+p.Version+p.Supplier+p.At) + size(p.Licences)
	}
	return n + 200 + len(s.link) + size(s.licences) + size(s.notes)
}

func size(list []string) (n int) {
	for _, s := range list {
		n += 16 + len(s)
	}
	return n
}

// Bounds of an image; those of names and entries are the ones of pkg/snapshot/layer.
const (
	maxEntries = 2 << 20 // of a layer
	maxName    = 4096    // bytes
	maxDepth   = 256     // components
	maxFiles   = 200_000 // that say something
	maxWeight  = 64 << 20
	maxLinks   = 16 << 20 // bytes of the names of symbolic links of a layer

	maxReplaced = 1000 // directories of a layer

	maxFollowed = 1 << 30 // bytes of files of a layer, each counted for all hard links to it
	followCost  = 1 << 10 // bytes that a link counts beside those
)

// files are the files of an image that say something, as the layers so far leave them.
type files struct {
	said   map[string]said
	above  map[string]int // directories: how many files of said are below
	weight int
}

func newFiles() files { return files{said: map[string]said{}, above: map[string]int{}} }

func (fs *files) put(name string, s said) error {
	fs.drop(name)
	weight := fs.weight + s.weight()
	if weight > maxWeight || len(fs.said) >= maxFiles {
		return errTooMuch
	}
	fs.weight = weight
	for dir := range above(name) {
		fs.above[dir]++
	}
	fs.said[name] = s
	return nil
}

var errTooMuch = errs.New(errs.Invalid, "the image has more packages than a computer needs: more than %d files or %d MiB say which it has",
	maxFiles, maxWeight>>20)

func (fs *files) drop(name string) {
	s, ok := fs.said[name]
	if !ok {
		return
	}
	fs.weight -= s.weight()
	delete(fs.said, name)
	for dir := range above(name) {
		if fs.above[dir]--; fs.above[dir] == 0 {
			delete(fs.above, dir)
		}
	}
}

// has reports whether a file, or a file below a directory, says something.
func (fs *files) has(name string) bool {
	_, ok := fs.said[name]
	return ok || fs.above[name] > 0
}

// above yields the directories of a name, the nearest first, "." last.
func above(name string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for name != "." {
			if name = path.Dir(name); !yield(name) {
				return
			}
		}
	}
}

// layer is what one layer changes.
type layer struct {
	lower  *files // the layers below; not changed while the layer is read
	own    files
	gone   map[string]bool   // files and directories of the layers below that it hides
	opaque map[string]bool   // directories of which it hides all that is below
	linked map[string]bool   // its symbolic links: nothing is below one
	hard   map[string]string // hard links that may say something: to which file of the layer
	bytes  int               // of linked

	replaced int // directories of which it makes something else
}

// add reads a layer, which open begins to read, and puts it on top of the files.
func (fs *files) add(open func() io.ReadCloser) error {
	l := layer{
		lower: fs, own: newFiles(), gone: map[string]bool{}, opaque: map[string]bool{}, linked: map[string]bool{},
		hard: map[string]string{},
	}
	if err := eachEntry(open, l.entry); err != nil {
		return err
	}
	if err := l.follow(open); err != nil {
		return err
	}
	for name := range fs.said {
		hidden := l.gone[name]
		for dir := range above(name) {
			hidden = hidden || l.gone[dir] || l.opaque[dir]
		}
		if hidden {
			fs.drop(name)
		}
	}
	for name, s := range l.own.said {
		if err := fs.put(name, s); err != nil {
			return err
		}
	}
	return nil
}

// eachEntry calls do with the entries of a tar that an import does not ignore, by clean names.
func eachEntry(open func() io.ReadCloser, do func(name string, h *tar.Header, content io.Reader) error) error {
	r := open()
	defer r.Close()
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			_, err := io.Copy(io.Discard, r) // the digest is of all of it
			return err
		}
		if err != nil {
			return errs.Wrap(err, errs.Invalid, "the layer is not a valid tar")
		}
		if n == maxEntries {
			return errs.New(errs.Invalid, "the layer has more than %d entries", maxEntries)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		name, err := cleanName(h.Name)
		if err != nil {
			return err
		}
		if imports.Ignored(name) {
			continue
		}
		if err := do(name, h, tr); err != nil {
			return err
		}
	}
}

// cleanName makes a name one below the root, or refuses it as an import does.
func cleanName(name string) (string, error) {
	clean := path.Clean(strings.TrimLeft(name, "/"))
	if len(name) > maxName || strings.Count(clean, "/") > maxDepth || strings.ContainsRune(name, 0) || clean == ".." ||
		strings.HasPrefix(clean, "../") {
		return "", errs.New(errs.Invalid, "the layer has an invalid file name %.80q", name)
	}
	return clean, nil
}

const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	whiteoutMeta   = ".wh..wh." // aufs' own bookkeeping
)

// entry reads one entry of the layer. It refuses what contradicts itself, as an import does.
func (l *layer) entry(name string, h *tar.Header, content io.Reader) error {
	for dir := range above(name) {
		if _, file := l.own.said[dir]; file || l.linked[dir] {
			return errs.New(errs.Invalid, "the layer has %.80q below %.80q, which is no directory", name, dir)
		}
		if _, file := l.lower.said[dir]; file { // of which this layer makes a directory
			l.gone[dir] = true
		}
	}
	if base := path.Base(name); strings.HasPrefix(base, whiteoutPrefix) {
		return l.whiteout(path.Dir(name), base)
	}
	if imports.LeftOut(h) { // what was there by this name stays
		return nil
	}
	_, file := l.lower.said[name]
	if h.Typeflag != tar.TypeDir && l.lower.above[name] > 0 || file {
		l.gone[name] = true
	}
	if h.Typeflag != tar.TypeDir && l.own.above[name] > 0 {
		if l.replaced++; l.replaced > maxReplaced {
			return errs.New(errs.Invalid, "the layer makes more than %d directories that it then replaces by something else", maxReplaced)
		}
		l.replace(name)
	}
	l.own.drop(name) // the last entry of a name counts
	delete(l.hard, name)
	delete(l.linked, name)
	k := kindOf(name)
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		if k != nothing {
			return l.own.put(name, read(k, name, h.Size, content))
		}
	case tar.TypeLink:
		to, err := cleanName(h.Linkname)
		if err == nil && k != nothing {
			if len(l.hard) == maxFiles {
				return errTooMuch
			}
			l.hard[name] = to
		}
		return err
	case tar.TypeSymlink:
		return l.symlink(k, name, h.Linkname)
	}
	return nil
}

// replace forgets what the layer had below a directory of its own, of which it now makes
// something else.
func (l *layer) replace(dir string) {
	below := func(name string) bool { return strings.HasPrefix(name, dir+"/") }
	for name := range l.own.said {
		if below(name) {
			l.own.drop(name)
		}
	}
	maps.DeleteFunc(l.hard, func(name, _ string) bool { return below(name) })
	maps.DeleteFunc(l.linked, func(name string, _ bool) bool { return below(name) })
}

// whiteout notes what the layer hides of the layers below it (OCI image-spec, layer.md).
func (l *layer) whiteout(dir, base string) error {
	switch {
	case base == whiteoutOpaque:
		if l.lower.has(dir) {
			l.opaque[dir] = true
		}
		return nil
	case strings.HasPrefix(base, whiteoutMeta):
		return nil
	}
	hidden := strings.TrimPrefix(base, whiteoutPrefix)
	if hidden == "" || hidden == "." || hidden == ".." {
		return errs.New(errs.Invalid, "the layer has a whiteout of %q, which is not a file name", hidden)
	}
	if name := path.Join(dir, hidden); l.lower.has(name) {
		l.gone[name] = true
	}
	return nil
}

// symlink notes a symbolic link. None is followed, but for the documents of one package that lie
// with those of another.
func (l *layer) symlink(k kind, name, to string) error {
	if l.bytes += len(name); l.bytes > maxLinks {
		return errs.New(errs.Invalid, "the layer has too many symbolic links")
	}
	l.linked[name] = true
	switch {
	case k == copyright || docOfAny.MatchString(name):
		return l.own.put(name, said{link: to})
	case k != nothing && k != osRelease: // Debian's /etc/os-release is a link to /usr/lib/os-release, which is read
		return l.own.put(name, said{notes: []string{"it is a link, which is not followed"}})
	}
	return nil
}

// follow reads what hard links of the layer lead to. That may be files whose own names say nothing.
func (l *layer) follow(open func() io.ReadCloser) error {
	if len(l.hard) == 0 {
		return nil
	}
	from := map[string][]string{} // by the file that they lead to
	for name, to := range l.hard {
		for range 8 {
			next, ok := l.hard[to]
			if !ok {
				break
			}
			to = next
		}
		from[to] = append(from[to], name)
	}
	followed := int64(0)
	err := eachEntry(open, func(to string, h *tar.Header, content io.Reader) error {
		names := from[to]
		if len(names) == 0 || h.Typeflag != tar.TypeReg {
			return nil
		}
		if followed += int64(len(names)) * (min(h.Size, limits[dpkgStatus]) + followCost); followed > maxFollowed {
			return errs.New(errs.Invalid, "the layer has too many hard links to %.80q and other files that say what is in it", to)
		}
		b, err := io.ReadAll(io.LimitReader(content, min(h.Size, slices.Max(limitsOf(names))+1)))
		if err != nil {
			return errs.Wrap(err, errs.Invalid, "the layer ends in the middle of a file")
		}
		for _, name := range names {
			if err := l.own.put(name, read(kindOf(name), name, h.Size, bytes.NewReader(b))); err != nil {
				return err
			}
		}
		return nil
	})
	for name, to := range l.hard {
		if _, ok := l.own.said[name]; !ok && err == nil {
			err = errs.New(errs.Invalid, "the layer has a hard link %.80q to %.80q, which is no file in it", name, to)
		}
	}
	return err
}

func limitsOf(names []string) (all []int64) {
	for _, name := range names {
		all = append(all, limits[kindOf(name)])
	}
	return all
}
