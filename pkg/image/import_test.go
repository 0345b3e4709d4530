package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
	at "github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/store"
)

func TestMain(m *testing.M) {
	verbs := archive.Verbs()
	verbs[layer.UnpackVerb] = layer.Unpack
	plan := verbs[archive.PlanVerb]
	verbs[archive.PlanVerb] = func(args []string) error {
		if _, err := unix.Write(confine.FirstFile, nil); err != unix.EBADF { //nolint:errorlint // as write(2) says it
			return errs.New(errs.Invalid, "the child can write to the archive: %v", err)
		}
		return plan(args)
	}
	confine.MainOfTest(verbs)
	os.Exit(m.Run())
}

// world is a store of images on the real storage and the real database.
type world struct {
	*image.Store
	dir   string
	disks *snapshot.Store
	used  map[string][]string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldOf(t, nil)
}

// newWorldOf is newWorld with registries.
func newWorldOf(t *testing.T, registries []registry.Registry) *world {
	t.Helper()
	hosttest.Root(t)
	hosttest.Leaks(t, instance.Instance('s'))
	w := &world{dir: t.TempDir(), used: map[string][]string{}}
	self, err := os.Open("/proc/self/ns/user") // nothing is mounted here
	must(t, err)
	t.Cleanup(func() { self.Close() })
	w.disks, err = snapshot.Open(t.Context(), snapshot.Config{
		Instance: 's', StateDir: filepath.Join(w.dir, "state"), RunDir: filepath.Join(w.dir, "run"), Pool: pool.Plain,
		IdentityUserNS: self, UserNS: func(string) (*os.File, error) { return nil, errors.New("no sandboxes here") },
	})
	must(t, err)
	db, err := store.Open(filepath.Join(w.dir, "db"), store.Options{})
	must(t, err)
	t.Cleanup(func() { must(t, errors.Join(db.Close(), w.disks.Close())) })
	client, err := registry.New(registries)
	must(t, err)
	w.Store, err = image.Open(image.Config{
		Registries: client, BlobsDir: filepath.Join(w.dir, "blobs"),
		Layers: w.disks.Layers, DB: db, TempDir: filepath.Join(w.dir, "build"),
		Users: func(l string) []string { return w.used[l] },
	})
	must(t, err)
	return w
}

// parsed is the reference of a URI, which must be one; the zero one of an empty URI.
func parsed(uri string) image.Reference {
	if uri == "" {
		return image.Reference{}
	}
	ref, err := image.ParseReference(uri)
	if err != nil {
		panic(err)
	}
	return ref
}

// errorOf is the error of Remove alone.
func errorOf(_ image.Pruned, err error) error { return err }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// holds fails the test unless the store holds so many images and layers, and
// nothing that is half of one.
func (w *world) holds(t *testing.T, images, layers int) {
	t.Helper()
	ctx := context.Background()
	all, err := w.List(ctx)
	must(t, err)
	named, err := w.disks.Layers.List(ctx)
	must(t, err)
	if len(all) != images || len(named) != layers {
		t.Errorf("%d images and %d layers, want %d and %d", len(all), len(named), images, layers)
	}
	half, _ := filepath.Glob(filepath.Join(w.dir, "state", "layers", "new-*"))
	kept, _ := filepath.Glob(filepath.Join(w.dir, "build", "*"))
	if len(half)+len(kept) > 0 {
		t.Errorf("left: %q and %q", half, kept)
	}
}

func gz(b []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(b)
	_ = w.Close()
	return out.Bytes()
}

// bomb is b and 256 MiB of zeros, packed: a member of gzip for each MiB.
func bomb(b []byte) []byte {
	return append(gz(b), bytes.Repeat(gz(make([]byte, 1<<20)), 256)...)
}

func zst(b []byte) []byte {
	w, _ := zstd.NewWriter(nil)
	return w.EncodeAll(b, nil)
}

