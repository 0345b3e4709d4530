package server

import (
	"encoding/json"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

func (e *env) list(query string) (paths []string) {
	e.Helper()
	var infos []agent.FileInfo
	got := e.call(200, "GET", query, nil)
	if err := json.Unmarshal([]byte(got), &infos); err != nil || infos == nil {
		e.Errorf("%s: %q: %v", query, got, err)
	}
	for _, i := range infos {
		paths = append(paths, strings.TrimPrefix(i.Path, e.dir+"/"))
	}
	return paths
}

func TestListAndSearch(t *testing.T) {
	e := newEnv(t)
	for _, f := range []string{"b.go", "a/x.go", "a/c/y.txt", "a/c/z.conf", "a.txt"} {
		e.write(e.dir+"/"+f, f)
	}
	os.Symlink(e.dir, e.dir+"/a/loop") //nolint:errcheck // seen below
	d := q(e.dir)
	for query, want := range map[string][]string{
		"/directories/list?path=" + d:              {"a", "a.txt", "b.go"},
		"/directories/list?path=" + d + "&depth=0": nil,
		"/directories/list?path=" + d + "&depth=2": {"a", "a/c", "a/loop", "a/x.go", "a.txt", "b.go"},
		"/directories/list?path=a/c/":              {"a/c/y.txt", "a/c/z.conf"},
		"/files/search?path=" + d:                  {"a/c/y.txt", "a/c/z.conf", "a/loop", "a/x.go", "a.txt", "b.go"},
		"/files/search?path=.&pattern=*.go":        {"a/x.go", "b.go"},
		"/files/search?path=.&pattern=*.conf":      {"a/c/z.conf"},
		"/files/search?path=.&pattern=**/*.go":     {"a/x.go", "b.go"},
		"/files/search?path=.&pattern=a/*.go":      {"a/x.go"},
		"/files/search?path=.&pattern=%7Bx,y%7D.*": {"a/c/y.txt", "a/x.go"},
		"/files/search?path=.&pattern=nope":        nil,
	} {
		if got := e.list(query); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", query, got, want)
		}
	}
	e.call(404, "GET", "/directories/list?path=nope", nil)
	e.call(400, "GET", "/directories/list?path=b.go", nil)
	e.call(400, "GET", "/directories/list?path=a/loop", nil)
	e.call(400, "GET", "/directories/list", nil)
	e.call(400, "GET", "/directories/list?path=a&depth=-1", nil)
	e.call(400, "GET", "/directories/list?path=a&depth=x", nil)
	e.call(404, "GET", "/files/search?path=nope", nil)
	e.call(400, "GET", "/files/search", nil)
	e.call(400, "GET", "/files/search?path=a&pattern=%5B", nil)
}

func TestDirectories(t *testing.T) {
	e := newEnv(t)
	e.call(200, "POST", "/directories", map[string]agent.FileMode{"p/q/r": {Mode: 644}, "s": {}})
	for path, mode := range map[string]fs.FileMode{"p": 0o755, "p/q": 0o755, "p/q/r": 0o644, "s": 0o755} {
		if fi, err := os.Stat(e.dir + "/" + path); err != nil || fi.Mode() != fs.ModeDir|mode {
			t.Errorf("%s: %v %v", path, fi, err)
		}
	}
	e.call(200, "POST", "/directories", map[string]agent.FileMode{"p": {Mode: 700}})
	if fi, _ := os.Stat(e.dir + "/p"); fi.Mode().Perm() != 0o755 {
		t.Error("the mode of a directory that was there changed")
	}
	e.write(e.dir+"/file", "x")
	os.Symlink("nowhere", e.dir+"/dangling") //nolint:errcheck // used below
	e.call(500, "POST", "/directories", map[string]agent.FileMode{"file": {}})
	e.call(500, "POST", "/directories", map[string]agent.FileMode{"file/below": {}})
	e.call(500, "POST", "/directories", map[string]agent.FileMode{"dangling": {}})
	e.call(400, "POST", "/directories", map[string]agent.FileMode{"": {}})
	e.call(400, "POST", "/directories", map[string]agent.FileMode{"x": {Mode: 9}})
	e.call(200, "DELETE", "/directories?path=p&path=nope&path=s", nil)
	e.call(400, "DELETE", "/directories?path=/", nil)
	e.call(400, "DELETE", "/directories?path="+q(e.dir)+"&path=/../", nil)
	e.call(400, "DELETE", "/directories", nil)
	if _, err := os.Stat(e.dir + "/p"); err == nil {
		t.Error("p is still there")
	}
	if _, err := os.Stat(e.dir + "/file"); err != nil {
		t.Error("a refused request deleted something")
	}
}
