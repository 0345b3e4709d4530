package e2e_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// look says what a process was started with, and opens its streams by their names. perl ignores
// SIGFPE by itself.
const look = `#!/bin/sh
echo ids $(id -u) $(id -g) $(id -G)
echo home "$HOME", user "${USER-none}" "${LOGNAME-none}"
echo umask $(umask), open $(ls /proc/self/fd)
perl -MPOSIX -e '
sigprocmask(SIG_BLOCK, POSIX::SigSet->new, my $blocked = POSIX::SigSet->new);
for (1..31) {
	next if $_ == SIGKILL || $_ == SIGSTOP || $_ == SIGFPE;
	sigaction($_, undef, my $now = POSIX::SigAction->new);
	print "signal $_: ", $now->handler, $blocked->ismember($_), "\n" if $now->handler ne "DEFAULT" || $blocked->ismember($_);
}'
grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/self/status
true </dev/stdin && echo stdin
for f in /dev/stderr /dev/stdout /proc/self/fd/1 /var/log/app.log; do echo $f >$f; done
`

// looked is what docker gives the user app.
const looked = `ids 1000 1000 1000 50
home /home/app, user none none
umask 0022, open 0 1 2 3
CapInh:	0000000000000000
CapPrm:	0000000000000000
CapEff:	0000000000000000
CapAmb:	0000000000000000
stdin
/dev/stdout
/proc/self/fd/1
/var/log/app.log
`

// A member is a file of a layer, with its text.
type member struct {
	tar.Header
	text string
}

// ofApp are the files of a program that logs as many do.
var ofApp = []member{
	{tar.Header{Name: "etc/passwd", Mode: 0o644}, "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"},
	{tar.Header{Name: "etc/group", Mode: 0o644}, "root:x:0:\napp:x:1000:\nlogs:x:50:app\n"},
	{tar.Header{Name: "home/app/", Typeflag: tar.TypeDir, Mode: 0o755, Uid: 1000, Gid: 1000}, ""},
	{tar.Header{Name: "var/log/app.log", Typeflag: tar.TypeSymlink, Linkname: "/dev/stdout"}, ""},
	{tar.Header{Name: "usr/local/bin/look", Mode: 0o755}, look},
	{tar.Header{Name: "usr/local/bin/lost", Mode: 0o755}, "#!/no/interpreter\n"},
}

// importAs makes an image of files, over the layers of the archive below if that is not empty.
func (l *lab) importAs(name string, config v1.Config, files []member, below string) {
	l.Helper()
	path := filepath.Join(l.TempDir(), "image.tar")
	f, err := os.Create(path)
	must(l.T, err)
	defer f.Close()
	out := tar.NewWriter(f)
	all := v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, Config: config, RootFS: v1.RootFS{Type: "layers"}}
	saved := tarball.Descriptor{Config: "config.json", RepoTags: []string{name + ":latest"}}
	add := func(name string, size int64, r io.Reader) {
		must(l.T, out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: size}))
		_, err := io.Copy(out, r)
		must(l.T, err)
	}
	if below != "" {
		opener := func() (io.ReadCloser, error) { return os.Open(below) }
		m, err := tarball.LoadManifest(opener)
		must(l.T, err)
		r, err := os.Open(below)
		must(l.T, err)
		defer r.Close()
		for in := tar.NewReader(r); ; {
			h, err := in.Next()
			if err == io.EOF {
				break
			}
			must(l.T, err)
			if slices.Contains(m[0].Layers, h.Name) {
				add(h.Name, h.Size, in)
				saved.Layers = append(saved.Layers, h.Name)
				all.RootFS.DiffIDs = append(all.RootFS.DiffIDs, v1.Hash{Algorithm: "sha256", Hex: filepath.Base(h.Name)})
			}
		}
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, m := range files {
		m.Size = int64(len(m.text))
		must(l.T, w.WriteHeader(&m.Header))
		_, err := io.WriteString(w, m.text)
		must(l.T, err)
	}
	must(l.T, w.Close())
	sum, size, err := v1.SHA256(bytes.NewReader(layer.Bytes()))
	must(l.T, err)
	own := "blobs/sha256/" + sum.Hex
	add(own, size, &layer)
	saved.Layers, all.RootFS.DiffIDs = append(saved.Layers, own), append(all.RootFS.DiffIDs, sum)
	for name, v := range map[string]any{"config.json": all, "manifest.json": tarball.Manifest{saved}} {
		b, err := json.Marshal(v)
		must(l.T, err)
		add(name, int64(len(b)), bytes.NewReader(b))
	}
	must(l.T, out.Close())
	l.ok("image", "import", path, name)
}