func TestImport(t *testing.T) {
	lower := at.Tar(t, at.Dir("etc"), at.File("etc/below"), at.File("etc/gone"))
	upper := at.Tar(t, at.Dir("etc"), at.File("etc/.wh.gone"), at.File("etc/above"))
	img := at.Image(t, lower, upper)
	for name, c := range map[string]struct {
		archive []byte
		as      string
		image   bool
	}{
		"docker":        {at.Docker(t, img, "team/app:7"), "", true},
		"docker, gzip":  {gz(at.Docker(t, img, "team/app:7")), "mine", true},
		"oci":           {at.OCI(t, img), "", true},
		"oci, zstd":     {zst(at.OCI(t, img)), "mine:2", true},
		"rootfs":        {lower, "root", false},
		"rootfs, gzip":  {gz(lower), "root", false},
		"rootfs, zstd":  {zst(lower), "root", false},
		"rootfs padded": {append(slices.Clone(lower), make([]byte, 1<<20)...), "root", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			unpacked := 0
			i, err := w.Import(t.Context(), image.Archive{Ref: parsed(c.as)}, bytes.NewReader(c.archive), func(p image.Progress) {
				if p.Stage == "unpack" {
					unpacked++
				}
			})
			must(t, err)
			if !c.image {
				if len(i.Layers) != 1 || i.Ref() != "root:latest" || i.Config.Workdir != "/" || unpacked > 0 {
					t.Errorf("image %+v, %d told", i, unpacked)
				}
				w.holds(t, 1, 1)
				return
			}
			if want := map[string]string{
				"docker": "team/app:7", "oci": "from-oci:1", "docker, gzip": "mine:latest",
				"oci, zstd": "mine:2",
			}[name]; i.Ref() != want {
				t.Errorf("it is called %s, want %s", i.Ref(), want)
			}
			if len(i.Layers) != 2 || i.Config.User != "1000:1000" || i.Config.Labels["team"] != "a" || i.Bytes == 0 || unpacked == 0 ||
				strings.Join(i.Config.Command(nil), " ") != "/bin/app -v serve" {
				t.Errorf("image %+v, %d told", i, unpacked)
			}
			w.holds(t, 1, 2)
			dir, err := w.disks.Layers.Path(i.Layers[1])
			must(t, err)
			fi, err := os.Lstat(filepath.Join(dir, "etc/gone"))
			if err != nil || fi.Mode()&os.ModeCharDevice == 0 {
				t.Errorf("the whiteout: %v, %v", fi, err)
			}
			// Again, under another name: nothing is unpacked twice.
			unpacked = 0
			again, err := w.Import(t.Context(), image.Archive{Ref: parsed("again")}, bytes.NewReader(c.archive), func(p image.Progress) {
				if p.Stage == "unpack" {
					unpacked++
				}
			})
			if err != nil || again.Digest != i.Digest || again.Bytes != i.Bytes || unpacked > 0 {
				t.Errorf("again: %+v, %v, %d told; first %+v", again, err, unpacked, i)
			}
			w.holds(t, 2, 2)
			must(t, errorOf(w.Remove(t.Context(), parsed("again"))))
			w.holds(t, 1, 2)
			must(t, errorOf(w.Remove(t.Context(), parsed(i.Ref()))))
			w.holds(t, 0, 0)
		})
	}
}

