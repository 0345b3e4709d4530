package server

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// tree makes what the tests copy.
func (e *env) tree() {
	e.Helper()
	e.write(e.dir+"/src/a", "A")
	e.write(e.dir+"/src/sub/b", strings.Repeat("B", 600<<10))
	if err := errors.Join(os.Symlink("a", e.dir+"/src/l"), os.Link(e.dir+"/src/a", e.dir+"/src/h"), os.Symlink("src", e.dir+"/to"),
		os.Chmod(e.dir+"/src/a", 0o750|os.ModeSetuid), os.Chtimes(e.dir+"/src/a", time.Unix(1, 2), time.Unix(1, 2))); err != nil {
		e.Fatal(err)
	}
}

// tarOf runs tar(1), as a user would.
func (e *env) tarOf(args ...string) []byte {
	e.Helper()
	b, err := exec.Command("tar", args...).Output()
	if err != nil {
		e.Fatal(args, err)
	}
	return b
}

// names lists the entries of a tar.
func (e *env) names(b string) string {
	e.Helper()
	var names []string
	for tr := tar.NewReader(strings.NewReader(b)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return strings.Join(names, " ")
		}
		if err != nil {
			e.Fatal(err)
		}
		names = append(names, h.Name)
	}
}

// frames returns what the frames of an answer carry, and the error at their end.
func (e *env) frames(path string) (content, failed string) {
	e.Helper()
	r := e.request("GET", path, nil)
	r.Header.Set("Accept", agent.FramesType)
	resp, err := e.http.Client().Do(r)
	if err != nil {
		e.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != agent.FramesType {
		e.Fatal(resp.Status, resp.Header)
	}
	var b strings.Builder
	for fr := agent.NewFrameReader(resp.Body); ; {
		stream, payload, err := fr.Next()
		if err != nil {
			e.Fatal(err)
		}
		switch stream {
		case agent.FrameStdout:
			b.Write(payload)
		case agent.FrameEnd:
			x, err := agent.ParseExit(payload)
			if err != nil {
				e.Fatal(err)
			}
			return b.String(), x.Error
		}
	}
}

func TestArchiveOut(t *testing.T) {
	e := newEnv(t)
	e.tree()
	const all = "src/ src/a src/h src/l src/sub/ src/sub/b"
	for query, want := range map[string]string{
		"path=src":                   all,
		"path=" + q(e.dir) + "/src/": all,
		"path=src/.":                 "./ ./a ./h ./l ./sub/ ./sub/b",
		"path=src/sub/../a":          "a",
		"path=to":                    "to",
		"path=to&follow=true":        strings.ReplaceAll(all, "src", "to"),
		"path=to/":                   strings.ReplaceAll(all, "src", "to"),
		"path=to/sub":                "sub/ sub/b",
		"path=src/l&follow=1":        "l",
		"path=/proc/self/limits":     "limits",
	} {
		got := e.call(200, "GET", "/files/archive?"+query, nil)
		if names := e.names(got); names != want {
			t.Errorf("%s: %s", query, names)
		}
		framed, failed := e.frames("/files/archive?" + query)
		if !strings.Contains(query, "/proc") && (framed != got || failed != "") {
			t.Errorf("%s in frames: %d bytes, %s", query, len(framed), failed)
		}
	}
	// tar(1) reads it: modes, times, both kinds of links.
	out := exec.Command("tar", "-tvf", "-", "--full-time", "--numeric-owner")
	out.Stdin = strings.NewReader(e.call(200, "GET", "/files/archive?path=src", nil))
	out.Env = append(os.Environ(), "TZ=UTC")
	b, err := out.CombinedOutput()
	for _, want := range []string{"-rwsr-x---", "1970-01-01 00:00:01.000000002 src/a", "src/h link to src/a", "src/l -> a"} {
		if err != nil || !strings.Contains(string(b), want) {
			t.Errorf("no %q in %s; %v", want, b, err)
		}
	}
	for query, want := range map[string]int{
		"": 400, "path=": 400, "path=none": 404, "path=src/a/.": 400, "path=src&follow=maybe": 400, "path=%00": 400,
	} {
		e.call(want, "GET", "/files/archive?"+query, nil)
	}
	if resp, body := e.send(e.request("HEAD", "/files/archive?path=src", nil)); resp.StatusCode != 200 || body != "" {
		t.Errorf("HEAD: %s %q", resp.Status, body)
	}
}

// TestArchiveBreaks: what cannot be read ends the answer with the reason, and without frames with
// a cut.
func TestArchiveBreaks(t *testing.T) {
	e := newEnv(t)
	e.tree()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	t.Chdir(e.dir) // names of sockets are short
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: "src/sock"}); err != nil {
		t.Fatal(err)
	}
	got, failed := e.frames("/files/archive?path=src")
	if !strings.Contains(failed, "sock is a socket") || !strings.Contains(e.names(got), "sub/b") {
		t.Error(failed)
	}
	e.names(e.call(200, "GET", "/files/archive?path=src", nil))
	// A path longer than PATH_MAX cannot be read; the tar is on its way then.
	at := unix.AT_FDCWD
	for range 30 {
		name := strings.Repeat("z", 200)
		if at == unix.AT_FDCWD {
			name = e.dir + "/src/" + name
		}
		if err := unix.Mkdirat(at, name, 0o755); err != nil {
			t.Fatal(err)
		}
		below, err := unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(below)
		at = below
	}
	const deep = "/files/archive?path=src"
	if got, failed := e.frames(deep); !strings.Contains(failed, "file name too long") || len(got) < 600<<10 {
		t.Errorf("%.300q after %d bytes", failed, len(got))
	}
	resp, err := e.http.Client().Do(e.request("GET", deep, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); err == nil {
		t.Errorf("a bare tar of %d bytes ended as if it were whole", n)
	}
	// What breaks before anything was sent is an answer with the reason.
	if got := e.call(500, "GET", "/files/archive?path=/proc/self/", nil); !strings.Contains(got, "/proc/") {
		t.Error(got)
	}
}

