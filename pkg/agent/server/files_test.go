package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"mime/multipart"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// draftPrefix begins the names of unfinished files.
const draftPrefix = ".sandboxd-draft-"

// move and replacement are of the bodies of POST /files/mv and POST /files/replace.
type (
	move struct {
		Src  string `json:"src"`
		Dest string `json:"dest"`
	}
	replacement struct {
		Old string `json:"old"`
		New string `json:"new"`
	}
)

// part is one part of an upload.
type part struct{ name, filename, content string }

func form(parts ...part) (body []byte, contentType string) {
	var b bytes.Buffer
	m := multipart.NewWriter(&b)
	for _, p := range parts {
		h := textproto.MIMEHeader{}
		h.Set("Content-Disposition", fmt.Sprintf(`form-data; name=%q; filename=%q`, p.name, p.filename))
		w, _ := m.CreatePart(h)
		io.WriteString(w, p.content) //nolint:errcheck // a buffer
	}
	m.Close()
	return b.Bytes(), m.FormDataContentType()
}

// upload sends parts and returns the status.
func (e *env) upload(parts ...part) int {
	e.Helper()
	body, typ := form(parts...)
	r := e.request("POST", "/files/upload", bytes.NewReader(body))
	r.Header.Set("Content-Type", typ)
	resp, text := e.send(r)
	if resp.StatusCode != 200 && !strings.Contains(text, `"message"`) {
		e.Errorf("%d %q", resp.StatusCode, text)
	}
	return resp.StatusCode
}

func meta(path, more string) part {
	b, _ := json.Marshal(path)
	return part{"metadata", "metadata", `{"path":` + string(b) + more + `}`}
}

func content(s string) part { return part{"file", "/any/where", s} }

func (e *env) read(path string) string {
	e.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		e.Error(err)
	}
	return string(b)
}

func (e *env) write(path, text string) {
	e.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		e.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		e.Fatal(err)
	}
}

// drafts fails if an unfinished file is left in dir.
func (e *env) drafts(dir string) {
	e.Helper()
	if left := draftsIn(dir); left != nil {
		e.Errorf("left: %s", left)
	}
}

// draftsIn are the paths of unfinished files in dir.
func draftsIn(dir string) (paths []string) {
	filepath.WalkDir(dir, func(path string, _ fs.DirEntry, _ error) error { //nolint:errcheck // never fails
		if strings.Contains(path, draftPrefix) {
			paths = append(paths, path)
		}
		return nil
	})
	return paths
}

func q(path string) string { return url.QueryEscape(path) }

func TestUpload(t *testing.T) {
	e := newEnv(t)
	big := strings.Repeat("0123456789abcdef\r\n--", 200_000)
	if got := e.upload(meta(e.dir+"/a/b/c", `,"mode":755,"owner":null,"group":null`), content(big), meta("rel", ""),
		content("")); got != 200 {
		t.Fatal(got)
	}
	if e.read(e.dir+"/a/b/c") != big || e.read(e.dir+"/rel") != "" {
		t.Error("content differs")
	}
	for path, mode := range map[string]fs.FileMode{"/a/b/c": 0o755, "/rel": 0o644, "/a/b": fs.ModeDir | 0o755} {
		if fi, err := os.Stat(e.dir + path); err != nil || fi.Mode() != mode {
			t.Errorf("%s: %v %v", path, fi, err)
		}
	}
	// What is there keeps its mode, and is replaced rather than written over.
	old, err := os.Open(e.dir + "/rel")
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	os.Chmod(e.dir+"/rel", 0o600) //nolint:errcheck // checked below
	e.upload(meta(e.dir+"/rel", ""), content("new"))
	if fi, _ := os.Stat(e.dir + "/rel"); fi.Mode() != 0o600 || e.read(e.dir+"/rel") != "new" {
		t.Error("mode or content")
	}
	if b, _ := io.ReadAll(old); len(b) != 0 {
		t.Error("a reader of the old file sees the new one")
	}
	// Two metadata, then two files.
	if got := e.upload(meta("m1", ""), meta("m2", `,"mode":4755`), content("1"), content("2")); got != 200 || e.read(e.dir+"/m1") != "1" ||
		e.read(e.dir+"/m2") != "2" {
		t.Error("pairing by index")
	}
	if fi, _ := os.Stat(e.dir + "/m2"); fi.Mode() != fs.ModeSetuid|0o755 {
		t.Error(fi.Mode())
	}
	e.drafts(e.dir)
}

