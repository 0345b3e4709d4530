package archive

import (
	"archive/tar"
	"bytes"
	stdgzip "compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/internal/tarball/tartest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	at "github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
)

// refused fails unless err is one that says what is wrong with the client's bytes, in a
// text that a child reports whole: internal/confine cuts off the rest.
func refused(t *testing.T, err error) {
	t.Helper()
	e, ok := errors.AsType[*errs.Error](err)
	if !ok || e.Code != errs.Invalid && e.Code != errs.Unsupported || len(e.Text) > 1<<10 {
		t.Fatalf("%s: %.300v", errs.CodeOf(err), err)
	}
}

// FuzzPlan: what an archive is said to hold lies within it, has the digests that it names,
// and can be told to the daemon.
func FuzzPlan(f *testing.F) {
	img := at.Image(f, at.Tar(f, at.File("a")))
	f.Add(at.Docker(f, img, "x:1"))
	f.Add(at.OCI(f, img))
	for _, packed := range saved(f) {
		var b bytes.Buffer
		if err := inflate(&b, bytes.NewReader(packed)); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	many := []byte(`[` + strings.TrimSuffix(strings.Repeat(`{"RepoTags":["`+strings.Repeat("x", 40)+`:1"]},`, 30), ",") + `]`)
	f.Add(at.Edit(f, at.Docker(f, img, "x:1"), func(h *tar.Header, content []byte) (*tar.Header, []byte) {
		if h.Name == "manifest.json" {
			content = many
		}
		return h, content
	}))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = tartest.Sum(b)
		if _, err := probe(b[:min(len(b), HeadSize)]); err != nil {
			refused(t, err)
		}
		p, err := plan(b)
		if err != nil {
			refused(t, err)
			return
		}
		if len(p.Layers) > MaxLayers || len(p.Tags) > 100 {
			t.Fatalf("%d layers, %d tags", len(p.Layers), len(p.Tags))
		}
		seen := map[string]bool{}
		for _, l := range p.Layers {
			if l.At < 0 || l.Size < 0 || l.At+l.Size > int64(len(b)) || seen[l.DiffID] {
				t.Fatalf("a layer %+v in an archive of %d bytes", l, len(b))
			}
			seen[l.DiffID] = true
			if l.Packed != Packed(b[l.At:l.At+l.Size]) {
				t.Fatalf("%+v is packed: %v", l, !l.Packed)
			}
		}
		told(t, p)
	})
}

