package e2e_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	rt "github.com/sandboxd/sandboxd/pkg/image/registry/registrytest"
)

// bulk is the size of the layer that test images have over base, in bytes.
const bulk = 24 << 20

// puller is a daemon that pulls by a front from a real registry.
type puller struct {
	*lab
	*rt.Front
	base v1.Image
	dir  string
}

// newPuller starts all three. Images of the registry stand on base.
func newPuller(t *testing.T) *puller {
	t.Helper()
	hosttest.Root(t)
	p := &puller{dir: t.TempDir()}
	p.Front = rt.NewReal(t).Before(t)
	password := filepath.Join(p.dir, "credentials")
	if err := os.WriteFile(password, []byte(rt.User+":"+rt.Password+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, daemontest.Options{Config: []string{
		"[[registries]]", fmt.Sprintf("prefix = %q", p.Addr), fmt.Sprintf("ca = %q", p.File),
		"[[registries]]", `prefix = "registry.example.com"`, fmt.Sprintf("location = %q", p.Addr), fmt.Sprintf("ca = %q", p.File),
		fmt.Sprintf("credentials = %q", password),
	}})
	p.lab = &lab{host: h, T: t}
	p.ok("image", "export", "base", "-o", filepath.Join(p.dir, "base.tar"))
	// Its layer is here from now on, as the tar that the registry has of it.
	p.ok("image", "import", filepath.Join(p.dir, "base.tar"), "below:1")
	saved, err := tarball.ImageFromPath(filepath.Join(p.dir, "base.tar"), nil)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := saved.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("base has %d layers, %v", len(layers), err)
	}
	// once for all pushes
	packed, err := tarball.LayerFromOpener(layers[0].Uncompressed, tarball.WithCompressionLevel(gzip.BestSpeed),
		tarball.WithCompressedCaching)
	if err != nil {
		t.Fatal(err)
	}
	if p.base, err = mutate.AppendLayers(empty.Image, packed); err != nil {
		t.Fatal(err)
	}
	c, err := p.base.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", runtime.GOARCH
	if p.base, err = mutate.ConfigFile(p.base, c); err != nil {
		t.Fatal(err)
	}
	return p
}

// pushed makes an image of base and a bulky layer, pushes it and returns its name.
func (p *puller) pushed(ref string) string {
	p.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "opt/bulk", Size: bulk, Mode: 0o644})
	if err == nil {
		_, err = io.CopyN(w, rand.Reader, bulk)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		p.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		p.Fatal(err)
	}
	img, err := mutate.AppendLayers(p.base, l)
	if err != nil {
		p.Fatal(err)
	}
	p.Push(p.T, p.Addr, ref, img)
	p.Forget()
	return p.Addr + "/" + ref
}

// removeAll removes every pulled image and what pulls have left.
func (p *puller) removeAll() {
	p.deleteAll(p.T)
	for name := range strings.FieldsSeq(p.ok("image", "ls", "-q")) {
		if strings.Contains(name, "/") {
			p.ok("image", "rm", name)
		}
	}
	p.ok("image", "prune")
}

// far is a sandbox of an image of the registry.
func far(runtime, ref, password string) wire.CreateRequest {
	r := spec(runtime)
	r.Image = &wire.Image{URI: ref}
	if password != "" {
		r.Image.Auth = &wire.ImageAuth{Username: rt.User, Password: password}
	}
	return r
}

// history is what a sandbox's events were.
func (p *puller) history(id string) string {
	p.Helper()
	req, err := http.NewRequestWithContext(p.Context(), http.MethodGet, "http://"+p.TCP+"/v1/sandboxes/"+id+"/diagnostics/events", nil)
	if err != nil {
		p.Fatal(err)
	}
	req.Header.Set("OPEN-SANDBOX-API-KEY", daemontest.Key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		p.Fatalf("events: %s %s, %v", resp.Status, b, err)
	}
	return string(b)
}