// TestUploadSizes: files of sizes around those of the agent's buffers, in a body of known
// length and in one in chunks.
func TestUploadSizes(t *testing.T) {
	e := newEnv(t)
	all := strings.Repeat("0123456789abcdef\r\n--", 300_000)
	sizes := []int{0, 1, 256<<10 - 1, 256 << 10, 256<<10 + 1, 1<<20 - 1, 1 << 20, 1<<20 + 1, 3 << 20}
	var parts []part
	for _, n := range sizes {
		parts = append(parts, meta(strconv.Itoa(n), ""), content(all[n/2:n/2+n]))
	}
	body, typ := form(parts...)
	for name, r := range map[string]io.Reader{"known": bytes.NewReader(body), "chunks": io.MultiReader(bytes.NewReader(body))} {
		req := e.request("POST", "/files/upload", r)
		req.Header.Set("Content-Type", typ)
		if resp, text := e.send(req); resp.StatusCode != 200 {
			t.Fatal(name, resp.StatusCode, text)
		}
		for _, n := range sizes {
			if e.read(e.dir+"/"+strconv.Itoa(n)) != all[n/2:n/2+n] {
				t.Errorf("%s: the content of a file of %d bytes differs", name, n)
			}
			os.Remove(e.dir + "/" + strconv.Itoa(n)) //nolint:errcheck // read above
		}
	}
	e.drafts(e.dir)
}

func TestUploadThroughLinks(t *testing.T) {
	e := newEnv(t)
	e.write(e.dir+"/real/file", "old")
	for link, to := range map[string]string{"dir": "real", "abs": e.dir + "/real/file", "dangling": "real/new", "loop": "loop"} {
		if err := os.Symlink(to, e.dir+"/"+link); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]int{
		"abs": 200, "dangling": 200, "dir/third": 200, "loop": 400, "dir": 400, "real": 400,
		"real/file/below": 500, "/dev/null": 400,
	} {
		if got := e.upload(meta(path, ""), content(path)); got != want {
			t.Errorf("%s: status %d, want %d", path, got, want)
		}
	}
	if e.read(e.dir+"/real/file") != "abs" || e.read(e.dir+"/real/new") != "dangling" || e.read(e.dir+"/real/third") != "dir/third" {
		t.Error("content")
	}
	if fi, err := os.Lstat(e.dir + "/abs"); err != nil || fi.Mode()&fs.ModeSymlink == 0 {
		t.Error("the link itself was replaced")
	}
	e.drafts(e.dir)
}

