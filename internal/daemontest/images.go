package daemontest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/client"
)

// CacheDir returns <user cache>/sandboxd-test/KIND, made if it is absent: what tests
// build once and keep between runs and checkouts. Everything in it is named after
// the content it was made of, and is made again when it is missing or damaged.
func CacheDir(kind string) (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a directory for the test cache: %w (set HOME or XDG_CACHE_HOME)", err)
	}
	dir := filepath.Join(base, "sandboxd-test", kind)
	return dir, os.MkdirAll(dir, 0o755)
}

// Image has the daemon hold the image of a recipe: the one it has from an earlier
// test, else the archive in the cache, else a new build, which goes into the cache.
// Only the build needs a network.
func Image(t testing.TB, d *Daemon, name string) {
	t.Helper()
	c, err := client.New("unix://"+d.Socket, "")
	must(t, err)
	defer c.Close()
	recipe, err := os.ReadFile(filepath.Join(d.recipes, name, "recipe.toml"))
	must(t, err)
	sum := digest(recipe)
	note := filepath.Join(d.StateDir, "recipe-of-"+name)
	all, err := c.Images(t.Context())
	must(t, err)
	if b, _ := os.ReadFile(note); string(b) == sum &&
		slices.ContainsFunc(all, func(i client.ImageInfo) bool { return i.Name == name }) {
		return
	}
	if err := fromCache(t.Context(), c, name, sum); err != nil {
		t.Fatalf("image %s: %v", name, err)
	}
	must(t, os.WriteFile(note, []byte(sum), 0o600))
}

// fromCache imports the archive of the recipe with the digest sum. Where there is
// none, or a damaged one, it builds the image and exports it to the cache.
func fromCache(ctx context.Context, c *client.Client, name, sum string) error {
	dir, err := CacheDir("images")
	if err != nil {
		return err
	}
	path := filepath.Join(dir, name+"-"+sum[:16]+".tar")
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	if f, err := openWhole(path); err == nil {
		defer f.Close()
		_, err := c.ImportImage(ctx, client.Archive{Name: name, Body: f}, func(client.ImportProgress) {})
		return err
	}
	last := ""
	if _, err := c.BuildImage(ctx, name, func(line string) { last = line }); err != nil {
		return fmt.Errorf("build it: %w (its last line: %s)", err, last)
	}
	return keep(path, func(w io.Writer) error { return c.ExportImage(ctx, name, w) })
}

// keep writes a file and its digest beside it (path.sha256). A file without its
// digest is not whole.
func keep(path string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	h := sha256.New()
	if err := write(io.MultiWriter(f, h)); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Remove(path + ".sha256"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return os.WriteFile(path+".sha256", []byte(hex.EncodeToString(h.Sum(nil))+"\n"), 0o600)
}

// openWhole opens a file that keep wrote, if its content still has its digest.
func openWhole(path string) (*os.File, error) {
	want, err := os.ReadFile(path + ".sha256")
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	h := sha256.New()
	if _, err := io.Copy(h, f); err == nil && hex.EncodeToString(h.Sum(nil)) == strings.TrimSpace(string(want)) {
		if _, err = f.Seek(0, io.SeekStart); err == nil {
			return f, nil
		}
	}
	f.Close()
	return nil, fmt.Errorf("%s is damaged", path)
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
