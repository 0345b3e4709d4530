package archive

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/pkg/errs"
	at "github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
)

func gz(b []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(b)
	if err := errors.Join(err, w.Close()); err != nil {
		panic(err)
	}
	return out.Bytes()
}

func zst(b []byte) []byte {
	w, err := zstd.NewWriter(nil)
	if err != nil {
		panic(err)
	}
	return w.EncodeAll(b, nil)
}

func TestProbe(t *testing.T) {
	img := at.Image(t, at.Tar(t, at.File("a")))
	rootfs := at.Tar(t, at.Dir("./"), at.Dir("./etc"), at.File("./etc/passwd"))
	docker, oci := at.Docker(t, img, "x:1"), at.OCI(t, img)
	hex64 := strings.Repeat("a", 64)
	large := at.Tar(t, slices.Repeat([]tar.Header{at.File("etc/passwd"), at.File("bin/sh")}, 1000)...)
	for name, c := range map[string]struct {
		head []byte
		want Kind
	}{
		"rootfs":            {rootfs, Kind{}},
		"rootfs, gzip":      {gz(rootfs), Kind{Compressed: true}},
		"rootfs, zstd":      {zst(rootfs), Kind{Compressed: true}},
		"docker":            {docker, Kind{Image: true}},
		"docker, gzip":      {gz(docker), Kind{Image: true, Compressed: true}},
		"old docker":        {at.Tar(t, at.Dir(hex64+"/"), at.File(hex64+"/VERSION")), Kind{Image: true}},
		"podman":            {at.Tar(t, at.File(hex64+".tar")), Kind{Image: true}},
		"oci":               {oci, Kind{Image: true}},
		"oci below a root":  {at.Tar(t, at.Dir("./"), at.Dir("./blobs")), Kind{Image: true}},
		"absolute":          {at.Tar(t, at.Dir("/"), at.File("/etc/passwd")), Kind{}},
		"absolute image":    {at.Tar(t, at.Dir("/"), at.File("/manifest.json")), Kind{Image: true}},
		"cut, as heads are": {gz(large)[:len(gz(large))/2], Kind{Compressed: true}},
	} {
		if got, err := probe(c.head[:min(len(c.head), HeadSize)]); err != nil || got != c.want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, c.want)
		}
	}
	for name, c := range map[string]struct {
		head []byte
		code errs.Code
	}{
		"nothing":   {nil, errs.Invalid},
		"text":      {bytes.Repeat([]byte("no tar "), 200), errs.Invalid},
		"empty tar": {make([]byte, 10240), errs.Invalid},
		"bad gzip":  {[]byte("\x1f\x8b nonsense nonsense"), errs.Invalid},
		"bad zstd":  {append(slices.Clone(zstdMagic), "nonsense"...), errs.Invalid},
		"xz":        {[]byte("\xfd7zXZ\x00 and so on"), errs.Unsupported},
		"bzip2":     {[]byte("BZh91AY&SY"), errs.Unsupported},
	} {
		if k, err := probe(c.head); !errs.Is(err, c.code) {
			t.Errorf("%s: %+v, %v; want %s", name, k, err, c.code)
		}
	}
}

func TestInflate(t *testing.T) {
	text := bytes.Repeat([]byte("some text that repeats itself. "), 100_000)
	for name, in := range map[string][]byte{"gzip": gz(text), "zstd": zst(text), "plain": text} {
		var out bytes.Buffer
		if err := inflate(&out, bytes.NewReader(in)); err != nil || !bytes.Equal(out.Bytes(), text) {
			t.Errorf("%s: %d bytes, %v", name, out.Len(), err)
		}
		if name == "plain" {
			continue
		}
		if err := inflate(io.Discard, bytes.NewReader(in[:len(in)/2])); !errs.Is(err, errs.Invalid) {
			t.Errorf("half of %s: %v", name, err)
		}
		bad := slices.Clone(in)
		bad[len(bad)-3] ^= 1 // of the checksum
		if err := inflate(io.Discard, bytes.NewReader(bad)); !errs.Is(err, errs.Invalid) {
			t.Errorf("changed %s: %v", name, err)
		}
	}
	nothing := make([]byte, 1<<20)
	for name, part := range map[string][]byte{"gzip": gz(nothing), "zstd": zst(nothing)} {
		in := bytes.Repeat(part, 300) // both formats are lists of such parts
		n := &counter{}
		if err := inflate(writes{n}, bytes.NewReader(in)); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "bomb") {
			t.Errorf("bomb of %s: %v", name, err)
		}
		if most := int64(len(in))*maxRatio + slack + 1<<20; n.n > most {
			t.Errorf("bomb of %s: %d bytes went off, of at most %d", name, n.n, most)
		}
	}
}