// secretless fails the test if what the daemon keeps or has said holds a password.
func (p *puller) secretless(secrets ...string) {
	p.Helper()
	for _, s := range secrets {
		if strings.Contains(p.host.Log(), s) {
			p.Errorf("the log holds %q", s)
		}
		for _, d := range []string{p.StateDir, p.Instance.RunDir()} {
			err := filepath.WalkDir(d, func(path string, e fs.DirEntry, err error) error {
				if err != nil || e.IsDir() {
					if name := filepath.Base(path); e != nil && (name == "layers" || name == "pool" || name == "rootfs") { // of guests
						return fs.SkipDir
					}
					return nil
				}
				if fi, err := e.Info(); err != nil || !fi.Mode().IsRegular() || fi.Size() > 256<<20 {
					return nil //nolint:nilerr // it is gone; or the pool
				}
				if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, []byte(s)) {
					p.Errorf("%s holds %q", path, s)
				}
				return nil
			})
			if err != nil {
				p.Error(err)
			}
		}
	}
}

// TestPulls tells of sandboxes whose images are in a registry with TLS and a
// password, on both runtimes.
func TestPulls(t *testing.T) {
	p := newPuller(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			p := &puller{lab: &lab{host: p.host, T: t, runtime: runtime}, Front: p.Front, base: p.base, dir: p.dir}
			for _, story := range []struct {
				name string
				tell func(*puller)
			}{
				{"by create", tellPullByCreate},
				{"by command", tellPullByCommand},
				{"refused", tellPullRefused},
				{"at once", tellPullAtOnce},
				{"cut off", tellPullCut},
				{"lies", tellPullLies},
			} {
				t.Run(story.name, func(t *testing.T) {
					p := &puller{lab: &lab{host: p.host, T: t, runtime: runtime}, Front: p.Front, base: p.base, dir: p.dir}
					defer func() { p.Meddle(nil); p.Cut(nil); p.removeAll() }()
					story.tell(p)
				})
			}
		})
	}
	p.secretless(rt.Password, "not-the-password-1234")
	p.ok("image", "rm", "below:1")
}

// tellPullByCreate: the answer does not wait for the image, the events say how
// far it is, and then the sandbox is like any other.
func tellPullByCreate(p *puller) {
	ref := p.pushed("team/app:1")
	hold := make(chan struct{})
	open := sync.OnceFunc(func() { close(hold) })
	defer open()
	p.Meddle(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			<-hold
		}
		return false
	})
	var sb wire.Sandbox
	soon(p.T, time.Second, "answer", func() time.Duration { // the registry says nothing yet
		return took(func() {
			var err error
			if sb, err = p.api.Create(p.Context(), far(p.runtime, ref, rt.Password), false); err != nil {
				p.Fatal(err)
			}
		})
	})
	p.awaitMessage(sb.ID, "pulling image "+ref)
	open()
	sb = p.awaitState(p.T, sb.ID, wire.Running, 30*time.Second)
	p.answers(p.T, sb.ID)
	if out, err := p.exec(p.Context(), sb.ID, "stat", "-c", "%s", "/opt/bulk"); err != nil || strings.TrimSpace(out) != fmt.Sprint(bulk) {
		p.Errorf("its file has %q bytes, %v", out, err)
	}
	if h := p.history(sb.ID); !strings.Contains(h, "pulling image "+ref+": downloaded") ||
		!strings.Contains(h, "image "+ref+" is on this host") ||
		strings.Contains(h, rt.Password) {
		p.Errorf("its events: %s", h)
	}
	if sb.Image == nil || sb.Image.URI != ref || sb.Image.Auth != nil {
		p.Errorf("its image is %v", sb.Image)
	}
	// Now it is here, for whoever may create.
	p.Forget()
	p.create(p.T, far(p.runtime, ref, ""))
	if n := p.Asked("GET"); n > 0 {
		p.Errorf("an image that is here was asked for %d times", n)
	}
}

