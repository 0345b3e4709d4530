package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Auth is a user name and a password for a registry.
type Auth = registry.Auth

type authKey struct{}

// WithAuth returns a context in which Pull finds credentials. They belong to one
// request and are never stored. nil means none.
func WithAuth(ctx context.Context, a *Auth) context.Context {
	if a == nil {
		return ctx
	}
	return context.WithValue(ctx, authKey{}, *a)
}

// AuthOf returns the credentials of WithAuth, if there are any.
func AuthOf(ctx context.Context) (a Auth, ok bool) {
	a, ok = ctx.Value(authKey{}).(Auth)
	return a, ok
}

// Pull says what to pull.
type Pull struct {
	Ref Reference
	// Missing makes the pull ask no registry if the image is here by now.
	Missing bool
	// Replace lets the pull give the image a name that another image has.
	Replace bool
}

const (
	// pullLimit bounds a whole pull: otherwise a registry that sends a little at a time
	// would keep it going for ever.
	pullLimit = 2 * time.Hour
	// downloads is how many blobs of an image are downloaded at once, as with docker.
	downloads = 3
)

// flights are the pulls under way. A second request for an image that is being pulled
// with the same credentials joins that pull (as in golang.org/x/sync/singleflight).
type flights struct {
	mu sync.Mutex
	m  map[flightKey]*flight // guarded by mu
}

type flightKey struct {
	ref  Reference // canonical
	auth Auth
	some bool // credentials were given
}

type flight struct {
	cancel context.CancelFunc
	done   chan struct{}
	image  record.Image // written before done is closed
	err    error        // likewise

	// guarded by flights.mu
	waiting   int
	replacing int // of those that wait: for how many it may replace another image
	listeners map[int]func(Progress)
	next      int
	last      Progress // for callers that join later
}

// String writes the progress for people.
func (p Progress) String() string {
	part := record.Mebibytes(p.Bytes)
	if p.Total > 0 {
		part = fmt.Sprintf("%d of %s", p.Bytes>>20, record.Mebibytes(p.Total))
	}
	switch p.Stage {
	case StageResolve:
		return "asking the registry"
	case StageDownload:
		return "downloaded " + part
	case StageUnpack:
		return fmt.Sprintf("unpacking layer %d of %d", p.Layer, p.Layers)
	}
	return p.Stage + " " + part
}

// CanPull reports whether a registry is configured that may have the image.
func (s *Store) CanPull(ref Reference) bool { return s.cfg.Registries.Host(ref.Name) != "" }

// Pull gets an image from the mirrors or the registry that are configured for its name,
// with the credentials of WithAuth or of the configuration, and gives it that name
// here. It does not download layers that are here already, and it does not pull an
// image twice at the same time. If progress is not nil, Pull calls it often.
//
// Nothing is visible before the image is whole. The downloads of a failed pull are kept
// for a while (see blobs), and the next pull goes on from there. A pull ends when no
// caller waits for it any more.
//
// It fails with errs.NotFound if no registry is configured or there is no such image,
// with errs.Denied if the registry wants other credentials or redirects to a forbidden
// address, with errs.Invalid if it sends wrong content or the image is broken, with
// errs.Unsupported if there is none for this machine, with errs.Unavailable if it
// cannot be reached, with errs.Exhausted if the disk is full. It fails with errs.Denied,
// too, if another image has the name and no caller that waits may replace it.
func (s *Store) Pull(ctx context.Context, p Pull, progress func(Progress)) (record.Image, error) {
	i, err := s.pull(ctx, p, progress)
	if p.Replace && errors.Is(err, record.ErrNotReplaced) { // it joined another caller's pull that had just been refused
		return s.pull(ctx, p, progress)
	}
	return i, err
}