// TestDotsBehindLinks: behind a link, .. is the parent of where it points.
func TestDotsBehindLinks(t *testing.T) {
	e := newEnv(t)
	e.write(e.dir+"/a/deep/file", "old")
	for link, to := range map[string]string{
		"dir": "a/deep", "a/deep/up": "../top", "via": "dir/up", "far": "dir/../far",
		"nowhere": "none",
	} {
		if err := os.Symlink(to, e.dir+"/"+link); err != nil {
			t.Fatal(err)
		}
	}
	for path, written := range map[string]string{
		"dir/../x": "a/x", "dir/up": "a/top", "via": "a/top", "dir/../../y": "y", "far": "a/far", "a/./deep//../z": "a/z",
		"new/../n": "n", "new/b/../../m": "m", "..dots": "..dots", "a/deep/..c": "a/deep/..c",
		e.dir + "/dir/../abs": "a/abs", "/../.." + e.dir + "/root": "root",
	} {
		if got := e.upload(meta(path, ""), content(path)); got != 200 || e.read(e.dir+"/"+written) != path {
			t.Errorf("%s: status %d, %s holds %q", path, got, written, e.read(e.dir+"/"+written))
		}
	}
	for path, want := range map[string]int{"nowhere/../x": 404, "a/x/../x": 500} {
		if got := e.upload(meta(path, ""), content("x")); got != want {
			t.Errorf("%s: status %d, want %d", path, got, want)
		}
	}
	if _, err := os.Lstat(e.dir + "/x"); err == nil {
		t.Error("dir/../x was resolved by its letters")
	}
	if got := e.events(agent.CommandRequest{Command: "pwd", Cwd: "dir/.."}); got != "stdout "+strconv.Quote(e.dir+"/a")+"\ncomplete" {
		t.Error(got)
	}
	e.call(http.StatusBadRequest, "DELETE", "/directories?path="+q("/tmp/.."), nil)
	e.drafts(e.dir)
}

func TestUploadBadInput(t *testing.T) {
	e := newEnv(t)
	for name, parts := range map[string][]part{
		"nothing":          {},
		"no metadata":      {content("x")},
		"no file":          {meta("a", "")},
		"a file too few":   {meta("a", ""), content("x"), meta("b", "")},
		"a file too many":  {meta("a", ""), content("x"), content("y")},
		"foreign part":     {{"other", "x", "y"}},
		"no JSON":          {{"metadata", "metadata", "{"}, content("x")},
		"no path":          {{"metadata", "metadata", "{}"}, content("x")},
		"mode 999":         {meta("b", `,"mode":999`), content("x")},
		"mode -1":          {meta("b", `,"mode":-1`), content("x")},
		"mode text":        {meta("b", `,"mode":"644"`), content("x")},
		"NUL":              {meta("b\x00", ""), content("x")},
		"endless metadata": {{"metadata", "metadata", strings.Repeat(" ", 64<<10+1)}, content("x")},
	} {
		if got := e.upload(parts...); got != 400 {
			t.Errorf("%s: status %d", name, got)
		}
	}
	if got := e.upload(meta("b", `,"owner":"nosuchuser-x"`), content("x")); got != 500 {
		t.Errorf("unknown owner: %d", got)
	}
	if _, err := os.Stat(e.dir + "/b"); err == nil {
		t.Error("a refused file was written")
	}
	e.call(400, "POST", "/files/upload", "hello")
	e.drafts(e.dir)
}

func TestUploadCutOff(t *testing.T) {
	e := newEnv(t)
	e.write(e.dir+"/target", "untouched")
	body, typ := form(meta(e.dir+"/target", ""), content(strings.Repeat("x", 1<<20)))
	conn, err := net.Dial("tcp", e.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "POST /files/upload HTTP/1.1\r\nHost: x\r\n%s: tok\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n",
		agent.TokenHeader, typ, len(body))
	conn.Write(body[:len(body)/2]) //nolint:errcheck // a test
	deadline := time.Now().Add(5 * time.Second)
	for len(e.unfinished()) == 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond) // until the draft is there
	}
	conn.Close()
	for len(e.unfinished()) > 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond) // until it is gone
	}
	if left := e.unfinished(); len(left) > 0 || e.read(e.dir+"/target") != "untouched" {
		t.Errorf("left %v, target %q", left, e.read(e.dir+"/target"))
	}
	// A body that ends without its closing boundary.
	r := e.request("POST", "/files/upload", bytes.NewReader(body[:len(body)-20]))
	r.Header.Set("Content-Type", typ)
	if resp, text := e.send(r); resp.StatusCode != 400 || e.read(e.dir+"/target") != "untouched" {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	e.drafts(e.dir)
}

