package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/files"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// cpEnv is a directory that stands for this host, and one that stands for a sandbox, with the
// files of the real agent.
type cpEnv struct {
	*testing.T
	d    *daemon
	here string
	box  string
}

func newCpEnv(t *testing.T) *cpEnv {
	e := &cpEnv{t, newDaemon(t), t.TempDir(), t.TempDir()}
	f := &files.Files{
		Accounts: &proc.Accounts{Passwd: "/etc/passwd", Group: "/etc/group"}, Workdir: e.box, StateDir: filepath.Join(e.box, ".sandboxd"),
		Limits: func() agent.Limits { return agent.Limits{DiskBytes: 64 << 20} },
	}
	e.d.ofFiles = func(w http.ResponseWriter, r *http.Request, path string) {
		q := r.URL.Query()
		q.Set("path", e.box+q.Get("path"))
		r.URL.RawQuery = q.Encode()
		methods, err := f.Routes(path)
		if err == nil && methods[r.Method] == nil {
			err = reply.Fail(http.StatusNotFound, reply.Unsupported, "this agent has no %s", path)
		}
		if err == nil {
			out := httptest.NewRecorder()
			if path != "/files/info" {
				err = methods[r.Method](w, r)
			} else if err = methods[r.Method](out, r); err == nil {
				io.WriteString(w, strings.ReplaceAll(out.Body.String(), e.box, "")) //nolint:errcheck // the test sees what is missing
			}
		}
		if err != nil {
			reply.WriteError(w, err)
		}
	}
	return e
}

func (e *cpEnv) write(name, text string) {
	e.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o640)); err != nil {
		e.Fatal(err)
	}
}

func (e *cpEnv) reads(name, want string) {
	e.Helper()
	if b, err := os.ReadFile(name); err != nil || string(b) != want {
		e.Errorf("%s: %.60q %v, want %.60q", name, b, err, want)
	}
}

// cp runs cp, with the words of args; here/ and lab: are the two sides.
func (e *cpEnv) cp(args string) result {
	e.Helper()
	return e.d.run(e.T, append([]string{"cp"}, strings.Fields(strings.ReplaceAll(args, "here/", e.here+"/"))...)...)
}

func (e *cpEnv) ok(args string) {
	e.Helper()
	if r := e.cp(args); r.code != 0 || r.out != "" || r.errout != "" {
		e.Errorf("cp %s: %+v", args, r)
	}
}

func (e *cpEnv) fails(args, says string) {
	e.Helper()
	if r := e.cp(args); r.code != 125 || !strings.Contains(r.errout, says) {
		e.Errorf("cp %s: %+v, want %q", args, r, says)
	}
}

// tree makes what is copied.
func (e *cpEnv) tree(in string) {
	e.Helper()
	e.write(in+"/src/a.txt", "A")
	e.write(in+"/src/sub/b.sh", strings.Repeat("B", 1<<20))
	then := time.Unix(1_600_000_000, 0)
	if err := errors.Join(os.Symlink("sub/../a.txt", in+"/src/link"), os.Link(in+"/src/a.txt", in+"/src/hard"),
		os.Chmod(in+"/src/sub/b.sh", 0o750|fs.ModeSetuid), os.Chtimes(in+"/src/a.txt", then, then)); err != nil {
		e.Fatal(err)
	}
}

func (e *cpEnv) isTree(at string, mode fs.FileMode) {
	e.Helper()
	e.reads(at+"/a.txt", "A")
	e.reads(at+"/sub/b.sh", strings.Repeat("B", 1<<20))
	a, err := os.Stat(at + "/a.txt")
	hard, err2 := os.Stat(at + "/hard")
	sh, err3 := os.Stat(at + "/sub/b.sh")
	to, err4 := os.Readlink(at + "/link")
	if err := errors.Join(err, err2, err3, err4); err != nil {
		e.Error(err)
		return
	}
	if !os.SameFile(a, hard) || a.ModTime().Unix() != 1_600_000_000 || sh.Mode() != mode || to != "sub/../a.txt" {
		e.Errorf("%s: links %v, time %v, mode %v, link to %s", at, os.SameFile(a, hard), a.ModTime(), sh.Mode(), to)
	}
}