func (s *Store) pull(ctx context.Context, p Pull, progress func(Progress)) (record.Image, error) {
	if !s.CanPull(p.Ref) {
		return record.Image{}, s.unknown(p.Ref)
	}
	key := flightKey{ref: p.Ref.canonical()}
	key.auth, key.some = AuthOf(ctx)
	f, leave, err := s.join(ctx, key, p, progress)
	if err != nil || f == nil {
		if err == nil {
			return s.local(ctx, key.ref)
		}
		return record.Image{}, err
	}
	defer leave()
	select {
	case <-f.done:
	case <-ctx.Done():
		return record.Image{}, context.Cause(ctx)
	}
	if f.err != nil && p.Missing { // somebody may have made it meanwhile
		if i, err := s.local(ctx, key.ref); err == nil {
			return i, nil
		}
	}
	if f.err != nil {
		return record.Image{}, fmt.Errorf("pull image %s: %w", p.Ref.URI, f.err)
	}
	return f.image, nil
}

// join joins the pull of key, or begins it. With p.Missing, and if the image is here, it
// does neither. A pull gives the image its name before it can no longer be joined, so
// no second pull follows it.
func (s *Store) join(ctx context.Context, key flightKey, p Pull, progress func(Progress)) (f *flight, leave func(), err error) {
	s.flights.mu.Lock()
	defer s.flights.mu.Unlock()
	if p.Missing {
		if _, err := s.local(ctx, key.ref); !errs.Is(err, errs.NotFound) {
			return nil, nil, err
		}
	}
	f = s.flights.m[key]
	if f == nil {
		ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), pullLimit,
			errs.New(errs.Unavailable, "it took more than %s; the downloaded part is kept; try again", pullLimit))
		f = &flight{cancel: cancel, done: make(chan struct{}), listeners: map[int]func(Progress){}}
		s.flights.m[key] = f
		go s.run(ctx, key, f)
	}
	n := f.next
	f.next++
	f.waiting++
	if p.Replace {
		f.replacing++
	}
	if progress != nil {
		f.listeners[n] = progress
		if f.last.Stage != "" {
			progress(f.last)
		}
	}
	return f, func() { s.leave(key, f, n, p.Replace) }, nil
}

// leave leaves a pull. The last to leave ends it, and waits until it has ended.
func (s *Store) leave(key flightKey, f *flight, n int, replace bool) {
	s.flights.mu.Lock()
	delete(f.listeners, n)
	f.waiting--
	if replace {
		f.replacing--
	}
	last := f.waiting == 0
	if last && s.flights.m[key] == f {
		delete(s.flights.m, key)
	}
	s.flights.mu.Unlock()
	if last {
		f.cancel()
		<-f.done
	}
}

// run pulls, and gives the result to all who have joined.
func (s *Store) run(ctx context.Context, key flightKey, f *flight) {
	defer f.cancel()
	var auth *Auth
	if key.some {
		auth = &key.auth
	}
	p := &puller{importer: importer{s: s, progress: func(at Progress) {
		s.flights.mu.Lock()
		defer s.flights.mu.Unlock()
		f.last = at
		for _, progress := range f.listeners {
			progress(at)
		}
	}}}
	p.replace = func() bool {
		s.flights.mu.Lock()
		defer s.flights.mu.Unlock()
		return f.replacing > 0
	}
	f.image, f.err = p.run(ctx, key.ref, auth)
	p.drop()
	if f.err != nil && ctx.Err() != nil {
		f.err = context.Cause(ctx)
	}
	s.flights.mu.Lock()
	defer s.flights.mu.Unlock()
	if s.flights.m[key] == f {
		delete(s.flights.m, key)
	}
	close(f.done)
}

// puller is one pull: an import whose layers come one by one.
type puller struct {
	importer
	repo    *registry.Repository
	replace func() bool // whether a caller waits that may replace another image

	mu    sync.Mutex
	got   []int64 // of each layer; guarded by mu
	total int64
}

