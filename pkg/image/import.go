package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Formats of archives.
const (
	FormatAuto   = "auto"   // decided by the first member of the archive; refused if the rest says otherwise
	FormatRootfs = "rootfs" // a tar of a root file system
	FormatDocker = "docker" // of `docker save`
	FormatOCI    = "oci"    // a tar of an OCI image layout
)

// Archive says what an import reads.
type Archive struct {
	Ref    Reference // the name of the image; zero: all names in the archive
	Format string    // one of the formats; empty is FormatAuto
	// Replace lets the import give the image a name that another image has, or that is
	// kept for one.
	Replace bool
}

// Progress is how far an import or a pull is. Total is 0 if it is not known.
type Progress struct {
	Stage        string // one of the stages below
	Layer        int    // the layer that is unpacked, from 1
	Layers       int
	Bytes, Total int64
}

// Stages of imports and pulls.
const (
	StageReceive  = "receive"  // read the archive
	StageResolve  = "resolve"  // look the name up
	StageDownload = "download" // fetch the missing layers
	StageUnpack   = "unpack"   // unpack a layer
)

// imports is how many may run at once: each keeps a core and the disk busy.
const imports = 4

// Import makes an image of an archive: a tar of a root file system, of `docker save` or
// of an OCI image layout, plain or compressed by gzip or zstd. If progress is not nil,
// Import calls it often.
//
// Import unpacks a root file system while it comes. It first spools the archive of an
// image into a file without a name, because the list of its layers comes last. It
// unpacks and checks layers without names; they get their names, and the image its own,
// when all are there. If ctx is cancelled or the reader fails, nothing is left.
//
// It fails with errs.Invalid if the archive is broken, hostile or none, with
// errs.Unsupported if it is for another machine, with errs.Exhausted if it does not fit
// on the disk, with errs.Denied if another image has the name and may not be replaced.
func (s *Store) Import(ctx context.Context, a Archive, r io.Reader, progress func(Progress)) (record.Image, error) {
	if a.Ref.Digest != "" {
		return record.Image{}, errs.New(errs.Invalid, "image %.200q: a digest is computed, not given; leave it out", a.Ref.URI)
	}
	if progress == nil {
		progress = func(Progress) {}
	}
	im := &importer{s: s, ref: a.Ref, progress: progress}
	defer im.drop()
	i, err := im.run(ctx, a, r)
	if err != nil {
		return record.Image{}, fmt.Errorf("import image %s: %w", a.Ref.URI, err)
	}
	return i, nil
}

// importer is one import.
type importer struct {
	s        *Store
	ref      Reference
	also     []Reference // further names
	progress func(Progress)
	layers   []staged
}

// staged is a layer of the image to be, lowest first.
type staged struct {
	stage  string // empty: this host had it already
	digest string
	bytes  int64
}

// drop removes the layers that have no name.
func (im *importer) drop() {
	for _, l := range im.layers {
		if l.stage != "" {
			_ = im.s.cfg.Layers.Drop(l.stage) // on an error the next start removes it
		}
	}
}

func (im *importer) run(ctx context.Context, a Archive, r io.Reader) (record.Image, error) {
	received := &meter{r: r, report: func(n int64) { im.progress(Progress{Stage: StageReceive, Bytes: n}) }}
	head, err := io.ReadAll(io.LimitReader(received, archive.HeadSize))
	if err != nil {
		return record.Image{}, err
	}
	// Only now, so that a client that sends nothing blocks no other.
	select {
	case im.s.importing <- struct{}{}:
		defer func() { <-im.s.importing }()
	case <-ctx.Done():
		return record.Image{}, ctx.Err()
	}
	in := bufio.NewReaderSize(io.MultiReader(bytes.NewReader(head), received), 1<<18)
	kind, err := probe(ctx, head)
	if err != nil {
		return record.Image{}, err
	}
	format := a.Format
	switch format {
	case "", FormatAuto:
		format = ""
	case FormatRootfs:
		kind.Image = false
	case FormatDocker, FormatOCI:
		kind.Image = true
	default:
		return record.Image{}, errs.New(errs.Invalid, "format %.20q: want %s, %s, %s or %s", format, FormatAuto, FormatRootfs, FormatDocker,
			FormatOCI)
	}
	if !kind.Image && im.ref.Name == "" {
		return record.Image{}, errs.New(errs.Invalid, "the archive is a root file system, which has no name: give one")
	}
	var plain io.Reader = in
	if kind.Compressed {
		child, err := inflate(ctx, in)
		if err != nil {
			return record.Image{}, err
		}
		defer child.Close()
		plain = child
	}
	plan := archive.Plan{Config: record.ImageConfig{Workdir: "/"}}
	if kind.Image {
		plan, err = im.image(ctx, format, plain)
	} else {
		err = im.rootfs(ctx, plain, format == "")
	}
	if err != nil {
		return record.Image{}, err
	}
	i := record.Image{Name: im.ref.Name, Tag: im.ref.Tag, Config: plan.Config, Unused: plan.Unused}
	return im.s.name(ctx, i, im.layers, fromClient, a.Replace, im.also...)
}