func (p *puller) awaitMessage(id, part string) {
	p.Helper()
	eventually(p.T, 10*time.Second, func() error {
		sb, err := p.api.Get(p.Context(), id)
		if err == nil && (sb.Status.State != wire.Pending || !strings.Contains(sb.Status.Message, part)) {
			err = fmt.Errorf("it is %+v, want a message of %q", sb.Status, part)
		}
		return err
	})
}

// tellPullByCommand: with a password from a pipe, or from the configuration; what
// is here does not come again.
func tellPullByCommand(p *puller) {
	ref := p.pushed("team/cli:1")
	r := p.feed(strings.NewReader(rt.Password+"\n"), "image", "pull", "-u", rt.User, "--password-stdin", ref)
	if r != (result{ref + "\n", "", 0}) {
		p.Fatalf("%+v", r)
	}
	p.Forget()
	if out := p.ok("image", "pull", "registry.example.com/team/cli:1"); out != "registry.example.com/team/cli:1\n" {
		p.Errorf("%q", out)
	}
	if n := p.Asked("/blobs/"); n != 1 { // its config
		p.Errorf("the same image asks for %d blobs", n)
	}
	if out := p.ok("run", "--runtime", p.runtime, "registry.example.com/team/cli:1", "--", "stat", "-c", "%s",
		"/opt/bulk"); strings.TrimSpace(out) != fmt.Sprint(bulk) {
		p.Errorf("its file has %q bytes", out)
	}
	p.wants(p.ctl("image", "pull", "other.example.com/app"), 125, "[[registries]]", "image import")
	p.wants(p.ctl("image", "pull", "--password-stdin", ref), 125, "-u")
}

// tellPullRefused: a wrong password, none, an unknown tag: Failed, with the step
// and the cause.
func tellPullRefused(p *puller) {
	ref := p.pushed("team/app:1")
	for _, c := range []struct{ ref, password, say string }{
		{ref, "not-the-password-1234", "with the user name and password of the request (image.auth) (401"},
		{ref, "", "without a user name and a password (401"},
		{p.Addr + "/team/app:none", rt.Password, "has no team/app:none (404"},
		{p.Addr + "/team/none:1", rt.Password, "has no team/none:1 (404"},
	} {
		sb, err := p.api.Create(p.Context(), far(p.runtime, c.ref, c.password), true)
		if err != nil || sb.Status.State != wire.Failed || !strings.Contains(sb.Status.Message, "step image") ||
			!strings.Contains(sb.Status.Message, c.say) {
			p.Errorf("%s: %+v, %v; want it to say %q", c.ref, sb.Status, err, c.say)
		}
		if h := p.history(sb.ID); strings.Contains(h, "not-the-password-1234") {
			p.Errorf("the events show the password: %s", h)
		}
	}
	r := p.feed(strings.NewReader("not-the-password-1234"), "image", "pull", "-u", rt.User, "--password-stdin", ref)
	p.wants(r, 125, "401")
	if strings.Contains(r.out+r.errout, "not-the-password-1234") {
		p.Errorf("%+v", r)
	}
}

// tellPullAtOnce: many creations of one image download it once.
func tellPullAtOnce(p *puller) {
	ref := p.pushed("team/once:1")
	var all sync.WaitGroup
	for range 5 {
		all.Go(func() {
			sb, err := p.api.Create(p.Context(), far(p.runtime, ref, rt.Password), true)
			if err != nil || sb.Status.State != wire.Running {
				p.Errorf("%+v, %v", sb.Status, err)
			}
		})
	}
	all.Wait()
	if m, b := p.Asked("/manifests/"), p.Asked("/blobs/"); m != 1 || b != 2 { // config and layer; base is here
		p.Errorf("%d requests for manifests and %d for blobs", m, b)
	}
}

