package internet

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/cgi"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The hosts of package repositories. Each has the package Package of its kind, in version
// 1.0.0, which says Word. All of them are at Shared, where more names are.
const (
	PythonIndex = "index.example" // a simple index, https
	PythonFiles = "files.example" // where its files are; an alias of a name that no rule has
	NodeHost    = "registry.example"
	DebianHost  = "deb.example" // http and https
	GitHost     = "git.example" // Package + ".git"
	GoHost      = "modules.example"
	GoModule    = "code.example/" + Package // what GoHost serves; no server has this name
	Resolver    = "doh.example"             // DNS over HTTPS

	Package = "hello-story"
	Word    = "hello from outside"
)

// prepare fills the zone and the web servers. Files are made below dir.
func (in *Internet) prepare(dir string) (err error) {
	if in.CA, err = in.web.authority(); err != nil {
		return err
	}
	repository, err := gitRepository(dir)
	if err != nil {
		return err
	}
	index, files := python()
	in.web.hosts = map[string]http.Handler{
		PythonIndex: index, PythonFiles: files, NodeHost: node(), DebianHost: debian(), GitHost: repository, GoHost: modules(),
		Resolver: http.HandlerFunc(in.overHTTPS), EchoHost: protocols(),
	}
	maps.Copy(in.web.hosts, private(index, repository))
	in.web.hosts[VaultHost] = &in.kept
	maps.Copy(in.web.hosts, in.hostile.handlers())
	for _, name := range in.Names() {
		in.Set(name, Record{A: []netip.Addr{Shared}})
	}
	in.Set(PythonFiles, Record{CNAME: "edge.network.example"})
	in.Set("edge.network.example", Record{CNAME: "shared.network.example"})
	in.Set("shared.network.example", Record{A: []netip.Addr{Shared}})
	for _, name := range []string{"denied.example", MutualHost, StrangerHost} { // neighbours on the address
		in.Set(name, Record{A: []netip.Addr{Shared}})
	}
	for _, name := range []string{WatchedHost, ThiefHost} {
		in.Set(name, Record{A: []netip.Addr{Other}})
	}
	in.Set(MovedHost, Record{CNAME: "lost.example"})
	in.Set("lost.example", Record{A: []netip.Addr{Thief}})
	return nil
}

// pages serves files by their path.
type pages map[string][]byte

func (p pages) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	b, ok := p[r.URL.Path]
	if !ok {
		http.NotFound(rw, r)
		return
	}
	if strings.HasSuffix(r.URL.Path, "/") {
		rw.Header().Set("Content-Type", "text/html")
	}
	rw.Write(b) //nolint:errcheck // the client sees what is missing
}