// saved are archives that docker has made.
func saved(f *testing.F) (all [][]byte) {
	f.Helper()
	for _, name := range []string{"docker-20.10-save.tar.gz", "docker-20.10-save-two.tar.gz"} {
		b, err := os.ReadFile(filepath.Join("..", "testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		all = append(all, b)
	}
	return all
}

// told fails if the daemon would read something else than the child has said.
func told[T any](t *testing.T, said T) {
	t.Helper()
	b, err := json.Marshal(said)
	if err != nil {
		t.Fatal(err)
	}
	var heard T
	if err := json.Unmarshal(b, &heard); err != nil {
		t.Fatal(err)
	}
	if again, err := json.Marshal(heard); err != nil || !bytes.Equal(b, again) {
		t.Fatalf("%s is heard as %s, %v", b, again, err)
	}
}

// FuzzInflate: what two other readers unpack comes out the same; nothing grows beyond the
// bound, and what is not compressed passes as it is.
func FuzzInflate(f *testing.F) {
	var g, z bytes.Buffer
	gw := gzip.NewWriter(&g)
	fmt.Fprint(gw, strings.Repeat("text ", 100))
	gw.Close()
	zw, err := zstd.NewWriter(&z)
	if err != nil {
		f.Fatal(err)
	}
	fmt.Fprint(zw, strings.Repeat("text ", 100))
	zw.Close()
	f.Add(g.Bytes())
	f.Add(saved(f)[0])
	f.Add(append(bytes.Clone(g.Bytes()), g.Bytes()...))
	f.Add(z.Bytes())
	f.Add([]byte("plain"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var out bytes.Buffer
		err := inflate(&out, bytes.NewReader(b))
		if int64(out.Len()) > maxRatio*int64(len(b))+slack+1<<18 {
			t.Fatalf("%d bytes become %d", len(b), out.Len())
		}
		switch {
		case bytes.HasPrefix(b, gzipMagic):
			var want []byte
			r, werr := stdgzip.NewReader(bytes.NewReader(b))
			if werr == nil {
				want, werr = io.ReadAll(r)
			}
			// klauspost/compress takes a second member that ends in its header for the end. What
			// reads the tar inside looks for its end itself.
			cut := err == nil && errors.Is(werr, io.ErrUnexpectedEOF)
			if (err == nil) != (werr == nil) && !cut || err == nil && !bytes.Equal(want, out.Bytes()) {
				t.Fatalf("%q: %v; compress/gzip: %v", b, err, werr)
			}
		case bytes.HasPrefix(b, zstdMagic):
		default:
			if err != nil || !bytes.Equal(out.Bytes(), b) {
				t.Fatalf("%q becomes %q, %v", b, out.Bytes(), err)
			}
		}
		if err != nil {
			refused(t, err)
		}
	})
}

// FuzzDocument: a document of a registry, manifest or config, is refused, or says the same to
// the daemon as it has in its JSON: layers with digests and sizes, or the document for this
// machine.
func FuzzDocument(f *testing.F) {
	digest := "sha256:" + strings.Repeat("a", 64)
	layer := `{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"` + digest + `","size":5}`
	f.Add([]byte(`{"schemaVersion":2,"config":` + layer + `,"layers":[` + layer + `,` + layer + `]}`))
	f.Add([]byte(`{"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"` + digest +
		`","size":5,"platform":{"os":"linux","architecture":"` + runtime.GOARCH + `","variant":"v8"}}]}`))
	f.Add([]byte(`{"manifests":[],"layers":[],"Layers":null}`))
	f.Add([]byte(`{"fsLayers":[]}`))
	f.Add([]byte(`{"os":"linux","config":{"Env":["A=1"],"WorkingDir":"/a/../b","User":"1:1","Entrypoint":["sh"],"Labels":{"a":"b"}},` +
		`"rootfs":{"type":"layers","diff_ids":["` + digest + `"]}}`))
	f.Add([]byte(`{"architecture":"aarch64","variant":"v8","config":{"Env":["A","=","B=="],"Entrypoint":"sh","Cmd":null,"Labels":{"":""}}}`))
	f.Add([]byte(`{"config":{"StopSignal":"QUIT","Healthcheck":{"Test":["CMD","<b>"]},"ExposedPorts":{},"Volumes":{"/x":{}},"Shell":null}}`))
	f.Add([]byte(`{"os":"windows","architecture":"` + strings.Repeat("x", 5000) + `"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		checkConfig(t, b)
		m, err := manifestOf(b)
		if err != nil {
			refused(t, err)
			return
		}
		told(t, m)
		blobs := append([]Blob{m.Config}, m.Layers...)
		if m.Next != nil {
			if !reflect.DeepEqual(m, Manifest{Next: m.Next}) {
				t.Fatalf("%q is an index and a manifest: %+v", b, m)
			}
			blobs = []Blob{*m.Next}
		} else if len(m.Layers) > MaxLayers {
			t.Fatalf("%d layers", len(m.Layers))
		}
		total := int64(0)
		for _, l := range blobs {
			_, hex, _ := strings.Cut(l.Digest, ":")
			if total += l.Size; l.Size < 0 || l.Size > maxBlob || total < 0 || !bytes.Contains(b, []byte(hex)) {
				t.Fatalf("%q has %+v", b, l)
			}
		}
	})
}

// checkConfig reads b as the config of an image: it is refused, or the daemon can check and
// keep what comes out.
func checkConfig(t *testing.T, b []byte) {
	t.Helper()
	c, err := configOf(b)
	if err != nil {
		refused(t, err)
		return
	}
	told(t, c)
	if w := c.Config.Workdir; !path.IsAbs(w) || path.Clean(w) != w {
		t.Fatalf("the directory is %q", w)
	}
	for _, kv := range c.Config.Env {
		if strings.Index(kv, "=") < 1 {
			t.Fatalf("a variable is %q", kv)
		}
	}
	for _, id := range c.DiffIDs {
		if !strings.Contains(id, ":") {
			t.Fatalf("a layer is %q", id)
		}
	}
}
