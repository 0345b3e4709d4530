// Package archivetest makes archives of images, good and bad, for tests.
package archivetest

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"runtime"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Tar makes a tar; the content of a file is its name.
func Tar(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		content := ""
		if h.Typeflag == tar.TypeReg {
			content = h.Name
		}
		h.Size = int64(len(content))
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		must(t, w.WriteHeader(&h))
		_, err := io.WriteString(w, content)
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

// File is a regular file, Dir a directory.
func File(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }

// Dir is a directory.
func Dir(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }

// Image is an image of layers, which are tars. Its config has a value in every field.
func Image(t testing.TB, layers ...[]byte) v1.Image {
	t.Helper()
	img := empty.Image
	for _, b := range layers {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
		must(t, err)
		img, err = mutate.AppendLayers(img, l)
		must(t, err)
	}
	c, err := img.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", runtime.GOARCH
	c.Config = v1.Config{
		Env: []string{"PATH=/bin", "A=from image"}, WorkingDir: "/srv/app", User: "1000:1000",
		Labels: map[string]string{"team": "a"}, Entrypoint: []string{"/bin/app", "-v"}, Cmd: []string{"serve"},
		StopSignal: "SIGQUIT", ExposedPorts: map[string]struct{}{"80/tcp": {}}, Volumes: map[string]struct{}{"/data": {}},
		Healthcheck: &v1.HealthConfig{Test: []string{"CMD", "true"}, Retries: 3}, OnBuild: []string{"RUN x"}, Shell: []string{"/bin/ash"},
	}
	img, err = mutate.ConfigFile(img, c)
	must(t, err)
	return img
}

// Docker is a `docker save` with compressed layers, as some tools write it.
func Docker(t testing.TB, img v1.Image, tag string) []byte {
	t.Helper()
	ref, err := name.NewTag(tag)
	must(t, err)
	var b bytes.Buffer
	must(t, tarball.Write(ref, img, &b))
	return b.Bytes()
}

// OCI is a tar of an OCI image layout.
func OCI(t testing.TB, img v1.Image) []byte {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	must(t, err)
	must(t, p.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "from-oci:1"})))
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.AddFS(os.DirFS(dir)))
	must(t, w.Close())
	return b.Bytes()
}

// Edit makes a tar from a tar: change returns the header and content of a member, or no
// header to leave it out.
func Edit(t testing.TB, b []byte, change func(h *tar.Header, content []byte) (*tar.Header, []byte)) []byte {
	t.Helper()
	var out bytes.Buffer
	r, w := tar.NewReader(bytes.NewReader(b)), tar.NewWriter(&out)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		content, err := io.ReadAll(r)
		must(t, err)
		h, content = change(h, content)
		if h == nil {
			continue
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(content))
		}
		must(t, w.WriteHeader(h))
		_, err = w.Write(content)
		must(t, err)
	}
	must(t, w.Close())
	return out.Bytes()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
