// Command modules writes the Go modules of a module cache into one archive, a tar in zstd, for hosts
// without a network. scripts/vendor-archive.sh runs it.
//
//	modules -o FILE $GOMODCACHE/cache/download
//
//	modules/<module>/@v/<version>.info   {"Version":"<version>"}
//	modules/<module>/@v/<version>.mod
//	modules/<module>/@v/<version>.zip    its files, in order and not compressed
//
// The tree is what GOPROXY=file://…/modules takes (https://go.dev/ref/mod#goproxy-protocol). The same
// modules give the same bytes, wherever they were downloaded from: what proxies may say in different
// ways is left out, and each zip is made anew. go.sum has sums of the files in a zip, not of the zip,
// so the go command still checks each module. zstd compresses the whole better than the parts.
package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
)

func main() {
	out := flag.String("o", "", "file to write")
	flag.Parse()
	if *out == "" || flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	if err := writeFile(*out, flag.Arg(0)); err != nil {
		fmt.Fprintln(os.Stderr, "modules:", err)
		os.Exit(1)
	}
}

func writeFile(out, cache string) error {
	f, err := os.Create(out + ".new")
	if err != nil {
		return err
	}
	err = errors.Join(write(f, cache), f.Close())
	if err == nil {
		err = os.Rename(out+".new", out)
	}
	if err != nil {
		return errors.Join(err, os.Remove(out+".new"))
	}
	return nil
}

// window is how far back zstd looks for what repeats: versions of one module resemble each other.
// zstd -d takes at most 128 MiB without an option.
const window = 64 << 20

// write writes the archive of a cache.
func write(w io.Writer, cache string) error {
	z, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedBetterCompression), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(window))
	if err != nil {
		return err
	}
	p := packer{tw: tar.NewWriter(z), dirs: map[string]bool{}}
	names, err := files(cache)
	if err != nil {
		return err
	}
	for _, name := range names {
		b, err := content(filepath.Join(cache, name))
		if err == nil {
			err = p.file(path.Join("modules", filepath.ToSlash(name)), b)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return errors.Join(p.tw.Close(), z.Close())
}

// files are the files of modules in a cache, in the order of their names.
func files(cache string) (names []string, err error) {
	err = filepath.WalkDir(cache, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(cache, p)
		if err != nil {
			return err
		}
		if d.IsDir() && rel == "sumdb" {
			return filepath.SkipDir
		}
		ours := slices.Contains([]string{".info", ".mod", ".zip"}, filepath.Ext(p))
		if ours && d.Type().IsRegular() && filepath.Base(filepath.Dir(p)) == "@v" {
			names = append(names, rel)
		}
		return nil
	})
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("%s has no modules", cache)
	}
	slices.Sort(names)
	return names, err
}

// content is a file of a module in the one form that it has in the archive.
func content(name string) ([]byte, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	switch filepath.Ext(name) {
	case ".info": // the time of the commit and where it came from: proxies differ in it, and nobody asks
		var info struct{ Version string }
		if err := json.Unmarshal(b, &info); err != nil {
			return nil, err
		}
		return json.Marshal(info)
	case ".zip":
		return repack(b)
	}
	return b, nil
}

// repack makes a zip with the same files in order, without times and not compressed.
func repack(b []byte) ([]byte, error) {
	r, err := zip.NewReader(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return nil, err
	}
	slices.SortFunc(r.File, func(a, b *zip.File) int { return strings.Compare(a.Name, b.Name) })
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for _, f := range r.File {
		if err := copyOf(w, f); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	err = w.Close() // which writes the list of the files
	return out.Bytes(), err
}

func copyOf(w *zip.Writer, f *zip.File) error {
	from, err := f.Open()
	if err != nil {
		return err
	}
	to, err := w.CreateHeader(&zip.FileHeader{Name: f.Name, Method: zip.Store})
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, from.Close())
}

// noTime is the time of all files: the first that a zip can have, because tar warns of older ones. The
// archive is another one only if the modules are.
var noTime = time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC)

// packer writes a tar of files that anybody may read.
type packer struct {
	tw   *tar.Writer
	dirs map[string]bool
}

func (p *packer) file(name string, b []byte) error {
	if err := p.dir(path.Dir(name)); err != nil {
		return err
	}
	h := tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(b)), ModTime: noTime, Format: tar.FormatPAX}
	if err := p.tw.WriteHeader(&h); err != nil {
		return err
	}
	_, err := p.tw.Write(b)
	return err
}

// dir writes the directories of a name that are not there yet.
func (p *packer) dir(name string) error {
	if name == "." || p.dirs[name] {
		return nil
	}
	if err := p.dir(path.Dir(name)); err != nil {
		return err
	}
	p.dirs[name] = true
	return p.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: noTime, Format: tar.FormatPAX})
}
