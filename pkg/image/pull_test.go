package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	gregistry "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	at "github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
	rt "github.com/sandboxd/sandboxd/pkg/image/registry/registrytest"
)

// pulling is a world with a registry before which stands a front.
type pulling struct {
	*world
	*rt.Front
}

func newPulling(t *testing.T, more ...registry.Registry) *pulling {
	t.Helper()
	f := newFront(t, rt.NewAuthority(t))
	for i := range more {
		more[i].CA = f.File
	}
	return &pulling{newWorldOf(t, append(more, registry.Registry{Prefix: f.Addr, CA: f.File})), f}
}

func newFront(t *testing.T, a *rt.Authority) *rt.Front {
	t.Helper()
	return rt.NewFront(t, a, gregistry.New(gregistry.Logger(log.New(io.Discard, "", 0))))
}

func (p *pulling) push(t *testing.T, ref string, img v1.Image) string {
	t.Helper()
	p.Push(t, p.Addr, ref, img)
	p.Forget()
	return p.Addr + "/" + ref
}

// bulky is a layer that does not compress, of so many bytes.
func bulky(t *testing.T, name string, n int64) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: n, Mode: 0o644}))
	_, err := io.CopyN(w, rand.Reader, n)
	must(t, err)
	must(t, w.Close())
	return b.Bytes()
}

// left lists what pulls have left.
func (w *world) left(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(w.dir, "blobs"))
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func layerOf(t *testing.T, b []byte, mt types.MediaType) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
	must(t, err)
	if mt == types.OCILayer {
		return l
	}
	id, err := l.DiffID()
	must(t, err)
	if mt == types.OCILayerZStd {
		b = zst(b)
	}
	return &oddLayer{static.NewLayer(b, mt), id}
}

// oddLayer is one that is not compressed by gzip.
type oddLayer struct {
	v1.Layer
	id v1.Hash
}

func (o *oddLayer) DiffID() (v1.Hash, error) { return o.id, nil }

func TestPull(t *testing.T) {
	p := newPulling(t)
	ctx := t.Context()
	lower, upper := at.Tar(t, at.Dir("etc"), at.File("etc/below")), at.Tar(t, at.Dir("etc"), at.File("etc/above"))
	third := at.Tar(t, at.Dir("opt"), at.File("opt/third"))
	img := at.Image(t, lower, upper)
	ref := p.push(t, "team/app:1", img)

	var seen []image.Progress
	i, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, func(at image.Progress) { seen = append(seen, at) })
	must(t, err)
	if i.Ref() != ref || len(i.Layers) != 2 || i.Config.User != "1000:1000" || i.Config.Workdir != "/srv/app" {
		t.Errorf("pulled %+v", i)
	}
	p.holds(t, 1, 2)
	if left := p.left(t); len(left) > 0 {
		t.Errorf("left %q", left)
	}
	if seen[0].Stage != image.StageResolve || seen[len(seen)-1].Stage != image.StageUnpack {
		t.Errorf("progress %v", seen)
	}
	digest, err := img.Digest()
	must(t, err)
	if got, err := p.Resolve(ctx, parsed(p.Addr+"/team/app@"+digest.String())); err != nil || got.Ref() != ref {
		t.Errorf("by the registry's digest: %v, %v", got.Ref(), err)
	}

	// A second image shares the lower layer: one blob comes. Docker's types, zstd, plain.
	mixed := mutate.MediaType(at.Image(t, lower), types.DockerManifestSchema2)
	mixed, err = mutate.AppendLayers(mixed, layerOf(t, upper, types.OCILayerZStd), layerOf(t, third, types.DockerUncompressedLayer))
	must(t, err)
	mixed = mutate.ConfigMediaType(mixed, types.DockerConfigJSON)
	ref2 := p.push(t, "team/mixed:1", mixed)
	must(t, errorOf(p.Remove(ctx, parsed(ref))))
	_, err = p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil)
	must(t, err)
	p.Forget()
	i2, err := p.Pull(ctx, image.Pull{Ref: parsed(ref2)}, nil)
	must(t, err)
	if n := p.Asked("GET /v2/team/mixed/blobs/"); n != 2 { // the config, the third
		t.Errorf("%d blobs came, want the config and one layer", n)
	}
	if !slices.Equal(i2.Layers[:2], i.Layers) {
		t.Errorf("layers %q, want to begin with %q", i2.Layers, i.Layers)
	}
	p.holds(t, 2, 3)
	must(t, errorOf(p.Remove(ctx, parsed(ref))))
	must(t, errorOf(p.Remove(ctx, parsed(ref2))))
	if _, err = p.Pull(ctx, image.Pull{Ref: parsed(ref2)}, nil); err != nil { // zstd, too, comes
		t.Error(err)
	}
}

