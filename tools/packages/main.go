// Command packages writes the packages of sandboxd: a .deb and a .rpm of the programs, and one
// of each for every archive of an image. `make packages` runs it after `make build`.
//
// All of a version V is below /usr/lib/sandboxd/versions/V, which is a prefix as that of
// scripts/install.sh. The link /usr/lib/sandboxd/current leads there, and the programs of
// /usr/bin lead to current. What systemd, man and shells read is where they look for it.
//
// The same files and the same -epoch give the same bytes.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/goreleaser/nfpm/v2"
	"github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	"github.com/goreleaser/nfpm/v2/rpm"
)

func main() {
	b := &build{}
	flag.StringVar(&b.source, "source", ".", "the checkout")
	flag.StringVar(&b.bin, "bin", "build/bin", "the programs to pack")
	flag.StringVar(&b.native, "native", "build/bin", "programs of this machine's architecture: they print completions and defaults")
	flag.StringVar(&b.man, "man", "build/man", "the manual pages")
	flag.StringVar(&b.images, "images", "build/images", "archives of images, NAME.tar")
	flag.StringVar(&b.texts, "licences", "", "file with the licences of linked modules; default: they are collected")
	flag.StringVar(&b.out, "out", "build/packages", "directory to write to")
	flag.StringVar(&b.arch, "arch", "amd64", "architecture, as Go has it")
	flag.StringVar(&b.version, "version", "", "semantic version of the programs")
	flag.StringVar(&b.maintainer, "maintainer", "sandboxd maintainers <maintainers@sandboxd.example>", "who answers for the packages")
	flag.StringVar(&b.key, "sign", "", "secret key of gpg that signs each .rpm, and the hashes of all packages; \"\": nothing is signed")
	flag.StringVar(&b.passphrase, "passphrase-file", "", "file with the passphrase of that key (default: gpg asks)")
	epoch := flag.Int64("epoch", 0, "time of all files, in seconds since 1970")
	flag.Parse()
	b.time = time.Unix(*epoch, 0).UTC()
	if err := b.run(); err != nil {
		fmt.Fprintln(os.Stderr, "packages:", err)
		os.Exit(1)
	}
}

// A build makes the packages of one version and architecture.
type build struct {
	source, bin, native, man, images, out string
	texts, arch, version, maintainer      string
	key, passphrase                       string

	time   time.Time
	stage  string // a temporary directory for files that are made
	staged int
	notes  changelog
}

