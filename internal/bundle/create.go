package bundle

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"aead.dev/minisign"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Source is a file that becomes a member.
type Source struct {
	Member
	Path string

	patch string // a file with the patch, if the member has Like
}

// Plan is what a bundle is made of.
type Plan struct {
	Manifest          // without the members
	Verifier string   // the program sandboxd that checks the bundle and installs it: static, for the same system
	Sources  []Source // in any order
	Key      minisign.PrivateKey
}

// Create writes a bundle to path; a file of this name is replaced when the new one is complete.
// Equal sources, manifest, key and name of the file make equal bytes.
func Create(ctx context.Context, path string, p Plan) (err error) {
	if len(filepath.Base(path)) > maxElement || !isPlain(filepath.Base(path)) {
		return errs.New(errs.Invalid, "bundle %q: its name is signed, and may have letters, digits and %s only", path, plainMarks)
	}
	script, err := compressed(ctx, p.Verifier, p.Architecture)
	if err != nil {
		return fmt.Errorf("bundle %s: the verifier: %w", path, err)
	}
	m := p.Manifest
	m.Format, m.Created = Format, m.Created.UTC()
	m.Members = []Member{}
	sources := slices.Clone(p.Sources)
	slices.SortFunc(sources, func(a, b Source) int { return byName(a.Member, b.Member) })
	for i := range sources {
		if err := sources[i].measure(ctx); err != nil {
			return fmt.Errorf("bundle %s: %w", path, err)
		}
	}
	work, err := os.MkdirTemp(filepath.Dir(path), ".bundle.")
	if err != nil {
		return fmt.Errorf("create the bundle: %w", err)
	}
	defer os.RemoveAll(work)
	if err := patchImages(ctx, work, sources); err != nil {
		return fmt.Errorf("bundle %s: %w", path, err)
	}
	for _, s := range sources {
		m.Members = append(m.Members, s.Member)
	}
	if err := m.check(); err != nil {
		return fmt.Errorf("bundle %s: %w", path, err)
	}
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
	if err != nil {
		return fmt.Errorf("create the bundle: %w", err)
	}
	err = compose(ctx, f, script, m, sources, trusted(&m)+filepath.Base(path), p.Key)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(fmt.Errorf("bundle %s: %w", path, err), os.Remove(path+".new"))
	}
	return durable.Rename(path+".new", path)
}

// compose writes all parts, then the header, whose sizes are known by then, then the signature.
func compose(ctx context.Context, f *os.File, verifier []byte, m Manifest, sources []Source, comment string,
	key minisign.PrivateKey,
) error {
	manifest, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	manifest = append(manifest, '\n')
	l := layout{
		version: m.Version, architecture: m.Architecture, prelude: headerSize + int64(len(script)), verifier: int64(len(verifier)),
		manifest: int64(len(manifest)), signature: signatureSize(comment),
	}
	if l.manifest > maxManifest {
		return errs.New(errs.Invalid, "the manifest has %d bytes, more than %d: give it fewer files", l.manifest, maxManifest)
	}
	if _, err := f.Write(slices.Concat(make([]byte, headerSize), script, verifier, manifest)); err != nil {
		return err
	}
	if err := pack(ctx, f, sources); err != nil {
		return err
	}
	end, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	l.members = end - l.stream()
	// The signature is the last four lines of the file: what it signs ends with a line, too.
	if _, err := f.WriteString("\n"); err != nil {
		return err
	}
	if _, err := f.WriteAt(l.header(), 0); err != nil {
		return err
	}
	r := minisign.NewReader(within(ctx, io.NewSectionReader(f, 0, l.signed())))
	if _, err := io.Copy(io.Discard, r); err != nil {
		return err
	}
	_, err = f.Write(sign(r, key, comment))
	return err
}

// pack writes the stream of members: one, so that what two of them share is stored once if it is
// near. The level and one goroutine make the same bytes on each host, of one version of the library.
func pack(ctx context.Context, w io.Writer, sources []Source) error {
	z, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithWindowSize(window),
		zstd.WithEncoderConcurrency(1))
	if err != nil {
		return err
	}
	for _, s := range sources {
		again, want := s, s.Member
		if s.patch != "" {
			again.Path = s.patch
			want.Size = s.Stored
		}
		if err := again.read(ctx, z); err != nil {
			return errors.Join(err, z.Close())
		}
		if s.patch == "" && again.Member != want || again.Size != want.Size {
			return errors.Join(errs.New(errs.WrongState, "%s changed while it was read: wait until it is complete", s.Path), z.Close())
		}
	}
	return z.Close()
}