// TestImportGuess: an archive of an image whose first member has another name than those of images
// is not taken for a root file system. What the client says it is counts.
func TestImportGuess(t *testing.T) {
	first := at.Tar(t, at.File("README"))
	first = first[:len(first)-1024] // without its end
	layer := at.Tar(t, at.File("a"))
	docker := append(slices.Clone(first), at.Docker(t, at.Image(t, layer), "x:1")...)
	oci := append(slices.Clone(first), at.OCI(t, at.Image(t, layer))...)
	for name, c := range map[string]struct {
		archive []byte
		format  string
		want    string // the user of the image, or a part of the error
		refused bool
	}{
		"docker":              {docker, "", "it has manifest.json at its top. Give --format docker, or", true},
		"docker, auto":        {gz(docker), image.FormatAuto, "it has manifest.json at its top", true},
		"docker, said":        {docker, image.FormatDocker, "1000:1000", false},
		"docker, as a rootfs": {docker, image.FormatRootfs, "", false},
		"oci":                 {oci, "", "it has oci-layout and index.json at its top. Give --format oci, or", true},
		"oci, said":           {oci, image.FormatOCI, "1000:1000", false},
		"half a layout":       {at.Tar(t, at.File("README"), at.File("index.json"), at.File("srv/manifest.json")), "", "", false},
		"directories":         {at.Tar(t, at.File("README"), at.Dir("manifest.json")), "", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			i, err := w.Import(t.Context(), image.Archive{Ref: parsed("mine"), Format: c.format}, bytes.NewReader(c.archive), nil)
			if c.refused {
				if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v; want invalid and %q", err, c.want)
				}
				w.holds(t, 0, 0)
			} else if err != nil || i.Config.User != c.want || len(i.Layers) != 1 {
				t.Errorf("%+v, %v; want the user %q", i, err, c.want)
			}
		})
	}
}

// What dockerd 20.10.24 wrote: an image of `docker import`, a file added by
// `docker cp`, `docker commit`, `docker save | gzip`.
func TestImportOfDocker(t *testing.T) {
	w := newWorld(t)
	open := func(name string) io.Reader {
		f, err := os.Open(filepath.Join("testdata", name))
		must(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	i, err := w.Import(t.Context(), image.Archive{}, open("docker-20.10-save.tar.gz"), nil)
	must(t, err)
	if i.Ref() != "two:2" || len(i.Layers) != 2 || !slices.Contains(i.Config.Env, "A=b") || i.Config.Workdir != "/srv" ||
		i.Config.User != "5:6" || i.Config.Labels["k"] != "v" {
		t.Errorf("image %+v", i)
	}
	dir, err := w.disks.Layers.Path(i.Layers[1])
	must(t, err)
	if b, err := os.ReadFile(filepath.Join(dir, "etc/n")); err != nil || string(b) != "new\n" {
		t.Errorf("the second layer: %q, %v", b, err)
	}
	if _, err := w.Import(t.Context(), image.Archive{}, open("docker-20.10-save-two.tar.gz"), nil); !errs.Is(err, errs.Invalid) ||
		!strings.Contains(err.Error(), "two:1") {
		t.Errorf("an archive of two images: %v", err)
	}
	w.holds(t, 1, 2)
}

// What Export gives, Import takes, and then Export gives the same.
func TestExport(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	img := at.Image(t, at.Tar(t, at.Dir("a"), at.File("a/b"), at.File("c")), at.Tar(t, at.Dir("a"), at.File("a/.wh..wh..opq"),
		at.File(".wh.c")))
	i, err := w.Import(ctx, image.Archive{Ref: parsed("x:1")}, bytes.NewReader(at.OCI(t, img)), nil)
	must(t, err)
	var first, second bytes.Buffer
	must(t, w.Export(ctx, i, &first))
	j, err := w.Import(ctx, image.Archive{Replace: true}, bytes.NewReader(first.Bytes()), nil)
	must(t, err)
	if j.Ref() != "x:1" || j.Bytes != i.Bytes || !maps.Equal(j.Config.Labels, i.Config.Labels) || j.Config.User != i.Config.User ||
		!slices.Equal(j.Config.Env, i.Config.Env) || strings.Join(j.Config.Command([]string{"x"}), " ") != "/bin/app -v x" ||
		!slices.Equal(j.Config.Cmd, i.Config.Cmd) {
		t.Errorf("came back as %+v, was %+v", j, i)
	}
	j.Created = i.Created
	must(t, w.Export(ctx, j, &second))
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the export of an export differs")
	}
	p, err := w.Prune(ctx, false, time.Time{}) // the layers of the first, whose name was taken
	if err != nil || len(p.Layers) != 2 || p.Bytes != i.Bytes {
		t.Errorf("pruned %+v, %v", p, err)
	}
	w.holds(t, 1, 2)

	// The same as an OCI archive; podman reads it in TestImages (test/e2e).
	k, err := w.Import(ctx, image.Archive{Replace: true, Format: image.FormatOCI}, bytes.NewReader(first.Bytes()), nil)
	if err != nil || k.Ref() != "x:1" || !slices.Equal(k.Layers, j.Layers) || k.Config.User != i.Config.User {
		t.Errorf("as an OCI archive it is %+v, %v", k, err)
	}
	for tr := tar.NewReader(&first); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		must(t, err)
		b, err := io.ReadAll(tr)
		must(t, err)
		if dir, name := path.Split(h.Name); dir == "blobs/sha256/" && name != fmt.Sprintf("%x", sha256.Sum256(b)) {
			t.Errorf("%s is another blob", h.Name)
		} else if dir != "blobs/sha256/" && !slices.Contains([]string{"index.json", "oci-layout", "manifest.json"}, h.Name) {
			t.Errorf("an OCI layout has no %s", h.Name)
		}
	}
}