func TestCp(t *testing.T) {
	e := newCpEnv(t)
	e.tree(e.here)
	e.ok("here/src/a.txt lab:/new")
	e.reads(e.box+"/new", "A")
	e.ok("here/src lab:w")
	e.isTree(e.box+"/w", 0o750|fs.ModeSetuid)
	e.ok("here/src/ lab:/w")
	e.isTree(e.box+"/w/src", 0o750|fs.ModeSetuid)
	e.ok("lab:/w/src here/out") // and without what a guest has no say in
	e.isTree(e.here+"/out", 0o750)
	e.ok("lab:/w/src/. here/out")
	e.ok("lab:w/src/ here/out")
	e.isTree(e.here+"/out/src", 0o750)
	e.write(e.here+"/kept", "old")
	if err := errors.Join(os.Symlink("kept", e.here+"/to"), os.Symlink("a.txt", e.box+"/w/rel")); err != nil {
		t.Fatal(err)
	}
	e.ok("-L lab:/w/rel here/to")
	e.reads(e.here+"/kept", "A")

	for args, says := range map[string]string{
		"here/none lab:/":       "no such file",
		"lab:/none here/x":      "no such file",
		"here/src lab:/new":     "cannot be copied to a file",
		"lab:/w here/kept":      "cannot be copied to a file",
		"here/kept lab:/no/":    "does not exist; create it first",
		"here/kept lab:/no/way": "does not exist; create it first",
		"lab:/new here/no/":     "does not exist; create it first",
		"lab:/new here/no/way":  "does not exist; create it first",
		"lab:/new /dev/null":    "a device",
		"lab:/new/. here/x":     "not a directory",
		"lab:/new lab:/x":       "does not copy between sandboxes",
		"here/kept here/x":      "must be SANDBOX:PATH",
		"other:/x here/x":       "not found",
		"lab:/new":              "usage",
		"-x lab:/new here/x":    "--help",
	} {
		e.fails(args, says)
	}
	// The summary comes if it is wanted, or on a terminal.
	if r := e.cp("--quiet=false here/src/a.txt lab:/new"); r.errout != "Successfully copied 1B (transferred 2.05kB) to lab:/new\n" {
		t.Errorf("%q", r.errout)
	}
	if r := e.cp("--quiet=false lab:/new here/x"); r.errout != "Successfully copied 1B (transferred 2.05kB) to "+e.here+"/x\n" {
		t.Errorf("%q", r.errout)
	}
}

// TestCpTar: "-" is a tar, both ways, and tar(1) reads and writes it.
func TestCpTar(t *testing.T) {
	e := newCpEnv(t)
	e.tree(e.here)
	packed, err := exec.Command("tar", "-C", e.here, "-c", "src").Output()
	if err != nil {
		t.Fatal(err)
	}
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	zw.Write(packed) //nolint:errcheck // a buffer
	zw.Close()
	stdin := func(in []byte, args ...string) (int, string) {
		c := e.d.cmd(append([]string{"cp"}, args...)...)
		c.Stdin = bytes.NewReader(in)
		out, _ := c.CombinedOutput()
		return c.ProcessState.ExitCode(), string(out)
	}
	for dir, in := range map[string][]byte{"broken": packed, "plain": packed, "gzip": zipped.Bytes()} {
		if err := os.Mkdir(e.box+"/"+dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if code, out := stdin(in, "-", "lab:/"+dir); code != 0 {
			t.Errorf("%s: %d %s", dir, code, out)
		}
		e.isTree(e.box+"/"+dir+"/src", 0o750|fs.ModeSetuid)
	}
	for name, c := range map[string]struct {
		in   []byte
		to   string
		says string
	}{
		"nothing":       {nil, "lab:/broken", "cut off"},
		"a part":        {packed[:600<<10], "lab:/broken", "cut off"},
		"no end":        {bytes.TrimRight(packed, "\x00"), "lab:/broken", "cut off"},
		"half a gzip":   {zipped.Bytes()[:zipped.Len()/2], "lab:/broken", "standard input"},
		"no tar":        {[]byte(strings.Repeat("text ", 1000)), "lab:/broken", "not"},
		"xz":            {[]byte("\xfd7zXZ\x00more"), "lab:/broken", "xz -d"},
		"to a file":     {packed, "lab:/plain/src/a.txt", "is not a directory"},
		"to nothing":    {packed, "lab:/none", "create it first"},
		"to no sandbox": {packed, "other:/", "not found"},
	} {
		if code, out := stdin(c.in, "-", c.to); code != 125 || !strings.Contains(out, c.says) {
			t.Errorf("%s: %d %s", name, code, out)
		}
	}
	e.reads(e.box+"/broken/src/sub/b.sh", strings.Repeat("B", 1<<20))

	if err := os.Mkdir(e.here+"/back", 0o755); err != nil {
		t.Fatal(err)
	}
	unpack := exec.Command("tar", "-C", e.here+"/back", "-xp")
	r := e.d.run(t, "cp", "lab:/plain/src", "-")
	unpack.Stdin = strings.NewReader(r.out)
	if out, err := unpack.CombinedOutput(); err != nil || r.code != 0 || r.errout != "" {
		t.Errorf("%s %v; %d %s", out, err, r.code, r.errout)
	}
	e.isTree(e.here+"/back/src", 0o750|fs.ModeSetuid)
	e.fails("lab:/none -", "no such file")
}

// TestCpLeavesOut: what cannot be copied is named, and cp fails.
func TestCpLeavesOut(t *testing.T) {
	e := newCpEnv(t)
	for _, dir := range []string{e.here, e.box} {
		e.tree(dir)
		t.Chdir(dir) // names of sockets are short
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: "src/sock"}); err != nil {
			t.Fatal(err)
		}
	}
	e.fails("here/src lab:/in", "src/sock is a socket; all else was copied")
	e.isTree(e.box+"/in", 0o750|fs.ModeSetuid)
	e.fails("lab:/src here/out", "src/sock is a socket; all else was copied")
	e.isTree(e.here+"/out", 0o750)
	if os.Getuid() != 0 {
		if err := os.Chmod(e.here+"/src/sub/b.sh", 0); err != nil {
			t.Fatal(err)
		}
		e.fails("here/src lab:/in2", "permission denied")
	}
}

