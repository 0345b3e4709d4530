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
	"github.com/sandboxd/sandboxd/pkg/client"
)

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
	sum := testcache.Digest(recipe)
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
	dir, err := testcache.Dir("images")
	if err != nil {
		return err
	}
	path := filepath.Join(dir, name+"-"+sum[:16]+".tar")
	lock, err := testcache.Lock(path)
	if err != nil {
		return err
	}
	defer lock.Close()
	if f, err := testcache.Open(path); err == nil {
		defer f.Close()
		_, err := c.ImportImage(ctx, client.Archive{Name: name, Body: f}, func(client.ImportProgress) {})
		return err
	}
	last := ""
	if _, err := c.BuildImage(ctx, name, func(line string) { last = line }); err != nil {
		return fmt.Errorf("build it: %w (its last line: %s)", err, last)
	}
	return testcache.Keep(path, func(w io.Writer) error { return c.ExportImage(ctx, name, w) })
}