// Who may not replace an image gets none in its place, by its name in the archive
// neither, and nothing is left of the attempt.
func TestImportNotReplaced(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	first, second := at.Tar(t, at.File("a")), at.Tar(t, at.File("b"))
	i, err := w.Import(ctx, image.Archive{Ref: parsed("python")}, bytes.NewReader(first), nil)
	must(t, err)
	for name, c := range map[string]struct {
		archive []byte
		as      string
	}{
		"named": {second, "python"}, "with the tag": {second, "python:latest"},
		"named by the archive": {at.Docker(t, at.Image(t, second), "python:latest"), ""},
	} {
		_, err := w.Import(ctx, image.Archive{Ref: parsed(c.as)}, bytes.NewReader(c.archive), nil)
		if !errs.Is(err, errs.Denied) || !strings.Contains(err.Error(), "image python:latest exists") {
			t.Errorf("%s: %v", name, err)
		}
		w.holds(t, 1, 1)
	}
	again, err := w.Import(ctx, image.Archive{Ref: parsed("python")}, bytes.NewReader(gz(first)), nil)
	if err != nil || again.Digest != i.Digest {
		t.Errorf("the same again: %s, %v", again.Digest, err)
	}
	if _, err := w.Import(ctx, image.Archive{Ref: parsed("mine")}, bytes.NewReader(second), nil); err != nil {
		t.Errorf("under another name: %v", err)
	}
	if now, err := w.Import(ctx, image.Archive{Ref: parsed("python"), Replace: true}, bytes.NewReader(second), nil); err != nil ||
		now.Digest == i.Digest {
		t.Errorf("replaced: %s, %v", now.Digest, err)
	}
}

