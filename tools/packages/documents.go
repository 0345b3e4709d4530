package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"time"

	"github.com/goreleaser/nfpm/v2"
	"github.com/goreleaser/nfpm/v2/files"
)

// documents adds what people read.
func (b *build) documents(c *contents, f format) {
	for _, name := range []string{"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "THIRD_PARTY.md", "CHANGELOG.md"} {
		c.add(filepath.Join(b.source, name), filepath.Join(documents, name), f.doc, 0o644)
	}
	for _, dir := range []string{"docs", "deploy"} {
		c.tree(filepath.Join(b.source, dir), filepath.Join(documents, dir), f.doc)
	}
	licences, err := b.licences()
	c.fail(err)
	c.text(zip(licences), filepath.Join(documents, "third-party-licences.txt.gz"), f.doc, 0o644)
	b.legal(c, f, "sandboxd", copyright, overrides)
	if f.name == "rpm" {
		c.dirs(documents)
	}
}

const copyrightHead = `Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: sandboxd
Source: https://github.com/sandboxd/sandboxd
`

const copyrightTail = `
License: Apache-2.0
 Licensed under the Apache License, Version 2.0 (the "License"); you may not use this
 software except in compliance with the License. Unless required by applicable law or
 agreed to in writing, software distributed under the License is distributed on an
 "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or
 implied. See the License for the specific language governing permissions and
 limitations under the License.
 .
 On Debian systems, the text of the License is in /usr/share/common-licenses/Apache-2.0.
`

const copyright = copyrightHead + `Comment: The programs are linked from modules of others. THIRD_PARTY.md names them, and
 third-party-licences.txt.gz has the text of each licence, both in
 /usr/share/doc/sandboxd.

Files: *
Copyright: 2026 the authors of sandboxd
License: Apache-2.0
` + copyrightTail

const imageCopyright = copyrightHead + `Comment: The archive is a root file system that was built of packages of Debian and of
 language registries. Each of Debian's packages has its own copyright file in the
 archive, in /usr/share/doc.

Files: *
Copyright: 2026 the authors of sandboxd, and of the packages in the archive
License: Apache-2.0
` + copyrightTail

// overrides are what lintian should not report, each with the reason above it.
const overrides = `# Go links statically. Nothing of the host is in these programs, and the agent and gVisor
# run where there is no library of the host.
sandboxd: statically-linked-binary [usr/lib/sandboxd/versions/*]
# runc re-executes a sealed copy of this program in each sandbox; it is built as runc is.
sandboxd: hardening-no-pie [usr/lib/sandboxd/versions/*/libexec/sandboxd/sandboxd-runc]
`

// legal adds the files that each package has in /usr/share/doc: copyright or licence, and changes.
func (b *build) legal(c *contents, f format, name, copyright, overrides string) {
	dir := filepath.Join("/usr/share/doc", name)
	changes, err := os.ReadFile(filepath.Join(b.source, "CHANGELOG.md"))
	c.fail(err)
	if f.name == "rpm" {
		c.add(filepath.Join(b.source, "LICENSE"), filepath.Join("/usr/share/licenses", name, "LICENSE"), files.TypeRPMLicence, 0o644)
		c.text([]byte(copyright), filepath.Join(dir, "copyright"), files.TypeRPMDoc, 0o644)
		c.dir("/usr/share/licenses/" + name)
		if name != "sandboxd" {
			c.dir(dir)
		}
		return
	}
	c.text([]byte(copyright), filepath.Join(dir, "copyright"), files.TypeFile, 0o644)
	c.text(zip(changes), filepath.Join(dir, "changelog.gz"), files.TypeFile, 0o644)
	c.text(zip([]byte(b.notes.debian(name, b.version, b.maintainer, b.time))), filepath.Join(dir, "changelog.Debian.gz"), files.TypeFile, 0o644)
	if overrides != "" {
		c.text([]byte(overrides), filepath.Join("/usr/share/lintian/overrides", name), files.TypeFile, 0o644)
	}
}

// changes gives an rpm its changelog; that of a deb is a file.
func (b *build) changes(info *nfpm.Info, f format) (err error) {
	if f.name != "rpm" {
		return nil
	}
	type note struct {
		Note string `json:"note"`
	}
	entry := map[string]any{
		"semver": fullVersion(info), "date": b.time.Format(time.RFC3339), "packager": b.maintainer,
	}
	var notes []note
	for _, e := range b.notes {
		notes = append(notes, note{e})
	}
	entry["changes"] = notes
	text, err := json.Marshal([]any{entry}) // YAML, too
	if err != nil {
		return err
	}
	info.Changelog, err = b.keep(text)
	return err
}