// TestPullOfIndex takes of an index what is for this machine.
func TestPullOfIndex(t *testing.T) {
	p := newPulling(t)
	ctx := t.Context()
	mine, other := at.Image(t, at.Tar(t, at.File("mine"))), at.Image(t, at.Tar(t, at.File("other")))
	entry := func(img v1.Image, os, arch, variant string) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{
			OS: os, Architecture: arch,
			Variant: variant,
		}}}
	}
	for name, mt := range map[string]types.MediaType{"oci": types.OCIImageIndex, "docker": types.DockerManifestList} {
		idx := mutate.IndexMediaType(mutate.AppendManifests(empty.Index,
			entry(other, "unknown", "unknown", ""), entry(other, "linux", "s390x", ""), entry(other, "linux", runtime.GOARCH, "v9"),
			entry(mine, "linux", runtime.GOARCH, "")), mt)
		p.Push(t, p.Addr, "multi/"+name+":1", idx)
		digest, err := idx.Digest()
		must(t, err)
		ref := p.Addr + "/multi/" + name + "@" + digest.String()
		if got, err := p.Resolve(ctx, parsed(ref)); !errs.Is(err, errs.NotFound) {
			t.Errorf("before the pull: %v, %v", got, err)
		}
		i, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil)
		must(t, err)
		id, _ := mine.ConfigFile()
		if len(i.Layers) != 1 || i.Layers[0] != id.RootFS.DiffIDs[0].String() || len(i.Sources) != 2 {
			t.Errorf("pulled %+v, want the one of this machine", i)
		}
		for _, uri := range []string{ref, p.Addr + "/multi/" + name + ":1@" + digest.String()} {
			if got, err := p.Resolve(ctx, parsed(uri)); err != nil || got.Digest != i.Digest {
				t.Errorf("%s is %v, %v", uri, got, err)
			}
		}
	}
	p.Push(t, p.Addr, "multi/none:1", mutate.AppendManifests(empty.Index, entry(other, "linux", "s390x", "")))
	if _, err := p.Pull(ctx, image.Pull{Ref: parsed(p.Addr + "/multi/none:1")}, nil); !errs.Is(err, errs.Unsupported) ||
		!strings.Contains(err.Error(), "linux/s390x") {
		t.Errorf("an index without this machine: %v", err)
	}
}

// TestPullOfOddImages: as docker pulls them, an image without layers, and one for another machine
// that no index lists.
func TestPullOfOddImages(t *testing.T) {
	p := newPulling(t)
	ctx := t.Context()
	nothing := p.push(t, "odd/nothing:1", at.Image(t))
	for range 2 { // the second asks whether the same may have the name
		i, err := p.Pull(ctx, image.Pull{Ref: parsed(nothing)}, nil)
		if err != nil || len(i.Layers) != 1 || i.Config.User != "1000:1000" {
			t.Errorf("no layers: %+v, %v", i, err)
		}
		p.holds(t, 1, 1)
	}
	far := at.Image(t, at.Tar(t, at.File("/a")))
	c, err := far.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.Architecture = "s390x"
	far, err = mutate.ConfigFile(far, c)
	must(t, err)
	i, err := p.Pull(ctx, image.Pull{Ref: parsed(p.push(t, "odd/far:1", far))}, nil)
	if err != nil || i.Config.Platform != "linux/s390x" {
		t.Errorf("for another machine: %+v, %v", i, err)
	}
}