func (p *puller) run(ctx context.Context, ref Reference, auth *Auth) (i record.Image, err error) {
	p.ref = ref
	p.progress(Progress{Stage: StageResolve})
	if p.repo, err = p.s.cfg.Registries.Repository(p.ref.Name, auth); err != nil {
		return i, err
	}
	m, digests, err := p.manifest(ctx)
	if err != nil {
		return i, err
	}
	c, err := p.config(ctx, m.Config)
	if err != nil {
		return i, err
	}
	plan, err := m.Plan(c)
	if err != nil {
		return i, err
	}
	if err := checkPulled(&plan); err != nil {
		return i, err
	}
	if err := p.replaceable(ctx, &plan); err != nil {
		return i, err
	}
	done := p.s.blobs.use(plan.Layers)
	named := false
	defer func() { done(named) }()
	if err := p.fetch(ctx, plan.Layers); err != nil {
		return i, err
	}
	if len(plan.Layers) == 0 {
		if err := p.empty(ctx); err != nil {
			return i, err
		}
	}
	i = record.Image{Name: p.ref.Name, Tag: p.ref.kept(), Config: plan.Config, Unused: plan.Unused, Sources: digests}
	i, err = p.s.name(ctx, i, p.layers, fromRegistry, p.replace())
	named = err == nil
	return i, err
}

// replaceable refuses, before the download, an image that would be refused its name
// after it.
func (p *puller) replaceable(ctx context.Context, plan *archive.Plan) (err error) {
	i := record.Image{Name: p.ref.Name, Tag: p.ref.kept()}
	for _, l := range plan.Layers {
		i.Layers = append(i.Layers, l.DiffID)
	}
	if len(i.Layers) == 0 {
		i.Layers = []string{emptyLayer}
	}
	if i.Digest, err = digestOf(i.Layers, plan.Config); err != nil || p.replace() {
		return err
	}
	return p.s.other(ctx, i, fromRegistry)
}

// manifest reads the manifest of the image for this machine, and returns the digests
// that the registry has for the image.
func (p *puller) manifest(ctx context.Context) (m archive.Manifest, digests []string, err error) {
	want := cmp.Or(p.ref.Digest, p.ref.Tag, DefaultTag)
	for range 3 { // an index of indexes is allowed, and rare
		b, digest, err := p.repo.Manifest(ctx, want, archive.MaxDocument)
		if err != nil {
			return m, nil, err
		}
		digests = append(digests, digest)
		if m, err = read[archive.Manifest](ctx, archive.ManifestVerb, b); err != nil || m.Next == nil {
			return m, digests, err
		}
		if want = m.Next.Digest; !digestForm.MatchString(want) {
			return m, nil, badDigest(want)
		}
	}
	return m, nil, errs.New(errs.Invalid, "the indexes of the image are nested too deeply")
}

func badDigest(d string) error {
	return errs.New(errs.Unsupported, "the manifest of the image names the digest %.100q: want sha256: and 64 hex digits", d)
}

func (p *puller) config(ctx context.Context, b archive.Blob) (c archive.Config, err error) {
	if !digestForm.MatchString(b.Digest) {
		return c, badDigest(b.Digest)
	}
	if b.Size > archive.MaxDocument {
		return c, errs.New(errs.Invalid, "the config of the image has %d bytes; at most %d are read", b.Size, archive.MaxDocument)
	}
	l := archive.Layer{Span: archive.Span{Size: b.Size}, Digest: b.Digest}
	done := p.s.blobs.use([]archive.Layer{l})
	defer done(true) // it is read once, and small
	f, err := p.s.blobs.get(ctx, l, p.repo, func(int64) {})
	if err != nil {
		return c, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.NewSectionReader(f, 0, b.Size))
	if err != nil {
		return c, fmt.Errorf("read the config of the image: %w", err)
	}
	if sum := sha256.Sum256(text); "sha256:"+hex.EncodeToString(sum[:]) != b.Digest { // the kept file was damaged since
		return c, errs.New(errs.Unavailable, "the config of the image that an earlier pull kept is damaged; try again")
	}
	return read[archive.Config](ctx, archive.ConfigVerb, text)
}