// patchImages makes patches, in dir, of images that have at least a quarter in common with an
// earlier one: of the one that has most.
func patchImages(ctx context.Context, dir string, sources []Source) error {
	type image struct {
		*Source
		index index
	}
	var whole []image
	patches := 0
	for i := range sources {
		s := &sources[i]
		if s.Kind != Image {
			continue
		}
		best, most := -1, int64(0)
		for j, other := range whole {
			in, of, err := other.index.shared(ctx, s.Path)
			if err != nil {
				return err
			}
			if in > most && 4*in >= of {
				best, most = j, in
			}
		}
		if best < 0 || patches == maxPatches {
			found, err := indexOf(ctx, s.Path)
			if err != nil {
				return err
			}
			whole = append(whole, image{s, found})
			continue
		}
		patches++
		if err := s.patchOf(ctx, filepath.Join(dir, strconv.Itoa(i)), whole[best].Source, whole[best].index); err != nil {
			return err
		}
	}
	return nil
}

// patchOf makes s a patch of other.
func (s *Source) patchOf(ctx context.Context, file string, other *Source, found index) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	if err := errors.Join(patch(ctx, f, *s, other.Path, found), f.Close()); err != nil {
		return err
	}
	fi, err := os.Stat(file)
	if err != nil {
		return err
	}
	s.patch, s.Like, s.Stored = file, other.Name, fi.Size()
	return nil
}

// measure sets size, hash and mode of s.
func (s *Source) measure(ctx context.Context) error { return s.read(ctx, io.Discard) }

func (s *Source) read(ctx context.Context, w io.Writer) error {
	f, err := os.Open(s.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return errs.New(errs.Invalid, "%s is no regular file", s.Path)
	}
	s.Mode = "0644"
	if fi.Mode()&0o111 != 0 {
		s.Mode = "0755"
	}
	sum := sha256.New()
	s.Size, err = io.Copy(io.MultiWriter(w, sum), within(ctx, f))
	s.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return err
}

// compressed returns the verifier as the prelude unpacks it: each Debian has gzip, few have zstd.
func compressed(ctx context.Context, file, architecture string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := runs(f, architecture); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(z, within(ctx, f))
	if err = errors.Join(err, z.Close()); err == nil && b.Len() > maxVerifier {
		err = errs.New(errs.Invalid, "%s has %d bytes, more than %d", file, b.Len(), maxVerifier)
	}
	return b.Bytes(), err
}

// machines are the names that ELF has for architectures.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// runs returns an error if the program f cannot run on a bare host of this architecture. A script
// is not looked at.
func runs(f *os.File, architecture string) error {
	begin := make([]byte, 4)
	if _, err := f.ReadAt(begin, 0); err != nil || string(begin) != elf.ELFMAG {
		return nil
	}
	e, err := elf.NewFile(f)
	if err != nil {
		return errs.New(errs.Invalid, "%s is no program: %v", f.Name(), err)
	}
	if want, ok := machines[architecture]; ok && e.Machine != want {
		return errs.New(errs.Invalid, "%s is for %v, and the bundle is for %s: name the program of that architecture by --verifier",
			f.Name(), e.Machine, architecture)
	}
	for _, p := range e.Progs {
		if p.Type == elf.PT_INTERP {
			return errs.New(errs.Invalid, "%s is linked dynamically, and a bare host may lack its libraries: "+
				"build it with CGO_ENABLED=0", f.Name())
		}
	}
	return nil
}

// Packaged returns the source for a .deb or .rpm, whose name must have the form of Debian
// (name_version_architecture.deb) or of RPM (name-version-release.architecture.rpm).
func Packaged(file, architecture string) (Source, error) {
	base := filepath.Base(file)
	s := Source{Member: Member{Name: "packages/" + base, Kind: Package}, Path: file}
	var arch string
	if stem, ok := strings.CutSuffix(base, ".deb"); ok {
		if parts := strings.Split(stem, "_"); len(parts) == 3 {
			s.Package, s.Version, arch = parts[0], strings.ReplaceAll(parts[1], "%3a", ":"), parts[2]
		}
	} else if stem, ok := strings.CutSuffix(base, ".rpm"); ok {
		if dot := strings.LastIndex(stem, "."); dot > 0 {
			stem, arch = stem[:dot], stem[dot+1:]
		}
		if parts := strings.Split(stem, "-"); len(parts) >= 3 {
			n := len(parts) - 2
			s.Package, s.Version = strings.Join(parts[:n], "-"), parts[n]+"-"+parts[n+1]
		}
	}
	if s.Package == "" || s.Version == "" || arch == "" {
		return s, errs.New(errs.Invalid, "package %s: its name is neither NAME_VERSION_ARCHITECTURE.deb "+
			"nor NAME-VERSION-RELEASE.ARCHITECTURE.rpm: name it as its builder did", file)
	}
	if !slices.Contains(packaged[architecture], arch) {
		return s, errs.New(errs.Invalid, "package %s is for %s, and the bundle is for %s: give it packages of that architecture",
			file, arch, architecture)
	}
	return s, nil
}

// packaged are the names that Debian and RPM have for architectures.
var packaged = map[string][]string{
	"amd64": {"amd64", "all", "x86_64", "noarch"},
	"arm64": {"arm64", "all", "aarch64", "noarch"},
}