// TestPullsAtOnce has many ask for one image, and one for another with the same
// layer: each blob comes once.
func TestPullsAtOnce(t *testing.T) {
	p := newPulling(t)
	big := bulky(t, "big", 4<<20)
	ref := p.push(t, "team/app:1", at.Image(t, big))
	p.Push(t, p.Addr, "team/other:1", at.Image(t, big, at.Tar(t, at.File("more"))))
	p.Forget()
	var all sync.WaitGroup
	for n := range 12 {
		name := ref
		if n == 11 {
			name = p.Addr + "/team/other:1"
		}
		all.Go(func() {
			ctx := t.Context()
			if n < 3 { // whose own credentials do not matter to this registry
				ctx = image.WithAuth(ctx, &image.Auth{Username: "u", Password: "p"})
			}
			if i, err := p.Pull(ctx, image.Pull{Ref: parsed(name), Missing: true}, nil); err != nil || i.Ref() != name {
				t.Errorf("%s: %v, %v", name, i.Ref(), err)
			}
		})
	}
	all.Wait()
	img := at.Image(t, big)
	layers, err := img.Layers()
	must(t, err)
	digest, err := layers[0].Digest()
	must(t, err)
	if n := p.Asked("/blobs/" + digest.String()); n != 1 {
		t.Errorf("the layer was asked for %d times", n)
	}
	if n := p.Asked("GET /v2/team/app/manifests/"); n > 2 { // one for each set of credentials
		t.Errorf("the manifest was asked for %d times", n)
	}
	p.holds(t, 2, 2)
	if left := p.left(t); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}

// TestPullGoesOn cuts a pull off, and has another go on where it was.
func TestPullGoesOn(t *testing.T) {
	p := newPulling(t)
	ctx := t.Context()
	const size = 8 << 20
	ref := p.push(t, "team/app:1", at.Image(t, at.Tar(t, at.File("small")), bulky(t, "big", size)))
	blob := func(r *http.Request) bool { return strings.Contains(r.URL.Path, "/blobs/") }

	// The connection breaks in the middle, and then the client leaves.
	leaving, leave := context.WithCancel(ctx)
	p.Cut(func(r *http.Request) int64 {
		if blob(r) {
			return size / 2
		}
		return -1
	})
	p.Meddle(func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Range") != "" {
			leave()
			<-r.Context().Done()
		}
		return false
	})
	_, err := p.Pull(leaving, image.Pull{Ref: parsed(ref)}, nil)
	p.Meddle(nil)
	if err == nil {
		t.Fatal("the pull went on without its client")
	}
	p.holds(t, 0, 0)
	left := p.left(t)
	if !slices.ContainsFunc(left, func(n string) bool { return strings.HasSuffix(n, ".part") }) {
		t.Fatalf("left %q, want the beginning of a blob", left)
	}
	if err := p.Sweep(ctx); err != nil || len(p.left(t)) != len(left) {
		t.Errorf("the sweep left %q of %q, %v", p.left(t), left, err)
	}

	// What is here does not come again, also when the connection breaks often.
	p.Forget()
	p.Cut(func(r *http.Request) int64 {
		if blob(r) {
			return size / 8
		}
		return -1
	})
	i, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil)
	must(t, err)
	var from int64
	_, span, _ := strings.Cut(p.First("bytes="), "bytes=")
	if _, err := fmt.Sscanf(span, "%d-", &from); err != nil || from != size/2 {
		t.Errorf("the second time it went on with %q, want that from byte %d", p.First("bytes="), size/2)
	}
	if n := p.Asked("bytes="); n < 4 {
		t.Errorf("it was cut off %d times", n-1)
	}
	p.holds(t, 1, 2)

	// A registry that always hangs up at once: the error says so, nothing is there.
	must(t, errorOf(p.Remove(ctx, parsed(i.Ref()))))
	p.Cut(func(r *http.Request) int64 {
		if blob(r) {
			return 0
		}
		return -1
	})
	if _, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil); !errs.Is(err, errs.Unavailable) {
		t.Errorf("cut off at once: %v", err)
	}
	p.holds(t, 0, 0)

	// What is here was damaged: it comes anew.
	p.Cut(nil)
	img := at.Image(t, bulky(t, "other", 1<<20))
	ref = p.push(t, "team/app:2", img)
	layers, err := img.Layers()
	must(t, err)
	digest, err := layers[0].Digest()
	must(t, err)
	must(t, os.WriteFile(filepath.Join(p.dir, "blobs", strings.Replace(digest.String(), ":", "-", 1)+".part"),
		bytes.Repeat([]byte("x"), 1000), 0o600))
	if _, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil); err != nil {
		t.Error(err)
	}
	pruned, err := p.Prune(ctx, false, time.Time{})
	if err != nil || len(p.left(t)) > 0 {
		t.Errorf("pruned %+v, left %q, %v", pruned, p.left(t), err)
	}
}

