package sbom

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/mail"
	"net/textproto"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/tarball/tartest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	imports "github.com/sandboxd/sandboxd/pkg/snapshot/layer"
)

// FuzzStatus: a package that is read has the name, the version and the architecture that
// net/textproto reads in one of the paragraphs; a package that is written is read again; and no
// more notes and packages come out than there are paragraphs.
func FuzzStatus(f *testing.F) {
	f.Add([]byte(status))
	f.Add([]byte("Package: a\nVersion: 1\nArchitecture: all\n\n\n \t\nPackage: b\nVersion: 1\n 2\nArchitecture: all\n"))
	f.Add([]byte("package: a\r\nVERSION:1\r\nArchitecture:\tall\r\nX: " + strings.Repeat("\n y", 1000)))
	f.Add([]byte("# text\nPackage: a\nPackage: b\n: c\n continued\n\x00\xff: d"))
	f.Fuzz(func(t *testing.T, b []byte) {
		found, notes := readStatus(b)
		others, paragraphs := secondReader(b)
		if len(found)+len(notes) > paragraphs {
			t.Fatalf("%d packages and %d notes of %d paragraphs", len(found), len(notes), paragraphs)
		}
		for _, p := range found {
			if why := p.wrong(); why != "" {
				t.Fatal(why)
			}
			if id := p.Name + " " + p.Version + " " + p.Arch; others != nil && !slices.Contains(others, id) {
				t.Fatalf("%q is read, but net/textproto has %q", id, others)
			}
			again, _ := readStatus(fmt.Appendf(nil, "Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: %s\n", p.Name, p.Version,
				p.Arch, p.Supplier))
			if len(again) != 1 || again[0].Name != p.Name || again[0].Version != p.Version || again[0].Supplier != p.Supplier {
				t.Fatalf("%+v is read again as %+v", p, again)
			}
		}
	})
}

// secondReader has net/textproto read the paragraphs. It returns nothing if that takes the file for
// something else than deb822(5) does: it has no comments, and removes spaces in other places.
func secondReader(b []byte) (found []string, paragraphs int) {
	text := ""
	odd := bytes.Contains(b, []byte("\n#")) || bytes.HasPrefix(b, []byte("#"))
	all := []string{}
	end := func() {
		if text == "" {
			return
		}
		paragraphs++
		h, err := textproto.NewReader(bufio.NewReader(strings.NewReader(text + "\n\n"))).ReadMIMEHeader()
		if odd = odd || err != nil; err == nil {
			all = append(all, h.Get("Package")+" "+h.Get("Version")+" "+h.Get("Architecture"))
		}
		text = ""
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if strings.Trim(line, " \t\r") == "" {
			end()
			continue
		}
		text += strings.TrimRight(line, "\r") + "\n"
	}
	end()
	if odd {
		return nil, paragraphs
	}
	return all, paragraphs
}

// FuzzMetadata: what is read of a package is what net/mail reads, or nothing.
func FuzzMetadata(f *testing.F) {
	f.Add([]byte(wheel))
	f.Add([]byte("name: b_c.D\r\nVERSION:2.0.post1\r\nLicense: BSD\r\n\r\nName: text\r\n"))
	f.Add([]byte("Name: a\nName: b\n c\nVersion: 1\n"))
	f.Add([]byte(" Name: a\nVersion: 1\nno header\nVersion: 2\n"))
	f.Add([]byte("Name: a\nVersion: 1\nLicense: " + strings.Repeat("\n text", 1000)))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, why := readMetadata(b)
		if (why == "") != (p.wrong() == "") {
			t.Fatalf("%+v: %q", p, why)
		}
		m, err := mail.ReadMessage(bytes.NewReader(append(bytes.Clone(b), "\n\n"...)))
		if err != nil || why != "" {
			return
		}
		if p.Name != m.Header.Get("Name") || p.Version != m.Header.Get("Version") {
			t.Fatalf("%s %s, but net/mail has %q %q", p.Name, p.Version, m.Header.Get("Name"), m.Header.Get("Version"))
		}
	})
}