// versionForm is a semantic version whose characters dpkg, rpm and paths take.
var versionForm = regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.]+)?$`)

func (b *build) run() (err error) {
	if !versionForm.MatchString(b.version) {
		return fmt.Errorf("-version %q is no semantic version", b.version)
	}
	if b.notes, err = readChangelog(filepath.Join(b.source, "CHANGELOG.md"), b.version); err != nil {
		return err
	}
	if b.stage, err = os.MkdirTemp("", "sandboxd-packages"); err != nil {
		return err
	}
	defer os.RemoveAll(b.stage)
	if err := os.MkdirAll(b.out, 0o755); err != nil {
		return err
	}
	for _, f := range formats {
		info, err := b.programs(f)
		if err != nil {
			return fmt.Errorf("package of the programs: %w", err)
		}
		if err := b.write(f, info); err != nil {
			return err
		}
	}
	archives, err := filepath.Glob(filepath.Join(b.images, "*.tar"))
	if err != nil {
		return err
	}
	if len(archives) == 0 {
		fmt.Fprintf(os.Stderr, "packages: %s has no archives, so there are no packages of images; make images writes them\n", b.images)
	}
	for _, archive := range archives {
		for _, f := range formats {
			info, err := b.image(f, archive)
			if err != nil {
				return fmt.Errorf("package of %s: %w", archive, err)
			}
			if err := b.write(f, info); err != nil {
				return err
			}
		}
	}
	if b.key == "" {
		return os.RemoveAll(filepath.Join(b.out, sumsSigned)) // it would be of other packages
	}
	return b.signSums()
}

// A format is a kind of packages.
type format struct {
	name     string
	packager nfpm.Packager
	zsh      string // where zsh looks for completions
	doc      string // the kind of files that are documentation
}

var formats = []format{
	{"deb", deb.Default, "/usr/share/zsh/vendor-completions", files.TypeFile},
	{"rpm", rpm.DefaultRPM, "/usr/share/zsh/site-functions", files.TypeRPMDoc},
}

// info is what all packages share.
func (b *build) info(name, summary, text string) *nfpm.Info {
	info := nfpm.WithDefaults(&nfpm.Info{
		Name: name, Arch: b.arch, Platform: "linux", Version: b.version, Release: "1", MTime: b.time,
		Section: "admin", Priority: "optional", Maintainer: b.maintainer, Vendor: "sandboxd",
		Description: summary + "\n" + text, License: "Apache-2.0", Homepage: "https://github.com/sandboxd/sandboxd",
		DisableGlobbing: true,
		Overridables: nfpm.Overridables{
			Umask: 0o22,
			RPM:   nfpm.RPM{BuildHost: "localhost", Summary: strings.ToUpper(summary[:1]) + summary[1:], Compression: "zstd", Group: "System Environment/Daemons"},
			// lintian and Debian 11 know no zstd, and xz in Go takes seven times as long for a tenth less.
			Deb: nfpm.Deb{Compression: "gzip"},
		},
	})
	if b.key != "" {
		info.RPM.Signature.SignFn = func(data io.Reader) ([]byte, error) { return b.sign(data) }
	}
	return info
}

// write packs info into its file, which appears whole.
func (b *build) write(f format, info *nfpm.Info) error {
	path := filepath.Join(b.out, f.packager.ConventionalFileName(info))
	file, err := os.CreateTemp(b.out, ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if err := f.packager.Package(info, file); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := file.Chmod(0o644); err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	if err := os.Rename(file.Name(), path); err != nil {
		return err
	}
	fmt.Println(path)
	return nil
}

// keep writes text to a new file of the stage.
func (b *build) keep(text []byte) (path string, err error) {
	b.staged++
	path = filepath.Join(b.stage, fmt.Sprint(b.staged))
	return path, os.WriteFile(path, text, 0o644)
}

// contents collects the files of a package, until one of them fails.
type contents struct {
	b   *build
	all files.Contents
	err error
}

// file adds a file of the checkout or of the build.
func (c *contents) file(source, target string, mode os.FileMode) {
	c.add(source, target, files.TypeFile, mode)
}

func (c *contents) add(source, target, kind string, mode os.FileMode) {
	c.all = append(c.all, &files.Content{
		Source: source, Destination: target, Type: kind,
		FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root", Mode: mode, MTime: c.b.time},
	})
}

// text adds a file with the given text.
func (c *contents) text(text []byte, target, kind string, mode os.FileMode) {
	path, err := c.b.keep(text)
	if err != nil {
		c.fail(err)
		return
	}
	c.add(path, target, kind, mode)
}

func (c *contents) link(to, target string) { c.add(to, target, files.TypeSymlink, 0o777) }

// dir adds a directory that this package owns.
func (c *contents) dir(target string) { c.add("", target, files.TypeDir, 0o755) }

// zipped adds a file that is compressed, as man pages and large documents are.
func (c *contents) zipped(f format, source, target string) {
	text, err := os.ReadFile(source)
	if err != nil {
		c.fail(err)
		return
	}
	c.text(zip(text), target+".gz", f.doc, 0o644)
}

// tree adds all files below a directory of the checkout.
func (c *contents) tree(dir, target, kind string) {
	c.fail(filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		c.add(path, filepath.Join(target, rel), kind, 0o644)
		return nil
	}))
}

// dirs adds each directory between top and a file below it: rpm removes no other ones.
func (c *contents) dirs(top string) {
	seen := map[string]bool{}
	for _, f := range c.all {
		for dir := filepath.Dir(f.Destination); dir == top || strings.HasPrefix(dir, top+"/"); dir = filepath.Dir(dir) {
			if !seen[dir] {
				seen[dir] = true
				c.dir(dir)
			}
		}
	}
}

func (c *contents) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

// script stages a maintainer script: the parts one after the other, with values in place of the
// names between "@".
func (b *build) script(values map[string]string, parts ...string) (string, error) {
	var text strings.Builder
	io.WriteString(&text, "#!/bin/sh\n")
	for _, part := range parts {
		s, err := scripts.ReadFile("scripts/" + part + ".sh")
		if err != nil {
			return "", err
		}
		text.Write(s)
	}
	script := text.String()
	for name, value := range values {
		script = strings.ReplaceAll(script, "@"+name+"@", value)
	}
	return b.keep([]byte(script))
}