// TestPullNotReplaced: a pull gives a tag that has moved to a caller who may replace an
// image, and to those who wait with it; a caller who may not is refused before the
// download. A pull of a missing image takes what is here by then.
func TestPullNotReplaced(t *testing.T) {
	p := newPulling(t)
	ctx := t.Context()
	ref := p.push(t, "team/app:1", at.Image(t, at.Tar(t, at.File("first"))))
	first, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil)
	must(t, err)
	p.push(t, "team/app:1", at.Image(t, at.Tar(t, at.File("second"))))
	_, err = p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil)
	if !errs.Is(err, errs.Denied) || !strings.Contains(err.Error(), "image "+ref+" exists") {
		t.Errorf("without the right: %v", err)
	}
	if n := p.Asked("/blobs/"); n != 1 {
		t.Errorf("%d blobs came, want the config alone", n)
	}
	p.holds(t, 1, 1)
	if i, err := p.Pull(ctx, image.Pull{Ref: parsed(ref), Missing: true}, nil); err != nil || i.Digest != first.Digest {
		t.Errorf("what is not missing: %s, %v", i.Digest, err)
	}
	asked, hold := make(chan struct{}, 1), make(chan struct{})
	p.Meddle(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			select {
			case asked <- struct{}{}:
				<-hold
			default:
			}
		}
		return false
	})
	waits, joined := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil)
		waits <- err
	}()
	<-asked
	here := make(chan struct{})
	go func() {
		var once sync.Once
		_, err := p.Pull(ctx, image.Pull{Ref: parsed(ref), Replace: true}, func(image.Progress) { once.Do(func() { close(here) }) })
		joined <- err
	}()
	<-here
	close(hold)
	if err := errors.Join(<-waits, <-joined); err != nil {
		t.Errorf("together with one who has the right: %v", err)
	}
	if i, err := p.Resolve(ctx, parsed(ref)); err != nil || i.Digest == first.Digest {
		t.Errorf("it is still %s, %v", i.Digest, err)
	}
}

// TestPullOfWhoLeaves has one of two leave: the pull goes on for the other.
func TestPullOfWhoLeaves(t *testing.T) {
	p := newPulling(t)
	ref := p.push(t, "team/app:1", at.Image(t, bulky(t, "big", 1<<20)))
	hold := make(chan struct{})
	asked := make(chan struct{}, 1)
	p.Meddle(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			asked <- struct{}{}
			<-hold
		}
		return false
	})
	leaving, leave := context.WithCancel(t.Context())
	gone, stayed := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := p.Pull(leaving, image.Pull{Ref: parsed(ref)}, nil)
		gone <- err
	}()
	<-asked
	joined := make(chan struct{})
	go func() {
		var once sync.Once
		_, err := p.Pull(t.Context(), image.Pull{Ref: parsed(ref)}, func(image.Progress) { once.Do(func() { close(joined) }) })
		stayed <- err
	}()
	<-joined
	leave()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("who left: %v", err)
	}
	close(hold)
	if err := <-stayed; err != nil {
		t.Errorf("who stayed: %v", err)
	}
	if n := p.Asked("GET /v2/team/app/manifests/"); n != 1 {
		t.Errorf("the manifest was asked for %d times", n)
	}
	p.holds(t, 1, 1)
}

