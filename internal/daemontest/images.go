package daemontest

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testcache"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// Image makes the image of a recipe available to the daemon. It uses the daemon's image
// from an earlier test, else the archive in the cache, else a new build, which it adds to
// the cache. Only the build needs a network.
func Image(t testing.TB, d *Daemon, name string) {
	t.Helper()
	c, err := client.New("unix://"+d.Socket, "")
	must(t, err)
	defer c.Close()
	recipe, err := os.ReadFile(filepath.Join(d.recipes, name, "recipe.toml"))
	must(t, err)
	sum := testcache.Digest(recipe)
	note := filepath.Join(d.StateDir, "recipe-of-"+name)
	all, err := c.Images().List(t.Context())
	must(t, err)
	if b, _ := os.ReadFile(note); string(b) == sum &&
		slices.ContainsFunc(all, func(i wire.ImageInfo) bool { return i.Name == name }) {
		return
	}
	if err := fromCache(t.Context(), c, name, sum); err != nil {
		t.Fatalf("image %s: %v", name, err)
	}
	must(t, os.WriteFile(note, []byte(sum), 0o600))
}

// fromCache imports the archive of the recipe with the digest sum. If the archive is
// missing or damaged, it builds the image and exports it to the cache.
func fromCache(ctx context.Context, c *client.Client, name, sum string) error {
	path, err := archive(name, sum)
	if err != nil {
		return err
	}
	lock, err := testcache.Lock(path)
	if err != nil {
		return err
	}
	defer lock.Close()
	if f, err := testcache.Open(path); err == nil {
		defer f.Close()
		_, err := c.Images().Import(ctx, client.Archive{Name: name, Body: f}, func(wire.ImportProgress) {})
		return err
	}
	last := ""
	if _, err := c.Images().Build(ctx, name, func(line string) { last = line }); err != nil {
		return fmt.Errorf("build it: %w (its last line: %s)", err, last)
	}
	return testcache.Keep(path, func(w io.Writer) error { return c.Images().Export(ctx, name, w) })
}

// Cached reports whether the cache has the image of a recipe below the directory recipes.
func Cached(t testing.TB, recipes, name string) bool {
	t.Helper()
	recipe, err := os.ReadFile(filepath.Join(recipes, name, "recipe.toml"))
	must(t, err)
	path, err := archive(name, testcache.Digest(recipe))
	must(t, err)
	f, err := testcache.Open(path)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// archive is the path in the cache of an image whose recipe has the digest sum.
func archive(name, sum string) (string, error) {
	dir, err := testcache.Dir("images")
	return filepath.Join(dir, name+"-"+sum[:16]+".tar"), err
}