// FuzzPackageJSON: what is read of a package is what a struct with the exact names has.
func FuzzPackageJSON(f *testing.F) {
	f.Add([]byte(`{"name":"@team/lib","version":"1.2.3","license":{"type":"MIT"},"licenses":["ISC"]}`))
	f.Add([]byte(`{"NAME":"a","name":7,"version":[],"license":[null,{},"",["MIT"]]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, why := readPackageJSON(b)
		if why != "" {
			return
		}
		var all map[string]any
		if err := json.Unmarshal(b, &all); err != nil || all["name"] != p.Name || all["version"] != p.Version || p.wrong() != "" {
			t.Fatalf("%+v of %v", p, all)
		}
	})
}

// FuzzLayers: two layers leave the files that a few plain lines say, which keep every name.
func FuzzLayers(f *testing.F) {
	egg := func(name, version string) entry { return file(name, "Name: x\nVersion: "+version+"\n") }
	lower := layerOf(f, dir("lib/"), egg("lib/a.egg-info", "1"), egg("lib/sub/b.egg-info", "2"), file("lib/sub/text", ""))
	f.Add(lower, layerOf(f, file("lib/.wh.sub", ""), egg("lib/c.egg-info", "3")))
	f.Add(lower, layerOf(f, file("lib/.wh..wh..opq", ""), hard("lib/d.egg-info", "lib/e"), egg("lib/e", "4")))
	f.Add(lower, layerOf(f, link("lib", "/etc"), file(".wh..wh..opq", "")))
	f.Add(lower, layerOf(f, dir("lib/a.egg-info"), egg("lib/a.egg-info/PKG-INFO", "5"), link("lib/sub", "x")))
	f.Add(lower, layerOf(f, node(tar.TypeFifo, "lib"), node(tar.TypeChar, "lib/a.egg-info/x"), hard("lib/sub", "dev/x"), link(".", "x")))
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		got := newFiles()
		want := map[string]bool{} // names to whether the file says something
		for _, b := range [][]byte{tartest.Sum(lower), tartest.Sum(upper)} {
			err := got.add(func() io.ReadCloser { return io.NopCloser(bytes.NewReader(b)) })
			if err != nil {
				if e, ok := errors.AsType[*errs.Error](err); !ok || e.Code != errs.Invalid || len(e.Text) > 1<<10 {
					t.Fatalf("%v", err)
				}
				return
			}
			plain(b, want)
		}
		maps.DeleteFunc(want, func(_ string, says bool) bool { return !says })
		if have := slices.Sorted(maps.Keys(got.said)); !slices.Equal(have, slices.Sorted(maps.Keys(want))) {
			t.Fatalf("%q, want %q", have, slices.Sorted(maps.Keys(want)))
		}
		dirs := map[string]int{}
		weight := 0
		for name, s := range got.said {
			weight += s.weight()
			for dir := range above(name) {
				dirs[dir]++
			}
		}
		if !maps.Equal(dirs, got.above) || weight != got.weight {
			t.Fatalf("above %v, want %v; weight %d, want %d", got.above, dirs, got.weight, weight)
		}
	})
}

// plain puts a layer that add has taken on top of files.
func plain(b []byte, files map[string]bool) {
	remove := func(name string, itself bool) {
		for f := range files {
			if itself && f == name || strings.HasPrefix(f, name+"/") || name == "." {
				delete(files, f)
			}
		}
	}
	type change struct {
		name string
		h    *tar.Header
	}
	var own []change
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		name, err := cleanName(h.Name)
		if err != nil || imports.Ignored(name) {
			continue
		}
		switch dir, base := path.Split(name); {
		case base == ".wh..wh..opq":
			remove(path.Clean(dir), false)
		case strings.HasPrefix(base, ".wh..wh."):
		case strings.HasPrefix(base, ".wh."):
			remove(path.Join(dir, strings.TrimPrefix(base, ".wh.")), true)
		case imports.LeftOut(h):
		default:
			own = append(own, change{name, h})
			continue
		}
		own = append(own, change{path.Clean(path.Dir(name)) + "/.", h}) // its directory is there
	}
	seen := map[string]bool{}
	for _, c := range own { // what lies below hides a file of its name in the layers below
		for dir := path.Dir(c.name); dir != "."; dir = path.Dir(dir) {
			if _, file := files[dir]; file && !seen[dir] {
				delete(files, dir)
			}
		}
		if c.h.Typeflag != tar.TypeDir && !strings.HasSuffix(c.name, "/.") {
			remove(c.name, false)
		}
		if strings.HasSuffix(c.name, "/.") {
			continue
		}
		delete(files, c.name)
		seen[c.name] = true
		if k := kindOf(c.name); c.h.Typeflag != tar.TypeDir {
			says := k != nothing && slices.Contains([]byte{tar.TypeReg, tar.TypeGNUSparse, tar.TypeLink}, c.h.Typeflag)
			if c.h.Typeflag == tar.TypeSymlink {
				says = k != nothing && k != osRelease || docOfAny.MatchString(c.name)
			}
			files[c.name] = says
		}
	}
}