func TestPullLies(t *testing.T) {
	p := newPulling(t)
	ctx := t.Context()
	ref := p.push(t, "team/app:1", at.Image(t, bulky(t, "big", 1<<20)))
	inside := rt.NewAuthority(t).Serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("the registry reached " +
			"what is inside")
	}))
	where := func(part string, do func(w http.ResponseWriter, r *http.Request)) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, part) {
				return false
			}
			do(w, r)
			return true
		}
	}
	says := func(doc any) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
			must(t, json.NewEncoder(w).Encode(doc))
		}
	}
	to := func(url string) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, url, http.StatusFound) }
	}
	desc := func(mt types.MediaType, n int64) map[string]any {
		return map[string]any{"mediaType": mt, "size": n, "digest": "sha256:" + strings.Repeat("a", 64)}
	}
	layers := func(n int, l map[string]any) []any { return slices.Repeat([]any{l}, n) }
	_, port, _ := strings.Cut(inside, ":")
	for name, c := range map[string]struct {
		lie  func(http.ResponseWriter, *http.Request) bool
		code errs.Code
		say  string
	}{
		"other blob": {
			where("/blobs/", func(w http.ResponseWriter, r *http.Request) { rt.Endless(r.Context(), w, 1) }), errs.Invalid,
			"wrong content",
		},
		"endless blob": {where("/blobs/", func(w http.ResponseWriter, r *http.Request) {
			if n := rt.Endless(r.Context(), w, 1<<30); n > 64<<20 {
				t.Errorf("%d bytes were read", n)
			}
		}), errs.Invalid, "wrong content"},
		"no blob": {where("/blobs/", func(http.ResponseWriter, *http.Request) {}), errs.Unavailable, "0 of"},
		"another range": {
			where("/blobs/", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusPartialContent) }),
			errs.Invalid, "range",
		},
		"endless manifest": {
			where("/manifests/", func(w http.ResponseWriter, r *http.Request) { rt.Endless(r.Context(), w, 1<<30) }),
			errs.Invalid, "more than 4194304 bytes",
		},
		"manifest's digest": {where("/manifests/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Docker-Content-Digest", "sha256:"+strings.Repeat("b", 64))
		}), errs.Invalid, "wrong manifest"},
		"no JSON": {
			where("/manifests/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }), errs.Invalid,
			"not JSON",
		},
		"both at once": {where("/manifests/", says(map[string]any{"layers": []any{}, "manifests": []any{}})), errs.Invalid, "at once"},
		"schema 1": {
			where("/manifests/", says(map[string]any{"schemaVersion": 1, "fsLayers": []any{}})), errs.Unsupported,
			"schema 1",
		},
		"no layers": {
			where("/manifests/", says(map[string]any{"config": desc("application/vnd.oci.empty.v1+json", 2), "layers": []any{}})),
			errs.Invalid, "0 layers",
		},
		"many layers": {where("/manifests/", says(map[string]any{
			"config": desc(types.OCIConfigJSON, 2),
			"layers": layers(200, desc(types.OCILayer, 1)),
		})), errs.Invalid, "200 layers"},
		"foreign layer": {where("/manifests/", says(map[string]any{
			"config": desc(types.OCIConfigJSON, 2),
			"layers": layers(1, desc(types.DockerForeignLayer, 1)),
		})), errs.Unsupported, "media type"},
		"negative size": {where("/manifests/", says(map[string]any{
			"config": desc(types.OCIConfigJSON, 2),
			"layers": layers(1, desc(types.OCILayer, -1)),
		})), errs.Invalid, "-1 bytes"},
		"large config": {where("/manifests/", says(map[string]any{
			"config": desc(types.OCIConfigJSON, 1<<30),
			"layers": layers(1, desc(types.OCILayer, 1)),
		})), errs.Invalid, "1073741824 bytes"},
		"to loopback": {where("/blobs/", to("https://127.0.0.1:"+port+"/x")), errs.Denied, "address of this host or its network"},
		"to loopback, v6": {
			where("/blobs/", to("https://[::ffff:127.0.0.1]:"+port+"/x")), errs.Denied,
			"address of this host or its network",
		},
		"to localhost":     {where("/manifests/", to("https://localhost:"+port+"/x")), errs.Denied, "address of this host or its network"},
		"to a private one": {where("/manifests/", to("https://10.0.0.1/x")), errs.Denied, "address of this host or its network"},
		"to metadata": {
			where("/manifests/", to("https://169.254.169.254/latest")), errs.Denied,
			"address of this host or its network",
		},
		"to no TLS": {where("/manifests/", to("http://registry.example.com/x")), errs.Denied, "without TLS"},
		"to a file": {where("/manifests/", to("file:///etc/passwd")), errs.Denied, "file"},
		"token of loopback": {where("/v2/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="https://127.0.0.1:`+port+`/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		}), errs.Unavailable, "private"},
		"token of localhost": {where("/v2/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="https://localhost:`+port+`/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		}), errs.Denied, "address of this host or its network"},
		"large header": {
			where("/v2/", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", strings.Repeat("x", 1<<20)) }),
			errs.Unavailable, "header",
		},
		"no such tag": {where("/manifests/", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"evil\u001b[31m"}]}`)
		}), errs.NotFound, "MANIFEST_UNKNOWN evil [31m"},
	} {
		t.Run(name, func(t *testing.T) {
			p.Meddle(c.lie)
			_, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil)
			if !errs.Is(err, c.code) || !strings.Contains(err.Error(), c.say) {
				t.Errorf("%v: %v; want %s, to say %q", errs.CodeOf(err), err, c.code, c.say)
			}
			p.holds(t, 0, 0)
			if left := p.left(t); len(left) > 0 && c.code == errs.Invalid {
				t.Errorf("left %q", left)
			}
		})
	}
	p.Meddle(nil)
	if _, err := p.Pull(ctx, image.Pull{Ref: parsed(ref)}, nil); err != nil {
		t.Errorf("when it is honest again: %v", err)
	}
}

// TestPullBad has images whose blobs are what their manifests say, and bad.
func TestPullBad(t *testing.T) {
	p := newPulling(t)
	bomb := &oddLayer{
		static.NewLayer(gz(make([]byte, 512<<20)), types.OCILayer),
		v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("c", 64)},
	}
	other := &oddLayer{static.NewLayer(gz(at.Tar(t, at.File("x"))), types.OCILayer), bomb.id}
	torn := at.Tar(t, at.File("x"))
	half := &oddLayer{static.NewLayer(torn[:700], types.OCIUncompressedLayer), bomb.id}
	for name, c := range map[string]struct {
		layer v1.Layer
		say   string
	}{
		"bomb": {bomb, ""}, "another layer than the config says": {other, "digest"}, "half a tar": {half, ""},
	} {
		img, err := mutate.AppendLayers(at.Image(t, at.Tar(t, at.File("good"))), c.layer)
		must(t, err)
		ref := p.push(t, "team/bad:1", img)
		_, err = p.Pull(t.Context(), image.Pull{Ref: parsed(ref)}, nil)
		if !errs.Is(err, errs.Invalid) && !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "layer 2 of 2") ||
			!strings.Contains(err.Error(), c.say) {
			t.Errorf("%s: %v", name, err)
		}
		p.holds(t, 0, 0)
	}
}

func TestPullAuth(t *testing.T) {
	a := rt.NewAuthority(t)
	f := newFront(t, a)
	a.Push(t, f.Addr, "team/app:1", at.Image(t, at.Tar(t, at.File("x"))))
	file := filepath.Join(t.TempDir(), "credentials")
	must(t, os.WriteFile(file, []byte("robot:of-the-file\n"), 0o600))
	w := newWorldOf(t, []registry.Registry{
		{Prefix: f.Addr, CA: a.File},
		{Prefix: "filed", Location: f.Addr, CA: a.File, Credentials: file},
	})
	f.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
		_, password, ok := r.BasicAuth()
		if ok && (password == "right" || password == "of-the-file") {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		// It repeats what it was told.
		fmt.Fprintf(w, `{"errors":[{"code":"UNAUTHORIZED","message":"not %s (%s)"}]}`, password, r.Header.Get("Authorization"))
		return true
	})
	ref := f.Addr + "/team/app:1"
	pull := func(name string, auth *image.Auth) error {
		_, err := w.Pull(image.WithAuth(t.Context(), auth), image.Pull{Ref: parsed(name)}, nil)
		return err
	}
	if err := pull(ref, nil); !errs.Is(err, errs.Denied) || !strings.Contains(err.Error(), "without a user name") {
		t.Errorf("without a password: %v", err)
	}
	err := pull(ref, &image.Auth{Username: "robot", Password: "wrong-one"})
	if !errs.Is(err, errs.Denied) || !strings.Contains(err.Error(), "image.auth") {
		t.Errorf("with a wrong password: %v", err)
	}
	for _, secret := range []string{"wrong-one", "cm9ib3Q6d3Jvbmctb25l"} { // and as Basic has it
		if strings.Contains(fmt.Sprintf("%+v", err), secret) {
			t.Errorf("the error shows the password: %v", err)
		}
	}
	if s := fmt.Sprintf("%v %+v %#v", image.Auth{Username: "u", Password: "p4ss"}, &image.Auth{Username: "u", Password: "p4ss"},
		image.Auth{Username: "u", Password: "p4ss"}); strings.Contains(s, "p4ss") {
		t.Errorf("credentials print as %s", s)
	}
	if err := pull(ref, &image.Auth{Username: "robot", Password: "right"}); err != nil {
		t.Error(err)
	}
	if err := pull("filed/team/app:1", nil); err != nil {
		t.Error(err)
	}
}

func TestPullFromMirrors(t *testing.T) {
	a := rt.NewAuthority(t)
	main, mirror, liar := newFront(t, a), newFront(t, a), newFront(t, a)
	img := at.Image(t, bulky(t, "big", 1<<20))
	for _, f := range []*rt.Front{main, mirror, liar} {
		a.Push(t, f.Addr, "lib/team/app:1", img)
		a.Push(t, f.Addr, "library/single:1", img)
	}
	a.Push(t, main.Addr, "lib/team/only:1", at.Image(t, at.Tar(t, at.File("only"))))
	told := false
	watch := func(f *rt.Front) {
		f.Meddle(func(_ http.ResponseWriter, r *http.Request) bool {
			told = told || r.Header.Get("Authorization") != ""
			return false
		})
	}
	watch(mirror)
	w := newWorldOf(t, []registry.Registry{
		{
			Prefix: "registry.example.com", Location: main.Addr + "/lib", Mirrors: []string{liar.Addr + "/lib", mirror.Addr + "/lib"},
			CA: a.File,
		},
		{Prefix: "dead.example.com", Location: main.Addr + "/lib", Mirrors: []string{"127.0.0.1:1"}, CA: a.File},
		{Prefix: "", Location: mirror.Addr, Namespace: "library", CA: a.File},
		{Prefix: mirror.Addr, CA: a.File},
		{Prefix: liar.Addr, CA: a.File},
	})
	ctx := image.WithAuth(t.Context(), &image.Auth{Username: "u", Password: "p"})
	forget := func() { main.Forget(); mirror.Forget(); liar.Forget() }
	forget()
	// The first mirror's blobs are not what they should be: too long or others. The
	// next has them.
	liar.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
		d, ok := strings.CutPrefix(r.URL.Path, "/v2/lib/team/app/blobs/")
		if !ok {
			return false
		}
		m, err := img.Manifest()
		must(t, err)
		for _, b := range append(m.Layers, m.Config) {
			if b.Digest.String() == d {
				_, _ = w.Write(make([]byte, b.Size))
			}
		}
		if d == m.Config.Digest.String() {
			_, _ = w.Write([]byte("more"))
		}
		return true
	})
	i, err := w.Pull(ctx, image.Pull{Ref: parsed("registry.example.com/team/app:1")}, nil)
	must(t, err)
	if i.Ref() != "registry.example.com/team/app:1" || main.Asked("/blobs/") != 0 || mirror.Asked("/blobs/") != 2 || told {
		t.Errorf("%s: the registry was asked for %d blobs, its mirror for %d, which was told credentials: %v", i.Ref(),
			main.Asked("/blobs/"), mirror.Asked("/blobs/"), told)
	}
	// What no mirror has comes from the registry.
	if _, err := w.Pull(ctx, image.Pull{Ref: parsed("registry.example.com/team/only:1")}, nil); err != nil {
		t.Error(err)
	}
	if _, err := w.Pull(ctx, image.Pull{Ref: parsed("dead.example.com/team/only:1")}, nil); err != nil {
		t.Errorf("beside a mirror that is down: %v", err)
	}
	if i, err := w.Pull(t.Context(), image.Pull{Ref: parsed("single:1")}, nil); err != nil || i.Ref() != "single:1" {
		t.Errorf("a name without a host: %v, %v", i.Ref(), err)
	}
	_, err = w.Pull(ctx, image.Pull{Ref: parsed("registry.example.com/team/none:1")}, nil)
	if !errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), "mirrors tried first: registry "+liar.Addr) {
		t.Errorf("what nobody has: %v", err)
	}
	_, err = w.Pull(ctx, image.Pull{Ref: parsed("other.example.com/x")}, nil)
	if !errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), "[[registries]]") {
		t.Errorf("a name of nobody: %v", err)
	}
}