// tellPullCut: the connection breaks, again and again; the pull goes on.
func tellPullCut(p *puller) {
	ref := p.pushed("team/cut:1")
	p.Cut(func(r *http.Request) int64 {
		if strings.Contains(r.URL.Path, "/blobs/") {
			return bulk / 3
		}
		return -1
	})
	sb := p.create(p.T, far(p.runtime, ref, rt.Password))
	p.answers(p.T, sb.ID)
	if n, sent := p.Asked("/blobs/"), p.Sent(); n < 4 || sent > bulk*5/4 {
		p.Errorf("%d requests for blobs, %d bytes", n, sent)
	}
}

// tellPullLies: nothing of what lies is ever visible.
func tellPullLies(p *puller) {
	ref := p.pushed("team/liar:1")
	for say, lie := range map[string]func(w http.ResponseWriter, r *http.Request){
		"sent wrong content for": func(w http.ResponseWriter, r *http.Request) { rt.Endless(r.Context(), w, 1<<40) },
		"address of this host or its network": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://"+p.TCP+"/v1/sandboxes", http.StatusTemporaryRedirect)
		},
	} {
		p.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/blobs/") {
				lie(w, r)
				return true
			}
			return false
		})
		sb, err := p.api.Create(p.Context(), far(p.runtime, ref, rt.Password), true)
		if err != nil || sb.Status.State != wire.Failed || !strings.Contains(sb.Status.Message, say) {
			p.Errorf("%+v, %v; want it to say %q", sb.Status, err, say)
		}
		if _, err := p.api.Images().Inspect(p.Context(), ref); !errs.Is(err, errs.NotFound) {
			p.Errorf("the image is here: %v", err)
		}
	}
}

// TestPullKilled kills the daemon in the middle of a pull, and at the moment at
// which the image becomes the sandbox's: the sandbox has failed and says so,
// nothing is visible of half an image, and the next pull goes on.
func TestPullKilled(t *testing.T) {
	p := newPuller(t)
	ref := p.pushed("team/killed:1")
	half := make(chan struct{})
	var once sync.Once
	p.Cut(func(r *http.Request) int64 {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return -1
		}
		return bulk / 2
	})
	blobs := 0
	p.Meddle(func(_ http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		if blobs++; blobs == 3 { // the config, half of the layer
			once.Do(func() { close(half) })
			<-r.Context().Done()
		}
		return false
	})
	sb, err := p.api.Create(t.Context(), far("runc", ref, rt.Password), false)
	if err != nil {
		t.Fatal(err)
	}
	<-half
	p.Kill()
	p.Meddle(nil)
	p.Cut(nil)
	p.Start()
	sb = p.awaitState(t, sb.ID, wire.Failed, 10*time.Second)
	if !strings.Contains(sb.Status.Message, "sandboxd stopped in the middle") {
		t.Errorf("%+v", sb.Status)
	}
	if _, err := p.api.Images().Inspect(t.Context(), ref); !errs.Is(err, errs.NotFound) {
		t.Errorf("half an image: %v", err)
	}
	p.Forget()
	for _, runtime := range runtimes {
		p.answers(t, p.create(t, far(runtime, ref, rt.Password)).ID)
	}
	if sent := p.Sent(); sent > bulk*6/10 {
		t.Errorf("%d bytes came again", sent)
	}
	p.removeAll()
	p.Stop()
	for _, point := range []string{"store:put:creating", "after:store:put:creating"} {
		if err := p.StartArmed(point + "=kill"); err != nil {
			t.Fatal(err)
		}
		sb, err := p.api.Create(t.Context(), far("runsc", ref, rt.Password), false)
		if err != nil {
			t.Fatal(err)
		}
		<-p.Ended()
		p.Start()
		p.awaitState(t, sb.ID, wire.Failed, 10*time.Second)
		p.answers(t, p.create(t, far("runsc", ref, "")).ID) // the image was here
		p.removeAll()
		p.Stop()
	}
	p.Start()
	p.secretless(rt.Password)
	p.ok("image", "rm", "below:1")
}