type writes struct{ n *counter }

func (w writes) Write(p []byte) (int, error) { w.n.n += int64(len(p)); return len(p), nil }

// plan makes a plan of an archive.
func plan(b []byte, format ...string) (Plan, error) {
	return planOf(bytes.NewReader(b), int64(len(b)), format)
}

func TestPlan(t *testing.T) {
	lower, upper := at.Tar(t, at.File("a")), at.Tar(t, at.File("b"))
	img := at.Image(t, lower, upper, lower)
	for name, b := range map[string][]byte{"docker": at.Docker(t, img, "team/app:7"), "oci": at.OCI(t, img)} {
		p, err := plan(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		c, _ := img.ConfigFile()
		if len(p.Layers) != 2 || p.Layers[0].DiffID != c.RootFS.DiffIDs[1].String() || p.Layers[1].DiffID != c.RootFS.DiffIDs[2].String() {
			t.Errorf("%s: layers %+v; want the second and the third", name, p.Layers)
		}
		var out bytes.Buffer
		l := p.Layers[0]
		if err := inflate(&out, bytes.NewReader(b[l.At:l.At+l.Size])); err != nil || !bytes.Equal(out.Bytes(), upper) || !l.Packed ||
			(l.Digest == "") != (name == "docker") {
			t.Errorf("%s: layer %+v is %d bytes, %v", name, l, out.Len(), err)
		}
		if p.Config.Workdir != "/srv/app" || p.Config.User != "1000:1000" || p.Config.Labels["team"] != "a" ||
			!slices.Contains(p.Config.Env, "A=from image") {
			t.Errorf("%s: config %+v", name, p.Config)
		}
		if want := map[string]string{"docker": "team/app:7", "oci": "from-oci:1"}[name]; len(p.Tags) != 1 ||
			!strings.HasSuffix(p.Tags[0], want) {
			t.Errorf("%s: tags %q", name, p.Tags)
		}
		for cut := 0; cut < len(b); cut += 100 {
			if _, err := plan(b[:cut]); err == nil {
				t.Errorf("%s: cut off after %d of %d bytes, and a plan", name, cut, len(b))
				break
			}
		}
	}
	if _, err := plan(at.OCI(t, img), "docker"); !errs.Is(err, errs.Invalid) {
		t.Errorf("a layout taken for docker's: %v", err)
	}
}

func TestBadArchives(t *testing.T) {
	layer := at.Tar(t, at.File("a"))
	docker, oci := at.Docker(t, at.Image(t, layer), "x:1"), at.OCI(t, at.Image(t, layer))
	edit := func(b []byte, name string, change func([]byte) []byte) []byte {
		return at.Edit(t, b, func(h *tar.Header, c []byte) (*tar.Header, []byte) {
			if ok, _ := filepath.Match(name, h.Name); ok {
				c = change(c)
			}
			return h, c
		})
	}
	replace := func(from, to string) func([]byte) []byte {
		return func(b []byte) []byte { return bytes.ReplaceAll(b, []byte(from), []byte(to)) }
	}
	links := func(n int) []byte {
		return at.Edit(t, docker, func(h *tar.Header, c []byte) (*tar.Header, []byte) {
			if h.Name == "manifest.json" {
				var m []map[string]any
				if err := json.Unmarshal(c, &m); err != nil {
					t.Fatal(err)
				}
				m[0]["Layers"] = []string{fmt.Sprintf("dir/%d", n)}
				c, _ = json.Marshal(m)
			}
			return h, c
		})
	}
	chain := func(n int, end string) []byte {
		all := []tar.Header{{Typeflag: tar.TypeSymlink, Name: "dir/0", Linkname: end}}
		for i := range n {
			all = append(all, tar.Header{Typeflag: tar.TypeSymlink, Name: fmt.Sprintf("dir/%d", i+1), Linkname: fmt.Sprint(i)})
		}
		b := at.Tar(t, all...)
		return append(b[:len(b)-1024], links(n)...)
	}
	layerName := ""
	at.Edit(t, docker, func(h *tar.Header, c []byte) (*tar.Header, []byte) {
		if strings.HasSuffix(h.Name, ".tar.gz") {
			layerName = h.Name
		}
		return h, c
	})
	if _, err := plan(chain(3, "../"+layerName)); err != nil {
		t.Errorf("three links: %v", err)
	}
	for name, b := range map[string][]byte{
		"100 levels of links": chain(100, "../"+layerName),
		"links in a circle":   chain(5, "5"),
		"links out of it":     chain(2, "../../../../etc/passwd"),
		"no manifest":         edit(docker, "manifest.json", func([]byte) []byte { return nil }),
		"manifest of nothing": edit(docker, "manifest.json", func([]byte) []byte { return []byte("[]") }),
		"manifest of two": edit(docker, "manifest.json",
			func(b []byte) []byte {
				return []byte("[" + string(b[1:len(b)-1]) + "," + strings.Replace(string(b[1:]), `"Layers":[`, `"Layers":["x",`, 1))
			}),
		"manifest too large": edit(docker, "manifest.json",
			func(b []byte) []byte { return append(b, bytes.Repeat([]byte(" "), maxDocument)...) }),
		"manifest nests":           edit(docker, "manifest.json", func([]byte) []byte { return bytes.Repeat([]byte("["), 1<<20) }),
		"manifest names no config": edit(docker, "manifest.json", replace(`"Config":"`, `"Config":"no-`)),
		"config of no layers":      edit(docker, "sha256:*", replace(`"diff_ids":["`, `"diff_ids":[],"x":["`)),
		"before docker 1.10":       at.Tar(t, at.File("repositories")),
		"config of more layers":    edit(docker, "sha256:*", replace(`"diff_ids":[`, `"diff_ids":["sha256:`+strings.Repeat("0", 64)+`",`)),
		"config of no JSON":        edit(docker, "sha256:*", func([]byte) []byte { return []byte("{") }),
		"digest of no digest":      edit(docker, "sha256:*", replace(`"diff_ids":["sha256:`, `"diff_ids":["md5:`)),
		"oci: config changed":      edit(oci, "blobs/sha256/*", replace(`/srv/app`, `/srv/bpp`)),
		"oci: index of nothing":    edit(oci, "index.json", func([]byte) []byte { return []byte(`{"schemaVersion":2,"manifests":[]}`) }),
		"oci: index in itself": edit(oci, "index.json", replace("vnd.docker.distribution.manifest.v2",
			"vnd.docker.distribution.manifest.list.v2")),
		"oci: manifest missing": edit(oci, "index.json", replace(`"sha256:`, `"sha256:0000`)),
	} {
		if p, err := plan(b); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
	for _, to := range []string{`"os":"windows","x":"`, `"os":"linux","architecture":"no machine","x":"`} {
		if p, err := plan(edit(docker, "sha256:*", replace(`"os":"`, to))); !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s: %+v, %v", to, p, err)
		}
	}
}

// TestOddPlans: archives that docker loads are loaded, with all names, and for other machines.
func TestOddPlans(t *testing.T) {
	layer := at.Tar(t, at.File("a"))
	img := at.Image(t, layer)
	docker, oci := at.Docker(t, img, "x:1"), at.OCI(t, img)
	member := func(b []byte, name string, change func(string) string) []byte {
		return at.Edit(t, b, func(h *tar.Header, c []byte) (*tar.Header, []byte) {
			if ok, _ := filepath.Match(name, h.Name); ok {
				var short bytes.Buffer
				if err := json.Compact(&short, c); err != nil {
					t.Fatal(err)
				}
				c = []byte(change(short.String()))
			}
			return h, c
		})
	}
	replace := func(from, to string) func(string) string {
		return func(s string) string {
			if !strings.Contains(s, from) {
				t.Fatalf("%s has no %s", s, from)
			}
			return strings.ReplaceAll(s, from, to)
		}
	}
	twice := func(change func(string) string) func(string) string { // an entry of a list, and a changed one
		return func(s string) string {
			from, to := strings.Index(s, `[{`)+1, strings.LastIndex(s, `}]`)+1
			return s[:to] + "," + change(s[from:to]) + s[to:]
		}
	}
	const ref = `"org.opencontainers.image.ref.name":"from-oci:1"`
	other := `,"platform":{"os":"linux","architecture":"s390x"}`
	foreign := func(s string) string { return strings.Replace(s, `"annotations"`, other[1:]+`,"annotations"`, 1) }
	config := func(from, to string) []byte { return member(docker, "sha256:*", replace(from, to)) }
	for name, c := range map[string]struct {
		b        []byte
		tags     string
		platform string
	}{
		"docker: an entry for each name": {member(docker, "manifest.json", twice(replace("x:1", "y:2"))), "x:1 y:2", ""},
		"docker: two names": {member(docker, "manifest.json", func(s string) string {
			return regexp.MustCompile(`"RepoTags":\["[^"]*"\]`).ReplaceAllString(s, `"RepoTags":["x:1","x:2"]`)
		}), "x:1 x:2", ""},
		"docker: three entries": {member(docker, "manifest.json", func(s string) string {
			one := s[1 : len(s)-1]
			return "[" + one + "," + replace("x:1", "y:2")(one) + "," + replace("x:1", "z:3")(one) + "]"
		}), "x:1 y:2 z:3", ""},
		"oci: an entry for each name": {member(oci, "index.json", twice(replace("from-oci:1", "from-oci:2"))), "from-oci:1 from-oci:2", ""},
		"oci: an attestation": {
			member(oci, "index.json", twice(replace(`"annotations"`, `"platform":{"os":"unknown","architecture":"unknown"},"annotations"`))),
			"from-oci:1", "",
		},
		"oci: a signature": {
			member(oci, "index.json", twice(replace(ref, `"vnd.docker.reference.type":"attestation-manifest"`))), "from-oci:1", "",
		},
		"oci: a machine that is not in it": {
			member(oci, "index.json", func(s string) string {
				return twice(func(e string) string {
					return digestOf.ReplaceAllString(foreign(e), `"digest":"sha256:`+strings.Repeat("0", 64)+`"`)
				})(strings.Replace(s, `"annotations"`, `"platform":{"os":"linux","architecture":"`+runtime.GOARCH+`"},"annotations"`, 1))
			}),
			"from-oci:1", "",
		},
		"another machine":     {config(`"architecture":"`+runtime.GOARCH, `"variant":"v9","architecture":"s390x`), "x:1", "linux/s390x/v9"},
		"the kernel's name":   {config(`"architecture":"`+runtime.GOARCH, `"architecture":"`+kernels[runtime.GOARCH]), "x:1", ""},
		"no machine":          {config(`"architecture":"`+runtime.GOARCH, `"architecture":"`), "x:1", ""},
		"a word for a list":   {config(`"Cmd":["serve"]`, `"Cmd":"serve"`), "x:1", ""},
		"entries without =":   {config(`"A=from image"`, `"A=from image","B","=c"`), "x:1", ""},
		"no history":          {config(`"history":[`, `"history":{"a":"b"},"x":[`), "x:1", ""},
		"a date of no form":   {config(`"os":"linux"`, `"os":"linux","created":"yesterday"`), "x:1", ""},
		"null":                {config(`"os":"linux"`, `"os":"linux","author":null,"container_config":null`), "x:1", ""},
		"another's extension": {config(`"os":"linux"`, `"os":"linux","moby.buildkit.cache.v0":{"a":[1]}`), "x:1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := plan(c.b)
			if err != nil || len(p.Layers) != 1 || p.Config.Platform != c.platform || p.Config.User != "1000:1000" ||
				!slices.Equal(p.Config.Env, []string{"PATH=/bin", "A=from image"}) || !slices.Equal(p.Config.Cmd, []string{"serve"}) {
				t.Fatalf("%+v, %v", p, err)
			}
			var tags []string
			for _, tag := range p.Tags {
				tags = append(tags, tag[strings.LastIndex(tag, "/")+1:])
			}
			if got := strings.Join(tags, " "); got != c.tags {
				t.Errorf("tags %q, want %q", got, c.tags)
			}
		})
	}
	if p, err := plan(at.Docker(t, at.Image(t), "x:1")); err != nil || len(p.Layers) != 0 {
		t.Errorf("no layers: %+v, %v", p, err)
	}
	if p, err := plan(member(docker, "sha256:*", replace(`"Entrypoint":["/bin/app","-v"]`, `"Entrypoint":[""]`))); err != nil ||
		p.Config.Entrypoint != nil {
		t.Errorf("an entrypoint that was taken back: %+v, %v", p, err)
	}
	two := member(oci, "index.json", func(s string) string {
		return twice(replace("s390x", "riscv64"))(strings.Replace(s, `"annotations"`, other[1:]+`,"annotations"`, 1))
	})
	if p, err := plan(two); err != nil || p.Config.User != "1000:1000" { // both are the same manifest
		t.Errorf("listed for two machines: %+v, %v", p, err)
	}
}