func (e *env) put(want int, query string, tar io.Reader) string {
	e.Helper()
	resp, got := e.send(e.request("PUT", "/files/archive?"+query, tar))
	if resp.StatusCode != want {
		e.Errorf("%s: %s, want %d: %s", query, resp.Status, want, got)
	}
	return got
}

func TestArchiveIn(t *testing.T) {
	e := newEnv(t)
	e.tree()
	if err := os.MkdirAll(e.dir+"/in/dir", 0o755); err != nil {
		t.Fatal(err)
	}
	one, tree := e.tarOf("-C", e.dir+"/src", "-c", "a"), e.tarOf("-C", e.dir, "-c", "src")
	for query, want := range map[string]int{
		"path=in/new&name=a":         200,
		"path=in/dir&name=a":         200,
		"path=in/dir/&name=b":        200,
		"path=in/none/&name=a":       404,
		"path=in/none/new&name=a":    404,
		"path=/dev/null&name=a":      400,
		"path=in/dir&name=" + q("/"): 400,
		"path=in/dir&name=..":        400,
		"path=in&name=dir":           400, // a directory there
		"path=src/a":                 400, // no directory
		"path=in/none":               404,
		"path=&name=a":               400,
		"path=in&owners=perhaps":     400,
	} {
		e.put(want, query, bytes.NewReader(one))
	}
	e.put(200, "path=in/tree&name=src", bytes.NewReader(tree))
	e.put(200, "path=in/dir&name=src", bytes.NewReader(tree))
	e.put(200, "path=in/dir&name=.", bytes.NewReader(tree))
	e.put(400, "path=in/new&name=src", bytes.NewReader(tree)) // a file there
	e.put(200, "path=in", bytes.NewReader(tree))
	for _, name := range []string{"new", "dir/a", "dir/b", "tree/a", "tree/h", "tree/l", "dir/src/a", "src/a"} {
		if got := e.read(e.dir + "/in/" + name); got != "A" {
			t.Errorf("%s: %q", name, got)
		}
	}
	if fi, err := os.Lstat(e.dir + "/in/tree/a"); err != nil || fi.Mode() != 0o750|os.ModeSetuid || fi.ModTime().Unix() != 1 {
		t.Errorf("%v %v", fi.Mode(), fi.ModTime())
	}
	// What is no tar, or was cut off, leaves what was there.
	for _, n := range []int{0, 100, 512, 300 << 10, 600 << 10} {
		got := e.put(400, "path=in/tree&name=.", bytes.NewReader(tree[:n]))
		if !strings.Contains(got, "INVALID_FILE_CONTENT") {
			t.Errorf("%d bytes: %s", n, got)
		}
	}
	broken := errors.New("broken")
	r := e.request("PUT", "/files/archive?path=in/tree&name=.", io.MultiReader(bytes.NewReader(tree[:300<<10]), failingReader{broken}))
	if resp, err := e.http.Client().Do(r); err == nil {
		resp.Body.Close()
		t.Error(resp.Status)
	}
	if e.read(e.dir+"/in/tree/sub/b") != strings.Repeat("B", 600<<10) {
		t.Error("a tar that was cut off changed a file")
	}
	eventuallyTrue(t, func() bool { return draftsIn(e.dir+"/in") == nil }) // the server may still be at it
	// A tar cannot leave its directory.
	for _, evil := range []string{"../evil", "l/../../evil"} {
		var b bytes.Buffer
		tw := tar.NewWriter(&b)
		err := errors.Join(tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: evil}), tw.Close())
		if err != nil {
			t.Fatal(err)
		}
		e.put(400, "path=in", &b)
	}
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }

// TestArchiveAnswersEarly: a refusal reaches a client that is still sending.
func TestArchiveAnswersEarly(t *testing.T) {
	e := newEnv(t)
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(w)
		err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "big", Size: 1 << 40})
		for b := make([]byte, 64<<10); err == nil; {
			_, err = tw.Write(b)
		}
	}()
	e.put(404, "path=none/none&name=big", r)
	r.Close()
}

// TestArchiveAs: the kernel says what a user may copy.
func TestArchiveAs(t *testing.T) {
	if os.Getuid() != 0 {
		return // only root can be somebody else
	}
	e := newEnv(t)
	e.tree()
	const as = "/v1/filesystem/65534/65534"
	for _, dir := range []string{e.dir, e.dir + "/.."} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(e.dir+"/theirs", 0o700), os.Chown(e.dir+"/theirs", 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	e.call(http.StatusForbidden, "GET", as+"/files/archive?path=src/a", nil)
	e.call(200, "GET", as+"/files/archive?path=theirs", nil)
	for path, want := range map[string]int{"theirs": 200, "src": 403} {
		body := bytes.NewReader(e.tarOf("--owner=12", "--group=13", "-C", e.dir+"/src", "-c", "a"))
		if resp, got := e.send(e.request("PUT", as+"/files/archive?name=a&path="+path, body)); resp.StatusCode != want {
			t.Errorf("%s: %s %s", path, resp.Status, got)
		}
	}
	// The agent itself may do all, also give files away.
	for query, uid := range map[string]uint32{"path=theirs/root&name=a": 0, "path=theirs/other&name=a&owners=true": 12} {
		e.put(200, query, bytes.NewReader(e.tarOf("--owner=12", "--group=13", "-C", e.dir+"/src", "-c", "a")))
		var st unix.Stat_t
		path, _, _ := strings.Cut(strings.TrimPrefix(query, "path="), "&")
		if err := unix.Lstat(e.dir+"/"+path, &st); err != nil || st.Uid != uid || st.Mode&0o7777 != 0o4750 {
			t.Errorf("%s: owner %d, mode %o, %v", query, st.Uid, st.Mode, err)
		}
	}
}
