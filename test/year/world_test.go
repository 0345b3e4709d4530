//go:build all

package year

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	rt "github.com/sandboxd/sandboxd/pkg/image/registry/registrytest"
)

// What is outside of the host: a network namespace with a link to it. TEST-NET-2 counts as public.
const (
	outside     = "198.51.100.241"
	outsideHost = "198.51.100.254/28"
	outsideName = "sandboxd-year"
	outsideLink = "year0"
)

// newOutside makes it. It sends back on port 80 what it gets.
func newOutside(t *testing.T) {
	t.Helper()
	drop := func() {
		_ = exec.Command("ip", "link", "del", outsideLink).Run()
		_ = exec.Command("ip", "netns", "del", outsideName).Run()
	}
	drop() // what a killed run left
	t.Cleanup(drop)
	for _, line := range []string{
		"netns add " + outsideName,
		"link add " + outsideLink + " type veth peer name out netns " + outsideName,
		"addr add " + outsideHost + " dev " + outsideLink,
		"link set " + outsideLink + " up",
		"-n " + outsideName + " addr add " + outside + "/28 dev out",
		"-n " + outsideName + " link set lo up",
		"-n " + outsideName + " link set out up",
		"-n " + outsideName + " route add default via " + strings.TrimSuffix(outsideHost, "/28"),
	} {
		if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", line, err, out)
		}
	}
	ns, err := os.Open("/run/netns/" + outsideName)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var l net.Listener
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends in its namespace
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			l, err = net.Listen("tcp4", "0.0.0.0:80")
		}
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatalf("serve outside: %v", err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }() //nolint:errcheck // the guest sees what is missing
		}
	}()
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