// TestLongLists: lists that repeat an image are read in a time that grows with their length only,
// or refused.
func TestLongLists(t *testing.T) {
	img := at.Image(t, at.Tar(t, at.File("a")))
	docker := func(change func(entry string) string) []byte {
		return at.Edit(t, at.Docker(t, img, "x:1"), func(h *tar.Header, c []byte) (*tar.Header, []byte) {
			if h.Name == "manifest.json" {
				c = bytes.TrimSpace(c)
				c = []byte("[" + change(string(c[1:len(c)-1])) + "]")
			}
			return h, c
		})
	}
	times := func(n int) func(string) string {
		return func(entry string) string { return strings.Join(slices.Repeat([]string{entry}, n), ",") }
	}
	if p, err := plan(docker(times(maxListed))); err != nil || len(p.Layers) != 1 {
		t.Errorf("%d equal entries: %+v, %v", maxListed, p, err)
	}
	many := docker(func(string) string { return times(100_000)("{}") })
	if p, err := plan(many); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "lists 100000 images") {
		t.Errorf("100,000 equal entries: %+v, %v", p, err)
	}
	other := docker(func(entry string) string { return times(3)(entry) + `,{"Config":"b","RepoTags":["y:2"]}` })
	if p, err := plan(other); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "holds 2 images") {
		t.Errorf("one that differs: %+v, %v", p, err)
	}
	// One large index, which another lists again and again.
	var index []byte
	var hash v1.Hash
	b := at.Edit(t, at.OCI(t, img), func(h *tar.Header, c []byte) (*tar.Header, []byte) {
		switch h.Name {
		case "index.json":
			index = append(slices.Clone(c), bytes.Repeat([]byte(" "), 1<<20)...)
			var err error
			if hash, _, err = v1.SHA256(bytes.NewReader(index)); err != nil {
				t.Fatal(err)
			}
			entry := fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.index.v1+json","digest":"%s","size":%d}`, hash, len(index))
			c = []byte(`{"schemaVersion":2,"manifests":[` + times(maxListed)(entry) + `]}`)
		case "oci-layout": // comes after it
			h.Name, c = blobName(hash), index
		}
		return h, c
	})
	read := &counted{r: bytes.NewReader(b)}
	p, err := planOf(read, int64(len(b)), nil)
	if err != nil || len(p.Layers) != 1 || len(p.Tags) != 1 || p.Tags[0] != "from-oci:1" {
		t.Errorf("%d times an index: %+v, %v", maxListed, p, err)
	}
	if read.n > 4<<20 {
		t.Errorf("of an archive of %d bytes, %d were read", len(b), read.n)
	}
}

