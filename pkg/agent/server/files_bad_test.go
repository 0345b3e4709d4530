package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/textproto"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// What cannot be a path is the client's mistake, on every route, and changes nothing.
func TestPathsThatAreNone(t *testing.T) {
	e := newEnv(t)
	e.write(e.dir+"/here", "x")
	for _, link := range [][2]string{{"loop2", "loop1"}, {"loop1", "loop2"}} {
		if err := os.Symlink(link[0], e.dir+"/"+link[1]); err != nil {
			t.Fatal(err)
		}
	}
	for name, path := range map[string]string{
		"5,000 characters":        e.dir + strings.Repeat("/abc", 1250),
		"a name of 300":           e.dir + "/" + strings.Repeat("x", 300),
		"5,000 with ..":           e.dir + strings.Repeat("/..", 1700) + "/" + strings.Repeat("x", 300),
		"through links in a ring": e.dir + "/loop1/x",
		"NUL":                     e.dir + "/a\x00b",
	} {
		mode := map[string]agent.FileMode{path: {Mode: 644}}
		for _, c := range []struct {
			method, route string
			body          any
		}{
			{"GET", "/files/info?path=" + q(path), nil},
			{"GET", "/files/download?path=" + q(path), nil},
			{"GET", "/files/search?pattern=*&path=" + q(path), nil},
			{"GET", "/directories/list?path=" + q(path), nil},
			{"DELETE", "/files?path=" + q(path), nil},
			{"DELETE", "/directories?path=" + q(path), nil},
			{"POST", "/directories", mode},
			{"POST", "/files/permissions", mode},
			{"POST", "/files/mv", []move{{e.dir + "/here", path}}},
			{"POST", "/files/mv", []move{{path, e.dir + "/there"}}},
			{"POST", "/files/replace", map[string]replacement{path: {"a", "b"}}},
			{"GET", "/files/archive?path=" + q(path), nil},
			{"PUT", "/files/archive?path=" + q(path), nil},
		} {
			var said struct{ Code, Message string }
			if got := e.call(http.StatusBadRequest, c.method, c.route, c.body); json.Unmarshal([]byte(got), &said) != nil ||
				said.Code != reply.BadFile || said.Message == "" {
				t.Errorf("%s: %s %.20s: %.200s", name, c.method, c.route, got)
			}
		}
		if got := e.upload(meta(path, ""), content("y")); got != http.StatusBadRequest {
			t.Errorf("%s: upload: %d", name, got)
		}
	}
	if left, err := os.ReadDir(e.dir); err != nil || len(left) != 3 || e.read(e.dir+"/here") != "x" {
		t.Error(left, err)
	}
}

// A metadata part of 10 GB is refused before it was read.
func TestEndlessMetadata(t *testing.T) {
	e := newEnv(t)
	conn, err := textproto.Dial("tcp", e.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.PrintfLine("POST /files/upload HTTP/1.1\r\nHost: x\r\n%s: tok\r\nContent-Type: multipart/form-data; "+
		"boundary=b\r\nContent-Length: %d\r\n", agent.TokenHeader, 10<<30) //nolint:errcheck // the answer counts
	conn.PrintfLine("--b\r\nContent-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\n") //nolint:errcheck // as above
	sent := make(chan int)
	go func() {
		n, zeros := 0, make([]byte, 1<<20)
		for n < 10<<30 {
			m, err := conn.W.Write(zeros)
			if n += m; err != nil {
				break
			}
		}
		sent <- n
	}()
	line, err := conn.ReadLine()
	if err != nil || !strings.Contains(line, " 400 ") {
		t.Errorf("%q, %v", line, err)
	}
	if n := <-sent; n > 64<<20 { // what buffers of sockets take
		t.Errorf("%d bytes were taken", n)
	}
	e.drafts(e.dir)
}

// Who exchanges a directory for a link while files in it are written gets each file whole,
// in the one directory or the other, and nothing else in either.
func TestFilesBehindASwap(t *testing.T) {
	e := newEnv(t)
	for _, d := range []string{"/a", "/b"} {
		if err := os.Mkdir(e.dir+d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	e.swaps(e.dir+"/a", e.dir+"/b", func() {
		for i := range 200 {
			if got := e.upload(meta(fmt.Sprintf("%s/a/%d", e.dir, i), ""), content(strings.Repeat("x", 1+i*100))); got != 200 {
				t.Errorf("upload %d: %d", i, got)
			}
		}
	})
	found := 0
	filepath.WalkDir(e.dir, func(path string, d fs.DirEntry, err error) error { //nolint:errcheck // it is counted
		if err == nil && d.Type().IsRegular() {
			var i int
			if _, err := fmt.Sscan(d.Name(), &i); err != nil || len(e.read(path)) != 1+i*100 {
				t.Errorf("%s: %d bytes", path, len(e.read(path)))
			}
			found++
		}
		return nil
	})
	if found != 200 {
		t.Errorf("%d of 200 files", found)
	}
	e.drafts(e.dir)
}

// Nobody reads or writes by such an exchange what is not theirs.
func TestFilesOfOthersBehindASwap(t *testing.T) {
	hosttest.Root(t)
	e := newEnv(t)
	e.passable(0o755)
	for name, uid := range map[string]int{"mine": 61234, "theirs": 0} {
		dir := e.dir + "/" + name
		e.write(dir+"/file", name)
		if err := errors.Join(os.Chmod(dir, 0o700), os.Chown(dir, uid, uid), os.Chown(dir+"/file", uid, uid),
			os.Chmod(dir+"/file", 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	const somebody = "/v1/filesystem/61234/61234"
	e.swaps(e.dir+"/mine", e.dir+"/theirs", func() {
		for range 200 {
			status, reply := e.uploadTo(somebody, e.dir+"/mine/file", "mine", "")
			if status != 200 && status != 403 {
				t.Error(status, reply)
			}
			resp, text := e.send(e.request("GET", somebody+"/files/download?path="+q(e.dir+"/mine/file"), nil))
			if resp.StatusCode != 403 && (resp.StatusCode != 200 || text != "mine") {
				t.Error(resp.StatusCode, text)
			}
		}
	})
	texts := map[string]string{}
	for _, d := range []string{"mine", "theirs"} {
		if b, err := os.ReadFile(e.dir + "/" + d + "/file"); err == nil {
			texts[string(b)] = ownership(t, e.dir+"/"+d+"/file")
		}
	}
	if texts["theirs"] != "0:0 600" && texts["mine"] == "" {
		t.Error(texts)
	}
	e.drafts(e.dir)
}

// swaps has dir and a link to other, which stands beside it, change names all the time
// while f runs, and leaves them as they were.
func (e *env) swaps(dir, other string, f func()) {
	e.Helper()
	link := dir + "-link"
	if err := os.Symlink(other, link); err != nil {
		e.Fatal(err)
	}
	stop := make(chan struct{})
	var swapping sync.WaitGroup
	swapping.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				if n%2 == 0 {
					return
				}
			default:
			}
			if err := unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE); err != nil &&
				!errors.Is(err, syscall.EINTR) {
				e.Error(err)
				return
			}
		}
	})
	defer func() {
		close(stop)
		swapping.Wait()
	}()
	f()
}