// fullVersion is the version of a package as dpkg and rpm have it.
func fullVersion(info *nfpm.Info) string {
	v := info.Version
	if info.Prerelease != "" {
		v += "~" + info.Prerelease
	}
	if info.VersionMetadata != "" {
		v += "+" + info.VersionMetadata
	}
	return v + "-" + info.Release
}

// zip compresses a text with gzip -9n.
func zip(text []byte) []byte {
	var buf bytes.Buffer
	w, _ := gzip.NewWriterLevel(&buf, gzip.BestCompression)
	w.Write(text)
	w.Close()
	return buf.Bytes()
}

// changelog are the entries of one version.
type changelog []string

var sectionHead = regexp.MustCompile(`(?m)^## \[([^\]]+)\].*\n`)

// readChangelog returns the entries of a version. One that is not a release has those of
// Unreleased; a release without a section is an error.
func readChangelog(path, version string) (changelog, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	want := version
	if strings.ContainsRune(version, '+') || strings.HasSuffix(version, "-dev") {
		want = "Unreleased"
	}
	heads := sectionHead.FindAllSubmatchIndex(text, -1)
	for i, m := range heads {
		if string(text[m[2]:m[3]]) != want {
			continue
		}
		end := len(text)
		if i+1 < len(heads) {
			end = heads[i+1][0]
		}
		var all changelog
		for line := range strings.Lines(string(text[m[1]:end])) {
			line = strings.TrimRight(line, "\n")
			switch {
			case strings.HasPrefix(line, "- "):
				all = append(all, line[2:])
			case strings.HasPrefix(line, "  ") && len(all) > 0:
				all[len(all)-1] += " " + strings.TrimSpace(line)
			}
		}
		return all, nil
	}
	return nil, fmt.Errorf("%s has no section [%s]: a release needs one", path, want)
}

// debian is the changelog in Debian's form, deb-changelog(5).
func (l changelog) debian(name, version, maintainer string, at time.Time) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s (%s-1) unstable; urgency=medium\n\n", name, strings.Replace(version, "-", "~", 1))
	if len(l) == 0 {
		l = changelog{"No changes."}
	}
	for _, entry := range l {
		line := "  *"
		for _, word := range strings.Fields(entry) {
			if len(line)+1+len(word) > 76 {
				s.WriteString(line + "\n")
				line = "   "
			}
			line += " " + word
		}
		s.WriteString(line + "\n")
	}
	fmt.Fprintf(&s, "\n -- %s  %s\n", maintainer, at.Format(time.RFC1123Z))
	return s.String()
}

// licences returns the licences of Go and of all modules that the programs are linked from.
func (b *build) licences() ([]byte, error) {
	if b.texts != "" {
		return os.ReadFile(b.texts)
	}
	type module struct{ Path, Version, Dir string }
	found := map[string]module{}
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	found["Go"] = module{"the Go standard library", "", strings.TrimSpace(string(goroot))}
	for dir, what := range map[string]string{b.source: "./cmd/...", filepath.Join(b.source, "tools/runsc"): "."} {
		cmd := exec.Command("go", "list", "-deps", "-tags", "seccomp", "-json=Module", what)
		cmd.Dir, cmd.Stderr = dir, os.Stderr
		cmd.Env = append(os.Environ(), "GOARCH="+b.arch, "GOOS=linux", "CGO_ENABLED=1")
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list in %s: %w", dir, err)
		}
		for d := json.NewDecoder(bytes.NewReader(out)); ; {
			var p struct{ Module *module }
			if err := d.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, err
			}
			if p.Module != nil && p.Module.Version != "" {
				found[p.Module.Path+"@"+p.Module.Version] = *p.Module
			}
		}
	}
	var names []string
	for name := range found {
		names = append(names, name)
	}
	sort.Strings(names)
	var text bytes.Buffer
	for _, name := range names {
		if err := appendLicence(&text, strings.TrimSpace(found[name].Path+" "+found[name].Version), found[name].Dir); err != nil {
			return nil, err
		}
	}
	return text.Bytes(), nil
}

var licenceFile = regexp.MustCompile(`(?i)^(licen[cs]es?|copying|notice|patents|copyright)([.-].*)?$`)

// appendLicence writes the files of a module that say what its licence is.
func appendLicence(text *bytes.Buffer, name, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("the licence of %s: %w", name, err)
	}
	any := false
	for _, e := range entries {
		if e.IsDir() || !licenceFile.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".go") {
			continue
		}
		licence, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		any = true
		fmt.Fprintf(text, "==== %s: %s ====\n\n%s\n\n", name, e.Name(), bytes.TrimSpace(licence))
	}
	if !any {
		return fmt.Errorf("%s has no licence in %s", name, dir)
	}
	return nil
}