// counted counts the bytes that are read.
type counted struct {
	r io.ReaderAt
	n int
}

func (c *counted) ReadAt(p []byte, at int64) (int, error) {
	n, err := c.r.ReadAt(p, at)
	c.n += n
	return n, err
}

var digestOf = regexp.MustCompile(`"digest":"sha256:[0-9a-f]{64}"`)

// kernels are the kernel's names of machines, by Go's.
var kernels = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// TestMachines: of one image for several machines that for this one is taken; else the only
// one that is in the archive.
func TestMachines(t *testing.T) {
	here := &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	variant := &v1.Platform{OS: "linux", Architecture: runtime.GOARCH, Variant: "v9"}
	far, farther := &v1.Platform{OS: "linux", Architecture: "s390x"}, &v1.Platform{OS: "linux", Architecture: "riscv64"}
	for name, c := range map[string]struct {
		platforms []*v1.Platform
		present   []int
		want      int // -1: none
		says      string
	}{
		"here":              {[]*v1.Platform{far, here}, []int{0, 1}, 1, ""},
		"without a variant": {[]*v1.Platform{variant, here}, []int{0, 1}, 1, ""},
		"with a variant":    {[]*v1.Platform{far, variant}, []int{0, 1}, 1, ""},
		"unsaid":            {[]*v1.Platform{far, nil}, []int{0, 1}, 1, ""},
		"one other":         {[]*v1.Platform{here, far}, []int{1}, 1, ""},
		"two others":        {[]*v1.Platform{farther, far}, []int{0, 1}, -1, "linux/riscv64"},
		"missing":           {[]*v1.Platform{here}, nil, -1, "has no member"},
	} {
		m := &members{files: map[string]Span{}, links: map[string]string{}}
		var list []v1.Descriptor
		for i, p := range c.platforms {
			list = append(list, v1.Descriptor{Platform: p, Digest: v1.Hash{Algorithm: "sha256", Hex: strings.Repeat(fmt.Sprint(i), 64)}})
		}
		for _, i := range c.present {
			m.files[blobName(list[i].Digest)] = Span{}
		}
		d, err := m.forHere(list)
		if c.want < 0 {
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s: %+v, %v; want %q", name, d, err, c.says)
			}
		} else if err != nil || d.Digest != list[c.want].Digest {
			t.Errorf("%s: %+v, %v; want number %d", name, d, err, c.want)
		}
	}
}