// TestImportNames: an image gets all names in its archive, or the one that it is given; none of
// them if it may not have one.
func TestImportNames(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	other := at.Tar(t, at.File("other"))
	b := at.Edit(t, at.Docker(t, at.Image(t, at.Tar(t, at.File("a"))), "x:1"), func(h *tar.Header, c []byte) (*tar.Header, []byte) {
		if h.Name == "manifest.json" {
			c = regexp.MustCompile(`"RepoTags":\["[^"]*"\]`).ReplaceAll(c, []byte(`"RepoTags":["x:1","not a name","x","x:1","docker.io/library/y:2"]`))
		}
		return h, c
	})
	names := func() (all []string) {
		list, err := w.List(ctx)
		must(t, err)
		for _, i := range list {
			all = append(all, i.Ref())
		}
		return all
	}
	_, err := w.Import(ctx, image.Archive{Ref: parsed("y:2")}, bytes.NewReader(other), nil)
	must(t, err)
	if _, err := w.Import(ctx, image.Archive{}, bytes.NewReader(b), nil); !errs.Is(err, errs.Denied) ||
		!strings.Contains(err.Error(), "image y:2 exists") {
		t.Errorf("a name that another image has: %v", err)
	}
	w.holds(t, 1, 1)
	i, err := w.Import(ctx, image.Archive{Ref: parsed("mine")}, bytes.NewReader(b), nil)
	if got := names(); err != nil || i.Ref() != "mine:latest" || !slices.Equal(got, []string{"mine:latest", "y:2"}) {
		t.Errorf("under one name: %s, %v; %q", i.Ref(), err, got)
	}
	i, err = w.Import(ctx, image.Archive{Replace: true}, bytes.NewReader(b), nil)
	if got := names(); err != nil || i.Ref() != "x:1" || !slices.Equal(got, []string{"mine:latest", "x:1", "x:latest", "y:2"}) {
		t.Errorf("under its own: %s, %v; %q", i.Ref(), err, got)
	}
	for _, name := range []string{"x:latest", "y:2"} {
		if j, err := w.Resolve(ctx, parsed(name)); err != nil || j.Digest != i.Digest || j.Ref() != name {
			t.Errorf("%s is %s, %v; want %s", name, j.Digest, err, i.Digest)
		}
	}
}

// TestUnusedFields: what sandboxd does not use of a config is shown and exported as it came. It
// changes no digest, so only an import that may replace the image changes it.
func TestUnusedFields(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	archive := at.Docker(t, at.Image(t, at.Tar(t, at.File("a"))), "x:1")
	changed := at.Edit(t, archive, func(h *tar.Header, c []byte) (*tar.Header, []byte) {
		if strings.HasPrefix(h.Name, "sha256:") {
			c = bytes.Replace(c, []byte(`"Healthcheck":{`), []byte(`"Healthcheck":{"StartInterval":5,`), 1)
			c = bytes.Replace(c, []byte(`"OnBuild":["RUN x"]`), []byte(`"OnBuild":null`), 1)
		}
		return h, c
	})
	shown := func() (all []string) {
		i, err := w.Resolve(ctx, parsed("x:1"))
		must(t, err)
		for _, k := range slices.Sorted(maps.Keys(i.Unused)) {
			all = append(all, k+string(i.Unused[k]))
		}
		return all
	}
	first := []string{
		`ExposedPorts{"80/tcp":{}}`, `Healthcheck{"Test":["CMD","true"],"Retries":3}`, `OnBuild["RUN x"]`, `Shell["/bin/ash"]`,
		`Volumes{"/data":{}}`,
	}
	i, err := w.Import(ctx, image.Archive{}, bytes.NewReader(archive), nil)
	must(t, err)
	if got := shown(); !slices.Equal(got, first) || i.Config.StopSignal != "SIGQUIT" ||
		!strings.Contains(strings.Join(i.Notes(), "; "), "HEALTHCHECK") {
		t.Errorf("%q, %+v, notes %q", got, i.Config, i.Notes())
	}
	j, err := w.Import(ctx, image.Archive{}, bytes.NewReader(changed), nil)
	if got := shown(); err != nil || j.Digest != i.Digest || !slices.Equal(got, first) || len(j.Unused) != len(first) {
		t.Errorf("without the right to replace: %q, %v", got, err)
	}
	j, err = w.Import(ctx, image.Archive{Replace: true}, bytes.NewReader(changed), nil)
	if got := shown(); err != nil || j.Digest != i.Digest || len(got) != 4 ||
		got[1] != `Healthcheck{"StartInterval":5,"Test":["CMD","true"],"Retries":3}` {
		t.Errorf("with it: %q, %v", got, err)
	}
	second := shown()
	var out bytes.Buffer
	must(t, w.Export(ctx, j, &out))
	must(t, errorOf(w.Remove(ctx, parsed("x:1"))))
	k, err := w.Import(ctx, image.Archive{}, &out, nil)
	if got := shown(); err != nil || k.Config.StopSignal != "SIGQUIT" || !slices.Equal(got, second) {
		t.Errorf("it came back as %q, %+v, %v", got, k.Config, err)
	}
	if c, err := w.Commit(ctx, k, parsed("mine"), false, bytes.NewReader(at.Tar(t, at.File("b")))); err != nil ||
		c.Config.StopSignal != "SIGQUIT" {
		t.Errorf("a commit is stopped with %q, %v", c.Config.StopSignal, err)
	}
	// Nor does an image get fields that it had not, as those of earlier releases and many others.
	none := at.Edit(t, archive, func(h *tar.Header, c []byte) (*tar.Header, []byte) {
		if strings.HasPrefix(h.Name, "sha256:") {
			for _, field := range []string{"ExposedPorts", "Healthcheck", "OnBuild", "Shell", "Volumes"} {
				c = bytes.Replace(c, []byte(`"`+field+`":`), []byte(`"X`+field+`":`), 1)
			}
		}
		return h, c
	})
	for _, c := range []struct {
		archive []byte
		replace bool
		want    int
	}{{none, true, 0}, {archive, false, 0}, {archive, true, len(first)}} {
		j, err := w.Import(ctx, image.Archive{Replace: c.replace}, bytes.NewReader(c.archive), nil)
		if got := shown(); err != nil || j.Digest != i.Digest || len(got) != c.want || len(j.Unused) != c.want {
			t.Errorf("with the right to replace %v: %q, %v; want %d fields", c.replace, got, err, c.want)
		}
	}
}