// TestCpTwice: a guest sends a link, and then a file to where the link leads.
func TestCpTwice(t *testing.T) {
	e := newCpEnv(t)
	e.write(e.here+"/mine", "M")
	e.write(e.box+"/kept", "K")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(errors.Join(os.Symlink(e.here+"/mine", e.box+"/result"), os.Mkdir(e.box+"/tree", 0o755), os.Symlink("../mine", e.box+"/tree/l")))
	e.fails("lab:/result here/result.json", "it is a symbolic link to")
	e.fails("lab:/tree here/tree", `"l" is a link to "../mine", which is outside of what is copied; all else was copied`)
	must(errors.Join(os.Remove(e.box+"/result"), os.Remove(e.box+"/tree/l")))
	e.write(e.box+"/result", "E")
	e.ok("lab:/result here/result.json")
	e.ok("lab:/result here/tree/l")
	e.reads(e.here+"/result.json", "E")
	e.reads(e.here+"/tree/l", "E")
	e.reads(e.here+"/mine", "M")
	must(os.Symlink("kept", e.box+"/link"))
	e.ok("-L lab:/link here/linked")
	e.reads(e.here+"/linked", "K")
}

// TestCpBreaks: a stream that breaks, an agent that is old or hostile, and a disk that is full.
func TestCpBreaks(t *testing.T) {
	e := newCpEnv(t)
	e.write(e.here+"/kept", "old")
	var whole bytes.Buffer
	tw := tar.NewWriter(&whole)
	text := strings.Repeat("x", 1<<20)
	err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "x", Size: int64(len(text)), Mode: 0o644})
	io.WriteString(tw, text) //nolint:errcheck // the test sees what is missing
	if err := errors.Join(err, tw.Close()); err != nil {
		t.Fatal(err)
	}
	frames := func(n int, end string) func(http.ResponseWriter, *http.Request, string) {
		return func(w http.ResponseWriter, r *http.Request, _ string) {
			w.Header().Set("Content-Type", agent.FramesType)
			frame(w, agent.FrameControl, "{}")
			for b := whole.Bytes()[:n]; len(b) > 0; b = b[min(len(b), 64<<10):] {
				frame(w, agent.FrameStdout, string(b[:min(len(b), 64<<10)]))
			}
			if end != "" {
				frame(w, agent.FrameEnd, end)
			}
		}
	}
	old := func(w http.ResponseWriter, _ *http.Request, path string) {
		reply.WriteError(w, reply.Fail(http.StatusNotFound, reply.Unsupported, "this agent has no %s", path))
	}
	bare := func(w http.ResponseWriter, _ *http.Request, _ string) {
		w.Write(whole.Bytes()) //nolint:errcheck // the test sees what is missing
	}
	for name, c := range map[string]struct {
		agent func(http.ResponseWriter, *http.Request, string)
		says  string
	}{
		"no end":     {frames(whole.Len(), ""), "broke before all"},
		"half":       {frames(600<<10, ""), "broke before all"},
		"half a tar": {frames(600<<10, `{"exit_code":0}`), "cut off"},
		"a reason":   {frames(600<<10, `{"exit_code":1,"error":"read /x: input/output error"}`), "input/output error"},
		"no frames":  {bare, "sent no tar"},
		"old":        {old, "older release"},
	} {
		e.d.ofFiles = c.agent
		e.fails("lab:/x here/kept", c.says)
		if name != "no end" && name != "no frames" && name != "old" { // then the tar is there, and so is the file
			e.reads(e.here+"/kept", "old")
		}
		e.write(e.here+"/kept", "old")
		if r := e.d.run(t, "cp", "lab:/x", "-"); r.code != 125 && name != "half a tar" {
			t.Errorf("%s, to standard output: %+v", name, r)
		}
		if all, err := os.ReadDir(e.here); len(all) != 1 {
			t.Errorf("%s left %v %v", name, all, err)
		}
	}
	e.d.ofFiles = old
	e.fails("here/kept lab:/x", "older release")
	e.d.ofFiles = func(w http.ResponseWriter, _ *http.Request, _ string) {
		reply.WriteError(w, reply.Fail(http.StatusInsufficientStorage, agent.ReasonDiskFull, "write /x: no space left on device: %s",
			agent.Limits{DiskBytes: 64 << 20}.DiskFull()))
	}
	e.fails("here/kept lab:/x", "the disk limit of the sandbox, 64Mi, is reached; give it more with --disk")
}