// python is a simple index (PEP 503) and the host of its one wheel (PEP 427).
func python() (index, files pages) {
	const info, module = "hello_story-1.0.0.dist-info/", "hello_story/__init__.py"
	wheel := zipped([][2]string{
		{module, fmt.Sprintf("word = %q\n", Word)},
		{info + "METADATA", "Metadata-Version: 2.1\nName: hello-story\nVersion: 1.0.0\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{info + "RECORD", module + ",,\n" + info + "METADATA,,\n" + info + "WHEEL,,\n" + info + "RECORD,,\n"},
	})
	const file = "hello_story-1.0.0-py3-none-any.whl"
	link := fmt.Sprintf(`<!DOCTYPE html><a href="https://%s/packages/%s#sha256=%s">%s</a>`, PythonFiles, file, sha(wheel), file)
	return pages{"/simple/" + Package + "/": []byte(link)}, pages{"/packages/" + file: wheel}
}

// node is a registry of one package.
func node() pages {
	archive := tarred("package/", [][2]string{
		{"package.json", `{"name":"` + Package + `","version":"1.0.0","main":"index.js"}`},
		{"index.js", fmt.Sprintf("module.exports = %q\n", Word)},
	})
	sum := sha512.Sum512(archive)
	file := "/" + Package + "/-/" + Package + "-1.0.0.tgz"
	about, _ := json.Marshal(map[string]any{ //nolint:errchkjson // of strings
		"name": Package, "dist-tags": map[string]string{"latest": "1.0.0"},
		"versions": map[string]any{"1.0.0": map[string]any{
			"name": Package, "version": "1.0.0", "main": "index.js", "dist": map[string]string{
				"tarball": "https://" + NodeHost + file, "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:]),
			},
		}},
	})
	return pages{"/" + Package: about, file: archive}
}

// debian is a repository of one package, unsigned: [trusted=yes].
func debian() pages {
	control := "Package: " + Package +
		"\nVersion: 1.0.0\nArchitecture: all\nMaintainer: test <test@example.org>\nDescription: a test\n"
	deb := archived([][2]string{
		{"debian-binary", "2.0\n"},
		{"control.tar.gz", string(tarred("./", [][2]string{{"control", control}}))},
		{"data.tar.gz", string(tarred("./usr/bin/", [][2]string{{Package, "#!/bin/sh\necho " + Word + "\n"}}))},
	})
	const file = "pool/" + Package + "_1.0.0_all.deb"
	list := []byte(fmt.Sprintf("%sFilename: %s\nSize: %d\nSHA256: %s\n\n", control, file, len(deb), sha(deb)))
	p := pages{"/debian/" + file: deb}
	release := "Origin: test\nSuite: stable\nCodename: stable\nArchitectures: all amd64 arm64\nComponents: main\n" +
		"Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n"
	for _, architecture := range []string{"all", "amd64", "arm64"} {
		name := "main/binary-" + architecture + "/Packages"
		of := list
		if architecture == "all" { // one list has the package
			of = nil
		}
		p["/debian/dists/stable/"+name] = of
		release += fmt.Sprintf(" %s %d %s\n", sha(of), len(of), name)
	}
	p["/debian/dists/stable/Release"] = []byte(release)
	return p
}

// modules is a proxy of Go modules with one module.
func modules() pages {
	mod := "module " + GoModule + "\n\ngo 1.21\n"
	at, of := "/"+GoModule+"/@v/", GoModule+"@v1.0.0/"
	about := []byte(`{"Version":"v1.0.0","Time":"2026-01-01T00:00:00Z"}`)
	return pages{
		at + "list": []byte("v1.0.0\n"), at + "v1.0.0.info": about, at + "v1.0.0.mod": []byte(mod), "/" + GoModule + "/@latest": about,
		at + "v1.0.0.zip": zipped([][2]string{
			{of + "go.mod", mod}, {of + "hello.go", fmt.Sprintf("package hello\n\nconst Word = %q\n", Word)},
		}),
	}
}

// gitRepository is a repository with one file, served by git itself.
func gitRepository(dir string) (http.Handler, error) {
	work, bare := filepath.Join(dir, "work"), filepath.Join(dir, "git", Package+".git")
	if err := os.MkdirAll(work, 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(work, "word"), []byte(Word+"\n"), 0o644); err != nil {
		return nil, err
	}
	for _, argv := range [][]string{
		{"init", "-q", "-b", "main", work},
		{"-C", work, "add", "word"},
		{"-C", work, "-c", "user.name=test", "-c", "user.email=test@example.org", "commit", "-q", "-m", "a word"},
		{"clone", "-q", "--bare", work, bare},
		{"-C", bare, "config", "http.receivepack", "true"}, // PushHost asks who it is
	} {
		if out, err := exec.Command("git", argv...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("git %s: %w: %s", strings.Join(argv, " "), err, out)
		}
	}
	git, err := exec.LookPath("git")
	return &cgi.Handler{
		Path: git, Args: []string{"http-backend"}, Root: "/",
		Env: []string{
			"GIT_PROJECT_ROOT=" + filepath.Dir(bare), "GIT_HTTP_EXPORT_ALL=1",
			// The repository may belong to another user than the one who serves it.
			"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*",
		},
	}, err
}

func sha(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// zipped is a zip of files: names and what they hold. Writing to memory does not fail.
func zipped(files [][2]string) []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range files {
		w, err := z.Create(f[0])
		if err == nil {
			w.Write([]byte(f[1])) //nolint:errcheck // into memory
		}
	}
	z.Close() //nolint:errcheck // into memory
	return b.Bytes()
}

// tarred is a compressed tar of programs, all below one directory.
func tarred(below string, files [][2]string) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	t := tar.NewWriter(z)
	for i := range below {
		if below[i] == '/' {
			t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: below[:i+1], Mode: 0o755}) //nolint:errcheck // into memory
		}
	}
	for _, f := range files {
		t.WriteHeader(&tar.Header{Name: below + f[0], Mode: 0o755, Size: int64(len(f[1]))}) //nolint:errcheck // into memory
		t.Write([]byte(f[1]))                                                               //nolint:errcheck // into memory
	}
	t.Close() //nolint:errcheck // into memory
	z.Close() //nolint:errcheck // into memory
	return b.Bytes()
}

// archived is an archive as ar(5) has it.
func archived(files [][2]string) []byte {
	var b bytes.Buffer
	b.WriteString("!<arch>\n")
	for _, f := range files {
		fmt.Fprintf(&b, "%-16s%-12d%-6d%-6d%-8o%-10d`\n%s", f[0], 0, 0, 0, 0o100644, len(f[1]), f[1])
		if len(f[1])%2 == 1 {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}