// rootfs stages a tar of a root file system. If that was only guessed, it refuses what has the
// lists of an image: the image would lose its config without a word.
func (im *importer) rootfs(ctx context.Context, r io.Reader, guessed bool) error {
	if err := im.stage(ctx, r, "", nil); err != nil || !guessed {
		return err
	}
	for _, f := range []struct {
		format string
		lists  []string
	}{{FormatDocker, []string{"manifest.json"}}, {FormatOCI, []string{"oci-layout", "index.json"}}} {
		found := 0
		for _, name := range f.lists {
			has, err := im.s.cfg.Layers.StageHas(im.layers[0].stage, name)
			if err != nil {
				return err
			}
			if has {
				found++
			}
		}
		if found == len(f.lists) {
			return errs.New(errs.Invalid, "the archive looks like an image: it has %s at its top. Give --format %s, or --format rootfs if "+
				"it is a root file system", strings.Join(f.lists, " and "), f.format)
		}
	}
	return nil
}

// image stages the layers of an image's archive and returns its plan.
func (im *importer) image(ctx context.Context, format string, r io.Reader) (plan archive.Plan, err error) {
	f, size, err := im.s.spool(r)
	if err != nil {
		return plan, err
	}
	defer f.Close()
	if plan, err = planOf(ctx, f, size, format); err != nil {
		return plan, err
	}
	if im.ref.Name == "" {
		names := namesOf(plan.Tags)
		if len(names) == 0 {
			return plan, errs.New(errs.Invalid, "the archive does not name its image: give a name")
		}
		im.ref, im.also = names[0], names[1:]
	}
	if len(plan.Layers) == 0 {
		return plan, im.empty(ctx)
	}
	for i, l := range plan.Layers {
		at := Progress{Stage: StageUnpack, Layer: i + 1, Layers: len(plan.Layers)}
		if here, err := im.here(ctx, l.DiffID); err != nil {
			return plan, err
		} else if here {
			continue
		}
		if err := im.layer(ctx, f, l, at); err != nil {
			return plan, inLayer(err, i+1, len(plan.Layers))
		}
	}
	return plan, nil
}

// emptyLayer is the digest of a tar of nothing, which is 1,024 zeros. An image without layers
// gets it: one without any is how records have an image that has yet to be pulled.
const emptyLayer = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"

// empty makes the layer of an image without layers.
func (im *importer) empty(ctx context.Context) error {
	if here, err := im.here(ctx, emptyLayer); here || err != nil {
		return err
	}
	return im.stage(ctx, bytes.NewReader(make([]byte, 1024)), emptyLayer, nil)
}

// here uses a layer that this host has already.
func (im *importer) here(ctx context.Context, diffID string) (bool, error) {
	n, err := im.s.cfg.Layers.Size(ctx, diffID)
	if errs.Is(err, errs.NotFound) {
		return false, nil
	}
	if err == nil {
		im.layers = append(im.layers, staged{digest: diffID, bytes: n})
	}
	return err == nil, err
}

// inLayer says in which layer something is wrong, also in the text of the error.
func inLayer(err error, n, of int) error {
	if e, ok := errors.AsType[*errs.Error](err); ok {
		return errs.Wrap(err, e.Code, "layer %d of %d: %s", n, of, e.Text)
	}
	return fmt.Errorf("layer %d of %d: %w", n, of, err)
}

// layer stages one layer of a spooled archive. It unpacks the layer if need be, and
// checks both of its digests.
func (im *importer) layer(ctx context.Context, f io.ReaderAt, l archive.Layer, at Progress) error {
	at.Total = l.Size
	raw := &meter{r: io.NewSectionReader(f, l.At, l.Size), report: func(n int64) { at.Bytes = n; im.progress(at) }}
	sum := &summed{r: raw, h: sha256.New(), want: l.Digest}
	var r io.Reader = sum
	if l.Packed {
		child, err := inflate(ctx, sum)
		if err != nil {
			return err
		}
		defer child.Close()
		r = child
	}
	return im.stage(ctx, r, l.DiffID, sum.check)
}

// stage stages a layer. The layer must have the digest want if that is not empty, and
// pass check if that is not nil.
func (im *importer) stage(ctx context.Context, r io.Reader, want string, check func() error) error {
	stage, digest, n, err := im.s.cfg.Layers.Stage(ctx, r, nil)
	if err != nil {
		return err
	}
	if want == "" {
		if digest, err = im.s.ownDigest(ctx, stage); err != nil {
			return errors.Join(err, im.s.cfg.Layers.Drop(stage))
		}
	}
	im.layers = append(im.layers, staged{stage, digest, n})
	if want != "" && digest != want {
		return errs.New(errs.Invalid, "it has the digest %s, but the image's config says %s: the archive was changed or is damaged", digest,
			want)
	}
	if check != nil {
		return check()
	}
	return nil
}