// read makes a child read a document.
func read[T any](ctx context.Context, verb string, b []byte) (said T, err error) {
	return said, ask(ctx, confine.Child{Verb: verb}, b, &said)
}

// checkPulled refuses a plan that no honest child makes.
func checkPulled(p *archive.Plan) error {
	if err := checkLayers(p.Layers); err != nil {
		return err
	}
	for _, l := range p.Layers {
		if !digestForm.MatchString(l.Digest) {
			return badDigest(l.Digest)
		}
		if l.Size < 0 {
			return errs.New(errs.Invalid, "a layer has %d bytes", l.Size)
		}
	}
	return errors.Join(checkConfig(&p.Config), checkUnused(p.Unused))
}

// arrival is a downloaded layer, or why it will not come.
type arrival struct {
	f   *os.File
	err error
}

// fetch downloads the missing layers, a few at once, and stages each when it and those
// below it are there.
func (p *puller) fetch(ctx context.Context, layers []archive.Layer) error {
	ctx, cancel := context.WithCancel(ctx)
	var going sync.WaitGroup
	come := make([]chan arrival, len(layers)) // nil: the layer is here
	defer func() {
		cancel()
		going.Wait()
		for _, c := range come {
			if len(c) > 0 {
				if a := <-c; a.f != nil {
					a.f.Close()
				}
			}
		}
	}()
	p.got = make([]int64, len(layers))
	for i, l := range layers {
		here, err := p.here(ctx, l.DiffID)
		if err != nil {
			return err
		}
		if !here {
			come[i] = make(chan arrival, 1)
			p.total += l.Size
		}
	}
	slots := make(chan struct{}, downloads)
	for i, l := range layers {
		if come[i] == nil {
			continue
		}
		going.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			f, err := p.s.blobs.get(ctx, l, p.repo, func(n int64) { p.note(i, n, len(layers)) })
			come[i] <- arrival{f, err}
		})
	}
	return p.stageAll(ctx, layers, come)
}

// note reports how much of all layers has come.
func (p *puller) note(layer int, n int64, layers int) {
	p.mu.Lock()
	p.got[layer] = n
	at := Progress{Stage: StageDownload, Layers: layers, Total: p.total}
	for _, n := range p.got {
		at.Bytes += n
	}
	p.mu.Unlock()
	p.progress(at)
}

// stageAll stages the layers in order, lowest first.
func (p *puller) stageAll(ctx context.Context, layers []archive.Layer, come []chan arrival) error {
	staged := map[string]staged{}
	for _, l := range p.layers { // those that are here
		staged[l.digest] = l
	}
	p.layers = nil
	for i, l := range layers {
		if come[i] == nil {
			p.layers = append(p.layers, staged[l.DiffID])
			continue
		}
		var a arrival
		select {
		case a = <-come[i]:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if a.err != nil {
			return inLayer(a.err, i+1, len(layers))
		}
		err := p.unpack(ctx, a.f, l, Progress{Stage: StageUnpack, Layer: i + 1, Layers: len(layers)})
		if err = errors.Join(err, a.f.Close()); err != nil {
			return inLayer(err, i+1, len(layers))
		}
	}
	return nil
}

// unpack stages one downloaded layer.
func (p *puller) unpack(ctx context.Context, f *os.File, l archive.Layer, at Progress) error {
	select { // a few at once, together with imports
	case p.s.importing <- struct{}{}:
		defer func() { <-p.s.importing }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	var magic [4]byte
	n, err := f.ReadAt(magic[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read a layer: %w", err)
	}
	l.Packed = archive.Packed(magic[:n])
	err = p.layer(ctx, f, l, at)
	if errs.Is(err, errs.Invalid) { // the next time it would fail too
		p.s.blobs.drop(l.Digest)
	}
	return err
}
