package server

import (
	"bytes"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// uploadTo sends one file, to the routes below a prefix.
func (e *env) uploadTo(prefix, path, text, more string) (status int, reply string) {
	e.Helper()
	body, typ := form(meta(path, more), content(text))
	r := e.request("POST", prefix+"/files/upload", bytes.NewReader(body))
	r.Header.Set("Content-Type", typ)
	resp, reply := e.send(r)
	return resp.StatusCode, reply
}

// ownership is uid:gid and the permission of a file.
func ownership(t *testing.T, path string) string {
	t.Helper()
	fi, err := os.Lstat(path)
	if err != nil {
		t.Error(err)
		return ""
	}
	st := fi.Sys().(*syscall.Stat_t)
	return itoa(int(st.Uid)) + ":" + itoa(int(st.Gid)) + " " + strconv.FormatUint(uint64(st.Mode&0o7777), 8)
}

// passable gives e.dir a mode, and lets everybody through to it.
func (e *env) passable(mode fs.FileMode) {
	e.Helper()
	err := os.Chmod(e.dir, mode)
	for dir := filepath.Dir(e.dir); err == nil && dir != filepath.Clean(os.TempDir()); dir = filepath.Dir(dir) {
		err = os.Chmod(dir, 0o711)
	}
	if err != nil {
		e.Fatal(err)
	}
}

// What somebody may do with files is what the kernel lets them do.
func TestFilesAsSomebody(t *testing.T) {
	hosttest.Root(t)
	e := newEnv(t)
	const somebody = "/v1/filesystem/61234/61235"
	e.passable(0o755)
	e.write(e.dir+"/secret", "root's")
	e.write(e.dir+"/readable", "for all")
	e.write(e.dir+"/shared", "old")
	e.write(e.dir+"/inroot", "old")
	if err := os.Mkdir(e.dir+"/theirs", 0o755); err != nil {
		t.Fatal(err)
	}
	e.write(e.dir+"/theirs/rootfile", "old")
	for _, err := range []error{
		os.Chmod(e.dir+"/secret", 0o600), os.Chmod(e.dir+"/shared", 0o666),
		os.Chown(e.dir+"/inroot", 61234, 61235), os.Chown(e.dir+"/theirs", 61234, 61235),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}

	denied := func(got string) {
		t.Helper()
		var x agent.Error
		if json.Unmarshal([]byte(got), &x); x.Code != "PERMISSION_DENIED" ||
			!strings.Contains(x.Message, "permi") { //nolint:errcheck // compared
			t.Errorf("%s", got)
		}
	}
	denied(e.call(403, "GET", somebody+"/files/download?path=secret", nil))
	if got := e.call(200, "GET", somebody+"/files/download?path=readable", nil); got != "for all" {
		t.Error(got)
	}
	e.call(200, "GET", somebody+"/files/info?path=secret", nil)
	denied(e.call(403, "DELETE", somebody+"/files?path=readable", nil))
	denied(e.call(403, "POST", somebody+"/files/mv", []move{{e.dir + "/readable", e.dir + "/theirs/x"}}))
	denied(e.call(403, "POST", somebody+"/files/permissions", map[string]agent.FileMode{"readable": {Mode: 777}}))
	denied(e.call(403, "POST", somebody+"/directories", map[string]agent.FileMode{"new": {}}))
	denied(e.call(403, "POST", somebody+"/files/replace", map[string]replacement{"readable": {"for", "4"}}))
	denied(e.call(403, "POST", somebody+"/files/permissions", map[string]agent.FileMode{"inroot": {Owner: "root"}}))

	for _, w := range []struct {
		path   string
		status int
		owner  string
		text   string
	}{
		{"theirs/new", 200, "61234:61235 644", "new"},
		{"theirs/deep/new", 200, "61234:61235 644", "new"},
		{"new", 403, "", ""},
		{"readable", 403, "0:0 644", "for all"},
		{"secret", 403, "0:0 600", "root's"},
		{"shared", 200, "0:0 666", "new"},               // written in place: it is not theirs to replace
		{"inroot", 200, "61234:61235 644", "new"},       // nor is this directory theirs
		{"theirs/rootfile", 403, "0:0 644", "old"},      // they could replace, but not write it
		{"theirs/new", 200, "61234:61235 644", "newer"}, // once more
	} {
		text := w.text
		if w.status != 200 {
			text = "evil"
		}
		status, reply := e.uploadTo(somebody, e.dir+"/"+w.path, text, "")
		if status != w.status {
			t.Errorf("%s: %d %s", w.path, status, reply)
		}
		if status == 403 {
			denied(reply)
		}
		if w.owner == "" {
			if _, err := os.Lstat(e.dir + "/" + w.path); err == nil {
				t.Errorf("%s is there", w.path)
			}
			continue
		}
		if got := ownership(t, e.dir+"/"+w.path); got != w.owner || e.read(e.dir+"/"+w.path) != w.text {
			t.Errorf("%s: %s %q", w.path, got, e.read(e.dir+"/"+w.path))
		}
	}
	if got := ownership(t, e.dir+"/theirs/deep"); got != "61234:61235 755" {
		t.Error(got)
	}
	e.call(200, "POST", somebody+"/files/replace", map[string]replacement{"shared": {"new", "newest"}})
	if got := e.read(e.dir + "/shared"); got != "newest" || ownership(t, e.dir+"/shared") != "0:0 666" {
		t.Error(got)
	}
	e.call(200, "POST", somebody+"/files/mv", []move{{"theirs/new", "theirs/moved"}})
	e.call(200, "POST", somebody+"/directories", map[string]agent.FileMode{"theirs/d": {Mode: 700}})
	if got := e.call(200, "GET", somebody+"/files/search?pattern=moved&path="+q(e.dir), nil); !strings.Contains(got, "theirs/moved") {
		t.Error(got)
	}
	if got := e.call(200, "GET", somebody+"/directories/list?path=theirs", nil); !strings.Contains(got, "theirs/d") {
		t.Error(got)
	}
	e.call(200, "DELETE", somebody+"/directories?path=theirs/d", nil)
	e.call(404, "GET", somebody+"/files/info?path=theirs/d", nil)
	e.drafts(e.dir)

	// A group that is not the user's own, and root who is in no other.
	if status, reply := e.uploadTo("/v1/filesystem/0/61235", e.dir+"/byroot", "x", ""); status != 200 ||
		ownership(t, e.dir+"/byroot") != "0:61235 644" {
		t.Error(status, reply, ownership(t, e.dir+"/byroot"))
	}
	e.call(200, "GET", "/v1/filesystem/0/0/files/download?path=secret", nil)
	e.call(200, "GET", "/files/download?path=secret", nil) // and the agent is itself again

	for _, bad := range []string{
		"x/0", "0/x", "-1/0", "4294967295/0", "0/4294967296", "0/", "/0", "0", "", "1e3/0", "0x1/1",
		strings.Repeat("9", 99) + "/0",
	} {
		e.call(400, "GET", "/v1/filesystem/"+bad+"/files/info?path=readable", nil)
	}
	for _, none := range []string{"", "/", "/command", "/v1/filesystem/0/0/files/info", "/ping", "/metrics"} {
		e.call(404, "GET", somebody+none, nil)
	}
	e.call(405, "PUT", somebody+"/files/info", nil)
}

// No thread is left with what it had for a request, while others ask at once.
func TestSomebodyIsNobodyElse(t *testing.T) {
	hosttest.Root(t)
	e := newEnv(t)
	e.passable(0o777)
	big := strings.Repeat("0123456789abcdef", 64<<10)
	var wait sync.WaitGroup
	for i := range 8 {
		wait.Go(func() {
			prefix, want := "", "0:0 644"
			if id := itoa(50000 + i); i%4 != 0 {
				prefix, want = "/v1/filesystem/"+id+"/"+id, id+":"+id+" 644"
			}
			for j := range 20 {
				path := e.dir + "/" + itoa(i) + "-" + itoa(j)
				if status, reply := e.uploadTo(prefix, path, big, ""); status != 200 || ownership(t, path) != want {
					t.Errorf("%s: %d %s %s", prefix, status, reply, ownership(t, path))
				}
				resp, err := e.http.Client().Do(e.request("GET", prefix+"/files/download?path="+path, nil))
				if err != nil {
					t.Error(err)
					return
				}
				if n, err := io.Copy(io.Discard, resp.Body); n != int64(len(big)) || err != nil {
					t.Error(n, err)
				}
				resp.Body.Close()
			}
		})
	}
	wait.Wait()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile("/proc/self/task/" + task.Name() + "/status")
		if err == nil && !strings.Contains(string(b), "\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n") {
			t.Errorf("%s", b)
		}
	}
}