// ownDigest names a layer that has no digest from elsewhere, by the tar that an export
// makes of it. So an image that was built, or made of a root file system, has the same
// digest on every host that it is exported to. Layers of other programs' images keep
// their digests, by which they are found again and shared, until an export makes other
// tars of them.
func (s *Store) ownDigest(ctx context.Context, stage string) (string, error) {
	h := sha256.New()
	if err := s.cfg.Layers.ReadStage(ctx, stage, h); err != nil {
		return "", err
	}
	return digestPrefix + hex.EncodeToString(h.Sum(nil)), nil
}

// spool copies an archive into a file without a name, so that nothing of it is ever
// left behind.
func (s *Store) spool(r io.Reader) (f *os.File, size int64, err error) {
	f, err = os.CreateTemp(s.cfg.TempDir, "archive-")
	if err != nil {
		return nil, 0, fmt.Errorf("save the archive to a temporary file: %w", err)
	}
	if err = os.Remove(f.Name()); err == nil {
		size, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{&roomy{r: r, room: s.cfg.Layers.Room}}, make([]byte, 1<<18))
	}
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("save the archive to a temporary file: %w", full(err)), f.Close())
	}
	return f, size, nil
}

// probe asks a child which kind of archive begins with head.
func probe(ctx context.Context, head []byte) (k archive.Kind, err error) {
	return k, ask(ctx, confine.Child{Verb: archive.ProbeVerb}, head, &k)
}

// planOf asks a child what an archive holds, and checks everything in the answer that
// can be checked.
func planOf(ctx context.Context, f *os.File, size int64, format string) (p archive.Plan, err error) {
	ro, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd())) // read-only: the child cannot write to it
	if err != nil {
		return p, fmt.Errorf("open the archive again: %w", err)
	}
	defer ro.Close()
	c := confine.Child{Verb: archive.PlanVerb, Files: []*os.File{ro}}
	if format != "" {
		c.Args = []string{format}
	}
	if err := ask(ctx, c, nil, &p); err != nil {
		return p, err
	}
	return p, checkPlan(&p, size)
}

// checkPlan refuses a plan that no honest child makes for an archive of size bytes.
func checkPlan(p *archive.Plan, size int64) error {
	if err := checkLayers(p.Layers); err != nil {
		return err
	}
	for _, l := range p.Layers {
		if l.At < 0 || l.Size < 0 || l.Size > size || l.At > size-l.Size {
			return errs.New(errs.Invalid, "a layer lies outside of the archive")
		}
	}
	return errors.Join(checkConfig(&p.Config), checkUnused(p.Unused))
}

func checkLayers(layers []archive.Layer) error {
	if n := len(layers); n > archive.MaxLayers {
		return errs.New(errs.Invalid, "the image has %d layers; at most %d are allowed", n, archive.MaxLayers)
	}
	for _, l := range layers {
		if !digestForm.MatchString(l.DiffID) {
			return errs.New(errs.Invalid, "layer digest %.100q: want sha256: and 64 hex digits", l.DiffID)
		}
	}
	return nil
}

// maxAnswer bounds what a child may answer.
const maxAnswer = 16 << 20

// ask runs a child that reads in and answers one JSON value.
func ask(ctx context.Context, c confine.Child, in []byte, answer any) error {
	p, err := confine.Start(ctx, c)
	if err != nil {
		return err
	}
	defer p.Close()
	go func() { _, _ = p.In.Write(in); p.In.Close() }() // if the child stops reading, its end says why
	b, err := io.ReadAll(io.LimitReader(p.Out, maxAnswer))
	p.Kill() // it may run for ever; a child that has ended is not affected
	if werr := p.Wait(); errs.CodeOf(werr) != errs.Internal {
		return werr
	} else if err == nil && len(b) == 0 {
		err = werr
	}
	if err == nil {
		err = json.Unmarshal(b, answer)
	}
	if err != nil {
		return fmt.Errorf("ask a child to %s an archive: %w", c.Verb, err)
	}
	return nil
}

// inflate reads from decompressed by a child. Close ends it.
func inflate(ctx context.Context, from io.Reader) (io.ReadCloser, error) {
	p, err := confine.Start(ctx, confine.Child{Verb: archive.InflateVerb})
	if err != nil {
		return nil, err
	}
	i := &inflated{p: p, fed: make(chan error, 1)}
	go func() {
		_, err := io.CopyBuffer(struct{ io.Writer }{p.In}, struct{ io.Reader }{from}, make([]byte, 1<<18))
		p.In.Close()
		i.fed <- err
	}()
	return i, nil
}

// inflated is the output of a child. Its end is good only if both the child and the
// reader that feeds it ended well.
type inflated struct {
	p   *confine.Process
	fed chan error
	err error
}

func (i *inflated) Read(b []byte) (int, error) {
	if i.err != nil {
		return 0, i.err
	}
	n, err := i.p.Out.Read(b)
	if n > 0 || err == nil {
		return n, nil
	}
	i.err = err
	if errors.Is(err, io.EOF) {
		died := i.p.Wait()
		i.p.In.Close() // ends a feeder that still has data
		if died != nil {
			i.err = died
		} else if ferr := <-i.fed; ferr != nil {
			i.err = ferr
		}
	}
	return 0, i.err
}

func (i *inflated) Close() error {
	i.p.Kill()
	i.p.Close()
	_ = i.p.Wait()
	return nil
}