// TestImportWithoutLayers: an image of nothing has a layer here, so that it is never taken for
// one that has yet to be pulled; and an export of it is an image.
func TestImportWithoutLayers(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	for range 2 { // the second finds the layer
		i, err := w.Import(ctx, image.Archive{Replace: true}, bytes.NewReader(at.Docker(t, at.Image(t), "nothing:1")), nil)
		if err != nil || len(i.Layers) != 1 || i.Config.User != "1000:1000" {
			t.Fatalf("%+v, %v", i, err)
		}
		w.holds(t, 1, 1)
		var out bytes.Buffer
		must(t, w.Export(ctx, i, &out))
		j, err := w.Import(ctx, image.Archive{Ref: parsed("back")}, &out, nil)
		if err != nil || j.Digest != i.Digest {
			t.Errorf("it came back as %+v, %v; was %+v", j, err, i)
		}
		must(t, errorOf(w.Remove(ctx, parsed("back"))))
	}
}

// TestImportOfAnotherMachine: an image for another machine says so, and is exported as what it is.
func TestImportOfAnotherMachine(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	img := at.Image(t, at.Tar(t, at.File("a")))
	c, err := img.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.Architecture, c.Variant = "s390x", "z9"
	img, err = mutate.ConfigFile(img, c)
	must(t, err)
	i, err := w.Import(ctx, image.Archive{}, bytes.NewReader(at.OCI(t, img)), nil)
	if notes := strings.Join(i.Notes(), "; "); err != nil || !strings.Contains(notes, "it is for linux/s390x/z9, and this host is") {
		t.Fatalf("%+v, %v, notes %q", i, err, notes)
	}
	var out bytes.Buffer
	must(t, w.Export(ctx, i, &out))
	j, err := w.Import(ctx, image.Archive{Ref: parsed("back")}, &out, nil)
	if err != nil || j.Config.Platform != i.Config.Platform {
		t.Errorf("it came back as %+v, %v", j, err)
	}
}