func (e *env) unfinished() []string {
	m, _ := filepath.Glob(e.dir + "/" + draftPrefix + "*")
	return m
}

func TestDownload(t *testing.T) {
	e := newEnv(t)
	text := "0123456789"
	e.write(e.dir+"/a ä\"", text)
	e.write(e.dir+"/empty", "")
	path := "/files/download?path=" + q(e.dir+"/a ä\"")
	for rng, want := range map[string]string{
		"": "200 10  0123456789", "bytes=0-3": "206 4 bytes 0-3/10 0123", "bytes=4-": "206 6 bytes 4-9/10 456789",
		"bytes=-3":  "206 3 bytes 7-9/10 789",
		"bytes=-99": "206 10 bytes 0-9/10 0123456789", "bytes=8-99": "206 2 bytes 8-9/10 89", "bytes=0-1,3-4": "200 10  0123456789",
	} {
		r := e.request("GET", path, nil)
		if rng != "" {
			r.Header.Set("Range", rng)
		}
		resp, body := e.send(r)
		got := fmt.Sprint(resp.StatusCode, " ", resp.ContentLength, " ", resp.Header.Get("Content-Range"), " ", body)
		if got != want {
			t.Errorf("%s: %s, want %s", rng, got, want)
		}
		if cd := resp.Header.Get("Content-Disposition"); cd != `attachment; filename="a __"; filename*=UTF-8''a%20%C3%A4%22` {
			t.Errorf("disposition %s", cd)
		}
	}
	for _, rng := range []string{
		"bytes=10-", "bytes=5-4", "bytes=-0", "bytes=-", "bytes=a-b", "bytes=+1-2", "lines=1-2", "bytes=1",
		"bytes", "bytes=99999999999999999999-",
	} {
		r := e.request("GET", path, nil)
		r.Header.Set("Range", rng)
		if resp, body := e.send(r); resp.StatusCode != 416 || !strings.Contains(body, `"message"`) {
			t.Errorf("%s: %d %s", rng, resp.StatusCode, body)
		}
	}
	if resp, body := e.send(e.request("GET", "/files/download?path="+q(e.dir+"/empty"), nil)); resp.StatusCode != 200 ||
		resp.ContentLength != 0 || body != "" {
		t.Error("an empty file")
	}
	if _, body := e.send(e.request("GET", "/files/download?path=/proc/self/status", nil)); !strings.Contains(body, "State:") {
		t.Error("a file of /proc claims to be empty, but is not")
	}
	if resp, _ := e.send(e.request("HEAD", path, nil)); resp.ContentLength != 10 {
		t.Error("HEAD")
	}
	if err := unix.Mkfifo(e.dir+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	e.call(404, "GET", "/files/download?path="+q(e.dir+"/nope"), nil)
	e.call(400, "GET", "/files/download?path="+q(e.dir), nil)
	e.call(400, "GET", "/files/download?path="+q(e.dir+"/fifo"), nil)
	e.call(400, "GET", "/files/download?path=/dev/zero", nil)
	e.call(400, "GET", "/files/download", nil)
	e.call(400, "GET", "/files/download?path=%00", nil)
}

func TestDownloadLines(t *testing.T) {
	e := newEnv(t)
	long := strings.Repeat("x", 200_000)
	e.write(e.dir+"/f", "one\r\ntwo\n\nfour\r"+"x\n"+long+"\nlast")
	e.write(e.dir+"/t", "one\ntwo\n")
	for query, want := range map[string]string{
		"f&offset=1": "one\ntwo\n\nfour\rx\n" + long + "\nlast", "f&limit=1": "one", "f&offset=2&limit=2": "two\n",
		"f&offset=3&limit=1": "", "f&offset=4&limit=1": "four\rx",
		"f&offset=5&limit=1": long, "f&offset=6&limit=9": "last", "f&offset=99": "",
		"f&limit=9223372036854775807": "one\ntwo\n\nfour\rx\n" + long + "\nlast",
		"t&limit=5":                   "one\ntwo", "t&offset=2": "two", "t&offset=3": "",
		"f&offset=9223372036854775807&limit=9223372036854775807": "",
	} {
		resp, got := e.send(e.request("GET", "/files/download?path="+query, nil))
		if resp.StatusCode != 200 || got != want || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/plain") {
			t.Errorf("%s: %d %.60q, want %.60q", query, resp.StatusCode, got, want)
		}
	}
	for _, query := range []string{"offset=0", "limit=0", "offset=-1", "limit=x", "limit="} {
		e.call(400, "GET", "/files/download?path=f&"+query, nil)
	}
	r := e.request("GET", "/files/download?path=f&limit=1", nil)
	r.Header.Set("Range", "bytes=0-1")
	if resp, _ := e.send(r); resp.StatusCode != 400 {
		t.Error("Range and lines together")
	}
}