// TestUserOfTheImage: programs of an image whose USER is not root start with docker's values, by
// whatever way, and can log to /dev/stdout. A sandbox that cannot start says why.
func TestUserOfTheImage(t *testing.T) {
	hosttest.Root(t)
	h := newHost(t, daemontest.Options{})
	l := &lab{host: h, T: t}
	base := filepath.Join(t.TempDir(), "base.tar")
	l.ok("image", "export", "base", "-o", base)
	l.importAs("app", v1.Config{User: "app"}, ofApp, base)
	l.importAs("bad-user", v1.Config{User: "nosuch"}, ofApp[:2], "")
	l.importAs("bad-group", v1.Config{User: "app:nosuch"}, ofApp[:2], "")
	l.importAs("bad-dir", v1.Config{WorkingDir: "/etc/passwd/x"}, ofApp[:2], "")
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			defer h.deleteAll(t)
			t.Run("processes", func(t *testing.T) { processesOfApp(&lab{host: h, T: t, runtime: runtime}) })
			const first = "could not be created: "
			for _, c := range []struct {
				image, program, says string
				code                 int // of run, which starts the program of an idle sandbox
			}{
				{"bad-user", "/x", first + `USER of the image: user "nosuch": no such user in /etc/passwd of the image; build`, 125},
				{"bad-group", "/x", first + `USER of the image: group "nosuch": no such group in /etc/group of the image; build`, 125},
				{"bad-dir", "/x", first + "create the working directory of the image: mkdir /etc/passwd: not a directory", 125},
				{"app", "nosuch", `"nosuch": no such file in the image's PATH (`, 127},
				{"app", "/etc/passwd", `"/etc/passwd": not executable: its mode is 0644`, 126},
				{"app", "lost", `"lost": the file exists, but its interpreter "/no/interpreter" does not`, 127},
			} {
				l.wants(l.ctl("run", "--runtime", runtime, c.image, "--", c.program), c.code, c.says)
				if c.code != 125 {
					c.says = first + "entrypoint " + c.says
				}
				l.doesNotStart(c.says, c.image, "--", c.program)
			}
		})
	}
	for _, name := range []string{"app", "bad-user", "bad-group", "bad-dir"} {
		l.ok("image", "rm", name)
	}
}

// doesNotStart wants a reason of the command line, the API and the record.
func (l *lab) doesNotStart(says string, args ...string) {
	l.Helper()
	r := l.ctl(append([]string{"create", "--runtime", l.runtime}, args...)...)
	id := strings.TrimSpace(r.out)
	sb := l.awaitState(l.T, id, wire.Failed, patience)
	if got := l.inspect(id).Status; !strings.HasPrefix(sb.Status.Message, says) || got.Message != sb.Status.Message ||
		!strings.Contains(r.errout, says) {
		l.Errorf("%q: create says %q; the API %+v; the record %+v; want %q", args, r.errout, sb.Status, got, says)
	}
}

func processesOfApp(l *lab) {
	id := l.make("app", "--", "sh", "-c", "look; exec sleep 1000")
	settles(l.T, func() error {
		if got := l.ok("logs", id); got != strings.Replace(looked, "/dev/stdout", "/dev/stderr\n/dev/stdout", 1) {
			return fmt.Errorf("the entrypoint says %q", got)
		}
		return nil
	})
	says := func(way string, r result, want string) {
		l.Helper()
		if r.out != want || r.errout != "/dev/stderr\n" || r.code != 0 {
			l.Errorf("%s, exit %d: it says\n%s\n%s\nwant\n%s", way, r.code, r.out, r.errout, want)
		}
	}
	says("words", l.ctl("exec", id, "look"), looked)
	says("shell", l.ctl("exec", id, "--", "sh", "-c", "look; :"), looked)
	says("user", l.ctl("exec", "-u", "app", id, "look"), looked)
	says("input", l.feed(strings.NewReader("x"), "exec", "-i", id, "look"), looked)
	session := strings.TrimSpace(l.ok("command", "session", "create", id))
	says("session", l.ctl("command", "session", "run", id, session, "--", "look"), looked)
	says("code", l.ctl("eval", "-l", "bash", id, "look"), looked)
	other := strings.NewReplacer("1000 1000 1000 50", "61234 0 0", "/home/app", "/").Replace(looked)
	says("a number", l.ctl("exec", "-u", "61234", id, "look"), other)
	if got := l.ok("exec", "-u", "root", id, "--", "sh", "-c", "id -G; echo $HOME; cd ~ && pwd"); got != "0\n/root\n/root\n" {
		l.Errorf("root says %q", got)
	}
	s := l.sit("exec", "-it", id, "look")
	s.says(strings.ReplaceAll(strings.Replace(looked, "/dev/stdout", "/dev/stderr\n/dev/stdout", 1), "\n", "\r\n"))
	s.ends(0)
	if l.runtime == "runsc" {
		l.ok("fork", id, "--memory", "--name", "copy")
		says("copy", l.ctl("exec", "copy", "look"), looked)
	}
}