// A bad archive is refused in words, and leaves nothing.
func TestImportBad(t *testing.T) {
	hosttest.Root(t)
	layer, other := at.Tar(t, at.File("a"), at.File("b")), at.Tar(t, at.File("z"))
	img := at.Image(t, layer)
	docker, oci := at.Docker(t, img, "x:1"), at.OCI(t, img)
	swap := func(b, with []byte, pattern string) []byte {
		return at.Edit(t, b, func(h *tar.Header, c []byte) (*tar.Header, []byte) {
			if ok, _ := filepath.Match(pattern, h.Name); ok && bytes.HasPrefix(c, []byte{0x1f, 0x8b}) {
				c = with
			}
			return h, c
		})
	}
	for name, c := range map[string]struct {
		archive []byte
		says    string
	}{
		"docker: another layer":      {swap(docker, gz(other), "*.tar.gz"), "digest"},
		"docker: layer not packed":   {swap(docker, other, "*.tar.gz"), "digest"},
		"docker: layer cut off":      {swap(docker, gz(layer)[:30], "*.tar.gz"), "cut off"},
		"docker: layer is a bomb":    {swap(docker, bomb(nil), "*.tar.gz"), "bomb"},
		"docker: layer is hostile":   {at.Docker(t, at.Image(t, at.Tar(t, at.File("../x"))), "x:1"), "leaves"},
		"docker: whiteout of itself": {at.Docker(t, at.Image(t, at.Tar(t, at.File(".wh.."))), "x:1"), "whiteout"},
		"docker: device 0:0": {
			at.Docker(t, at.Image(t, at.Tar(t, tar.Header{Typeflag: tar.TypeChar, Name: "null"})), "x:1"),
			"not a file, directory or link",
		},
		"docker: owner": {
			at.Docker(t, at.Image(t, at.Tar(t, tar.Header{Typeflag: tar.TypeReg, Name: "a", Uid: 70_000})), "x:1"),
			"layer 1 of 1: the layer sets the owner of \"a\" to 70000:0, and a sandbox has only the ids 0 to 65535",
		},
		"docker: second layer is bad": {
			at.Docker(t, at.Image(t, layer, at.Tar(t, at.File("../x"))), "x:1"),
			"layer 2 of 2: the layer has an invalid file name \"../x\": leaves",
		},
		"docker: cut off":            {docker[:len(docker)-2000], "cut off"},
		"oci: another layer":         {swap(oci, gz(other), "blobs/sha256/*"), "digest"},
		"oci: the same, packed anew": {swap(oci, zst(layer), "blobs/sha256/*"), "digest"},
		"rootfs: cut off":            {layer[:len(layer)-1024], "cut off"},
		"rootfs: cut off in a file":  {layer[:700], "cut off"},
		"rootfs: gzip cut off":       {gz(layer)[:len(gz(layer))-10], "cut off"},
		"rootfs: a bomb":             {bomb(at.Tar(t, at.File("a"))), "bomb"},
		"nothing":                    {nil, "empty"},
		"text":                       {bytes.Repeat([]byte("hello "), 1000), "not a tar"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			_, err := w.Import(t.Context(), image.Archive{Ref: parsed("bad")}, bytes.NewReader(c.archive), nil)
			if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v; want invalid and %q", err, c.says)
			}
			w.holds(t, 0, 0)
		})
	}
}