func TestInfoPermissionsRemove(t *testing.T) {
	e := newEnv(t)
	e.write(e.dir+"/f", "12345")
	os.Symlink("f", e.dir+"/l") //nolint:errcheck // checked below
	var infos map[string]agent.FileInfo
	get := e.call(200, "GET", "/files/info?path="+q(e.dir+"/f")+"&path=l&path="+q(e.dir+"/./"), nil)
	if err := json.Unmarshal([]byte(get), &infos); err != nil {
		t.Fatal(err)
	}
	f := infos[e.dir+"/f"]
	if f.Path != e.dir+"/f" || f.Type != "file" || f.Size != 5 || f.Mode != 644 || infos["l"].Type != "symlink" ||
		infos["l"].Path != e.dir+"/l" || infos[e.dir+"/./"].Type != "directory" {
		t.Errorf("%+v", infos)
	}
	if m, err := time.Parse(time.RFC3339Nano, f.Modified); err != nil || time.Since(m) > time.Minute || m.Nanosecond() == 0 {
		t.Errorf("modified %s: %v", f.Modified, err)
	}
	e.call(404, "GET", "/files/info?path="+q(e.dir+"/f")+"&path=nope", nil)
	e.call(400, "GET", "/files/info", nil)
	e.call(400, "GET", "/files/info?path=", nil)
	e.call(404, "GET", "/files/info?path="+q(strings.Repeat("a/", 500)), nil)
	e.call(400, "GET", "/files/info?path="+q(strings.Repeat("a", 300)), nil)

	e.call(200, "POST", "/files/permissions", map[string]agent.FileMode{"f": {Mode: 2750}})
	if fi, _ := os.Stat(e.dir + "/f"); fi.Mode() != fs.ModeSetgid|0o750 {
		t.Error(fi.Mode())
	}
	if os.Getuid() == 0 {
		e.call(200, "POST", "/files/permissions", map[string]agent.FileMode{"f": {Owner: "nobody", Group: "nogroup", Mode: 4711}})
		get := e.call(200, "GET", "/files/info?path=f", nil)
		if json.Unmarshal([]byte(get), &infos); infos["f"].Owner != "nobody" || infos["f"].Group != "nogroup" ||
			infos["f"].Mode != 4711 { //nolint:errcheck // compared
			t.Errorf("%+v", infos["f"])
		}
	}
	e.call(404, "POST", "/files/permissions", map[string]agent.FileMode{"nope": {}})
	e.call(400, "POST", "/files/permissions", map[string]agent.FileMode{"f": {Mode: 888}})
	e.call(500, "POST", "/files/permissions", map[string]agent.FileMode{"f": {Owner: "nosuchuser-x"}})
	e.call(400, "POST", "/files/permissions", "[]")

	e.call(500, "DELETE", "/files?path="+q(e.dir), nil)
	e.call(200, "DELETE", "/files?path=l&path=f&path=nope&path=f/below", nil)
	e.call(400, "DELETE", "/files", nil)
	if left, _ := os.ReadDir(e.dir); len(left) != 0 {
		t.Error(left)
	}
}

