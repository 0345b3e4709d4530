//go:build all

package year

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	rt "github.com/sandboxd/sandboxd/pkg/image/registry/registrytest"
)

// outside is an address outside of the host. TEST-NET-2 counts as public.
const outside = "198.51.100.241"

// newOutside makes it. It sends back on port 80 what it gets.
func newOutside(t *testing.T) {
	t.Helper()
	hosttest.Outside{
		Name: "sandboxd-year", Link: "year0",
		Host:      []netip.Prefix{netip.MustParsePrefix("198.51.100.254/28")},
		Addresses: []netip.Prefix{netip.MustParsePrefix(outside + "/28")},
	}.Start(t, func() ([]io.Closer, error) {
		l, err := hosttest.Echo("80")
		return []io.Closer{l}, err
	})
}

// archive is a root file system with one file of random bytes.
func archive(size int64) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "opt/bulk", Size: size, Mode: 0o644})
	if err == nil {
		_, err = io.CopyN(w, rand.Reader, size)
	}
	if err == nil {
		err = w.Close()
	}
	return b.Bytes(), err
}

const (
	pullBytes = 1 << 20 // of each image of the registry
	tornBytes = 1 << 16 // after which a pull of the image "torn" gets no more
)

// newRegistry starts a registry with the images new:0 to new:2, and torn:0, whose pull does not end.
func newRegistry(t *testing.T) *rt.Front {
	t.Helper()
	f := rt.NewFront(t, rt.NewAuthority(t), registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	for i := range cycle {
		f.Push(t, f.Addr, fmt.Sprintf("new:%d", i), image(t))
	}
	torn := image(t)
	f.Push(t, f.Addr, "torn:0", torn)
	all, err := torn.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := all[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	f.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, digest.String()) || r.Method != http.MethodGet {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(pullBytes))
		io.CopyN(w, rand.Reader, tornBytes)   //nolint:errcheck // the client may be gone
		http.NewResponseController(w).Flush() //nolint:errcheck // likewise
		<-r.Context().Done()
		return true
	})
	return f
}

func image(t *testing.T) v1.Image {
	t.Helper()
	b, err := archive(pullBytes)
	if err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
	if err != nil {
		t.Fatal(err)
	}
	im, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		t.Fatal(err)
	}
	c, err := im.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", runtime.GOARCH
	if im, err = mutate.ConfigFile(im, c); err != nil {
		t.Fatal(err)
	}
	return im
}