func TestImportEnds(t *testing.T) {
	w := newWorld(t)
	docker := at.Docker(t, at.Image(t, at.Tar(t, at.File("a"))), "x:1")
	left := errors.New("the client left")
	for name, b := range map[string][]byte{"image": docker, "rootfs": at.Tar(t, at.File("a")), "packed": gz(docker)} {
		broken := io.MultiReader(bytes.NewReader(b[:len(b)-100]), failing{left})
		if _, err := w.Import(t.Context(), image.Archive{Ref: parsed("x")}, broken, nil); !errors.Is(err, left) {
			t.Errorf("%s whose reader fails: %v", name, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		if _, err := w.Import(ctx, image.Archive{Ref: parsed("x")}, io.MultiReader(bytes.NewReader(b[:len(b)-100]), calling(cancel),
			bytes.NewReader(b[len(b)-100:])), nil); err == nil {
			t.Errorf("%s that was cancelled was imported", name)
		}
		cancel()
	}
	for _, a := range []image.Archive{{Ref: parsed("x@sha256:" + strings.Repeat("a", 64))}, {Ref: parsed("x"), Format: "zip"}} {
		if _, err := w.Import(t.Context(), a, bytes.NewReader(docker), nil); !errs.Is(err, errs.Invalid) {
			t.Errorf("%+v: %v", a, err)
		}
	}
	if _, err := w.Import(t.Context(), image.Archive{}, bytes.NewReader(at.Tar(t, at.File("a"))), nil); !errs.Is(err, errs.Invalid) ||
		!strings.Contains(err.Error(), "name") {
		t.Errorf("a root file system without a name: %v", err)
	}
	if _, err := w.Import(t.Context(), image.Archive{Ref: parsed("x"), Format: image.FormatDocker},
		bytes.NewReader(at.Tar(t, at.File("a"))), nil); !errs.Is(err, errs.Invalid) {
		t.Errorf("a root file system as docker's: %v", err)
	}
	w.holds(t, 0, 0)
}

// Clients that connect and send nothing keep nobody out.
func TestImportBesideSilence(t *testing.T) {
	w := newWorld(t)
	var silent sync.WaitGroup
	var pipes []*io.PipeWriter
	for range 10 {
		r, in := io.Pipe()
		pipes = append(pipes, in)
		silent.Go(func() {
			if _, err := w.Import(t.Context(), image.Archive{Ref: parsed("x")}, r, nil); err == nil {
				t.Error("nothing was imported")
			}
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, in := range pipes { // each has taken this one when it returns
		_, err := in.Write([]byte("x"))
		must(t, err)
	}
	if _, err := w.Import(ctx, image.Archive{Ref: parsed("y")}, bytes.NewReader(at.Tar(t, at.File("a"))), nil); err != nil {
		t.Error(err)
	}
	for _, in := range pipes {
		in.CloseWithError(io.ErrUnexpectedEOF) //nolint:errcheck // it says nil
	}
	silent.Wait()
	w.holds(t, 1, 1)
}

// A sweep in the middle of an import takes nothing of it, and does not wait.
func TestSweepDuringImport(t *testing.T) {
	w := newWorld(t)
	img := at.Image(t, at.Tar(t, at.File("a")), at.Tar(t, at.File("b")))
	swept := 0
	i, err := w.Import(t.Context(), image.Archive{Ref: parsed("x")}, bytes.NewReader(at.OCI(t, img)), func(image.Progress) {
		swept++
		if err := w.Sweep(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err != nil || swept < 3 {
		t.Fatal(swept, err)
	}
	for _, l := range i.Layers {
		if _, err := w.disks.Layers.Path(l); err != nil {
			t.Error(err)
		}
	}
	w.used[i.Layers[0]] = []string{"lab"}
	if _, err := w.Remove(t.Context(), parsed("x")); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "lab") {
		t.Errorf("remove in use: %v", err)
	}
	w.holds(t, 1, 2)
}

// A shared layer that is removed while its second image comes is noticed.
func TestLayerGoesDuringImport(t *testing.T) {
	w := newWorld(t)
	base := at.Tar(t, at.File("a"))
	_, err := w.Import(t.Context(), image.Archive{Ref: parsed("base")}, bytes.NewReader(at.OCI(t, at.Image(t, base))), nil)
	must(t, err)
	removed := false
	_, err = w.Import(t.Context(), image.Archive{Ref: parsed("x")}, bytes.NewReader(at.OCI(t, at.Image(t, base, at.Tar(t, at.File("b"))))),
		func(p image.Progress) {
			if p.Stage == "unpack" && !removed {
				removed = true
				must(t, errorOf(w.Remove(context.Background(), parsed("base"))))
			}
		})
	if !errs.Is(err, errs.Unavailable) || !removed {
		t.Errorf("%v", err)
	}
	w.holds(t, 0, 0)
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

type calling func()

func (c calling) Read([]byte) (int, error) { c(); return 0, io.EOF }