func TestMoveAndReplace(t *testing.T) {
	e := newEnv(t)
	e.write(e.dir+"/a", "aXbXc")
	e.call(200, "POST", "/files/mv", []move{{"a", "new/dir/b"}, {e.dir + "/new", e.dir + "/newer"}})
	if e.read(e.dir+"/newer/dir/b") != "aXbXc" {
		t.Error("content")
	}
	e.write(e.dir+"/other", "x")
	e.call(500, "POST", "/files/mv", []move{{"other", "newer/dir/b"}})
	e.call(404, "POST", "/files/mv", []move{{"nope", "x"}})
	e.call(400, "POST", "/files/mv", []move{{"", "x"}})
	e.call(400, "POST", "/files/mv", "{}")
	if os.Mkdir("/dev/shm/agent-test", 0o755) == nil { // another file system
		defer os.RemoveAll("/dev/shm/agent-test")
		e.call(200, "POST", "/files/mv", []move{{"other", "/dev/shm/agent-test/x"}})
		if e.read("/dev/shm/agent-test/x") != "x" {
			t.Error("content")
		}
		if _, err := os.Stat(e.dir + "/other"); err == nil {
			t.Error("the source is still there")
		}
		e.call(500, "POST", "/files/mv", []move{{"newer", "/dev/shm/agent-test/d"}})
	}

	os.Chmod(e.dir+"/newer/dir/b", 0o600) //nolint:errcheck // checked below
	got := e.call(200, "POST", "/files/replace?verbose=true", map[string]replacement{"newer/dir/b": {"X", "$1--"}})
	if got != `{"newer/dir/b":{"replacedCount":2}}` || e.read(e.dir+"/newer/dir/b") != "a$1--b$1--c" {
		t.Error(got)
	}
	before, _ := os.Stat(e.dir + "/newer/dir/b")
	e.call(200, "POST", "/files/replace", map[string]replacement{"newer/dir/b": {"absent", "x"}})
	after, _ := os.Stat(e.dir + "/newer/dir/b")
	if before.Mode() != 0o600 || !os.SameFile(before, after) || !before.ModTime().Equal(after.ModTime()) {
		t.Error("mode lost, or a file without a match was written")
	}
	e.call(400, "POST", "/files/replace", map[string]replacement{"newer/dir/b": {"", "x"}})
	e.call(404, "POST", "/files/replace", map[string]replacement{"newer/dir/b": {"a", "x"}, "nope": {"a", "b"}})
	e.call(400, "POST", "/files/replace", map[string]replacement{"newer": {"a", "b"}})
	if e.read(e.dir+"/newer/dir/b") != "a$1--b$1--c" {
		t.Error("a request with a missing file changed another")
	}
	e.drafts(e.dir)
}

func TestNewFilesBelongToTheUser(t *testing.T) {
	if os.Getuid() != 0 {
		return // only root gives files away
	}
	e := newEnvWith(t, agent.Bootstrap{User: "65534:65534"})
	if got := e.upload(meta("d/f", ""), content("x"), meta("d/g", `,"owner":"root","group":"0","mode":600`),
		content("y")); got != http.StatusOK {
		t.Fatal(got)
	}
	e.call(200, "POST", "/directories", map[string]agent.FileMode{"m/n": {}})
	for path, uid := range map[string]uint32{"d": 65534, "d/f": 65534, "d/g": 0, "m": 65534, "m/n": 65534} {
		var st unix.Stat_t
		if err := unix.Lstat(e.dir+"/"+path, &st); err != nil || st.Uid != uid || st.Gid != uid {
			t.Errorf("%s: owner %d:%d, want %d; %v", path, st.Uid, st.Gid, uid, err)
		}
	}
}
