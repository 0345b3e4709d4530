package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// podman is one with a storage of its own.
type podman struct {
	t   *testing.T
	dir string
}

func newPodman(t *testing.T) podman {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "sandboxd-podman-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return podman{t, dir}
}

func (p podman) do(args ...string) string {
	p.t.Helper()
	args = append([]string{
		"--root", filepath.Join(p.dir, "root"), "--runroot", filepath.Join(p.dir, "run"), "--storage-driver", "vfs",
		"--cgroup-manager", "cgroupfs", "--runtime", "runc",
	}, args...) // crun refuses hybrid cgroups
	var errout bytes.Buffer
	cmd := exec.Command("podman", args...)
	cmd.Stderr = &errout
	out, err := cmd.Output()
	if err != nil {
		p.t.Fatalf("podman %q: %v: %s", args, err, errout.String())
	}
	return strings.TrimSpace(string(out))
}

// TestDigestOfWhatCameBack: export and import leave the digest of an image as it is, if
// its layers had no other name before.
func TestDigestOfWhatCameBack(t *testing.T) {
	hosttest.Root(t)
	h := newHost(t, daemontest.Options{})
	l := &lab{host: h, T: t, runtime: "runc"}
	dir := t.TempDir()
	for name, text := range map[string]string{"b": "two", "a": "one", "etc/passwd": "root:x:0:0::/root:/bin/sh\n"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, "root", name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "root", name), []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	// In another order, and in another format, than an export has.
	tar := filepath.Join(dir, "root.tar")
	if out, err := exec.Command("tar", "-C", filepath.Join(dir, "root"), "--format=gnu", "-cf", tar,
		"./b", "./etc", "./a").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	digest := func(name string) string {
		var list []wire.ImageInspection
		if err := json.Unmarshal([]byte(l.ok("image", "inspect", name)), &list); err != nil {
			t.Fatal(err)
		}
		return list[0].Digest
	}
	l.ok("image", "import", tar, "round:1")
	l.ok("image", "export", "round:1", "-o", filepath.Join(dir, "out.tar"))
	l.ok("image", "import", filepath.Join(dir, "out.tar"), "round:2")
	if was, is := digest("round:1"), digest("round:2"); was != is {
		t.Errorf("the digest was %s and is %s", was, is)
	}
	l.ok("image", "rm", "round:1", "round:2")
}

// TestImages takes an image to podman, changes it there, brings it back in both
// formats, and runs it on both runtimes.
func TestImages(t *testing.T) {
	hosttest.Root(t)
	h := newHost(t, daemontest.Options{})
	l := &lab{host: h, T: t, runtime: "runc"}
	pod := newPodman(t)
	file := func(name string) string { return filepath.Join(pod.dir, name) }

	l.ok("image", "export", "base", "-o", file("base.tar"))
	if out := pod.do("load", "-i", file("base.tar")); !strings.Contains(out, "base:latest") {
		t.Fatalf("podman loaded %q", out)
	}
	id := pod.do("create", "base:latest", "true")
	root := pod.do("mount", id)
	for _, err := range []error{
		os.Remove(filepath.Join(root, "etc/debian_version")),
		os.MkdirAll(filepath.Join(root, "srv/app"), 0o755),
		os.WriteFile(filepath.Join(root, "srv/app/own"), []byte("of the second layer\n"), 0o640),
		os.Chown(filepath.Join(root, "srv/app/own"), 1234, 4321),
		os.Chmod(filepath.Join(root, "srv/app/own"), 0o640),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	pod.do("umount", id)
	pod.do("commit", "--change", "ENV COLOR=blue", "--change", "ENV EDITOR=vi", "--change", "WORKDIR /srv/app",
		"--change", "USER 1234:4321", "--change", "LABEL team=a", "--change", "STOPSIGNAL SIGQUIT",
		"--change", `ENTRYPOINT ["/usr/bin/env"]`, "--change", `CMD ["echo", "of the image"]`, id, "localhost/team/app:7")
	pod.do("save", "-o", file("docker.tar"), "localhost/team/app:7")
	pod.do("save", "--format", "oci-archive", "-o", file("oci.tar"), "localhost/team/app:7")
	pod.do("save", "--format", "oci-dir", "-o", file("oci"), "localhost/team/app:7")
	for archive, name := range map[string]string{"docker.tar": "", "oci.tar": "from-oci:1", "oci": "from-dir"} {
		args := []string{"image", "import", file(archive)}
		if name != "" {
			args = append(args, name)
		}
		got := strings.TrimSpace(l.ok(args...))
		if want := map[string]string{
			"": "localhost/team/app:7", "from-oci:1": "from-oci:1",
			"from-dir": "from-dir:latest",
		}[name]; got != want {
			t.Errorf("%s was imported as %q, want %q", archive, got, want)
		}
		for _, runtime := range runtimes {
			t.Run(archive+"/"+runtime, func(t *testing.T) { runsAsTheImageSays(t, &lab{host: h, T: t, runtime: runtime}, got) })
		}
	}
	for _, runtime := range runtimes {
		t.Run("stop/"+runtime, func(t *testing.T) {
			stopsAsTheImageSays(t, &lab{host: h, T: t, runtime: runtime}, "localhost/team/app:7")
		})
	}
	if got := l.ok("image", "ls", "-q"); !strings.Contains(got, "localhost/team/app:7\n") || !strings.Contains(got, "from-dir:latest\n") {
		t.Errorf("images %q", got)
	}
	l.ok("image", "export", "localhost/team/app:7", "-o", file("back.tar"))
	pod.do("rmi", "--force", "localhost/team/app:7")
	pod.do("load", "-i", file("back.tar"))
	if out := pod.do("image", "inspect", "--format", "{{.Config.User}} {{.Config.WorkingDir}} {{.Config.Labels.team}} {{len "+
		".RootFS.Layers}}", "localhost/team/app:7"); out != "1234:4321 /srv/app a 2" {
		t.Errorf("podman says of what came back: %s", out)
	}
	if out := pod.do("run", "--rm", "--network=none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "localhost/team/app:7",
		"sh", "-c", "cat own; ls /etc/debian_version || pwd"); !strings.Contains(out, "of the second layer\n/srv/app") {
		t.Errorf("what came back runs as: %s", out)
	}
	removal(t, l)
}

// runsAsTheImageSays runs an image and compares what its config promises.
func runsAsTheImageSays(t *testing.T, l *lab, ref string) {
	id := l.make("--env", "COLOR=red", ref, "--", "sh", "-c", "id -u; id -g; pwd; echo $COLOR $EDITOR; sleep 1000")
	defer l.ok("rm", "-f", id)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{ref}, "of the image\n"},
		{[]string{ref, "A=b", "sh", "-c", "echo $A $HOSTNAME"}, "b x.y\n"}, // A=b is for env, the ENTRYPOINT
		{[]string{"--entrypoint", "uname", ref, "--", "-n"}, "x.y\n"},
	} {
		if out := l.ok(append([]string{"run", "--runtime", l.runtime, "--hostname", "x.y"}, c.args...)...); out != c.want {
			t.Errorf("run %q says %q", c.args, out)
		}
	}
	out := l.ok("exec", id, "--", "sh", "-c", "id -u; id -g; pwd; echo $COLOR $EDITOR; cat own; ls -ln own | cut -d' ' -f1,3,4; ls "+
		"/etc/debian_version 2>/dev/null || echo gone")
	want := "1234\n4321\n/srv/app\nred vi\n"
	if out != want+"of the second layer\n-rw-r----- 1234 4321\ngone\n" {
		t.Errorf("a command says %q", out)
	}
	beyond := l.ctl("exec", "-u", "100000:100000", id, "--", "true")
	if chown := l.ctl("exec", "-u", "0", id, "--", "chown", "100000", "/srv/app/own"); chown.code == 0 {
		t.Errorf("a file belongs to 100000: %+v", chown)
	}
	if l.runtime == "runc" {
		l.wants(beyond, 126, "has only the ids 0 to 65535: use another user")
	} else if beyond.code != 0 {
		t.Errorf("as user 100000: %+v", beyond)
	}
	settles(t, func() error {
		if out := l.ok("logs", id); out != want {
			return fmt.Errorf("the entrypoint says %q, want %q", out, want)
		}
		return nil
	})
	info, err := l.api.Inspect(t.Context(), id)
	if err != nil || len(info.Layers) != 2 {
		t.Errorf("%d layers, %v", len(info.Layers), err)
	}
}

// stopsAsTheImageSays: stop sends the STOPSIGNAL of the image, or the one that the creation names,
// to the entrypoint, which has its time to end. A copy and a sandbox that has slept have it, too.
func stopsAsTheImageSays(t *testing.T, l *lab, ref string) {
	const traps = `trap "echo of the image; exit 3" QUIT; trap "echo of the creation; exit 4" RTMIN+3; trap "echo of neither; exit 5" TERM
echo ready; while :; do sleep 0.1; done`
	says := func(id, last string) { // bash says, too, that the signal has ended its sleep
		t.Helper()
		settles(t, func() error {
			if out := l.ok("logs", id); !strings.HasPrefix(out, "ready\n") || !strings.HasSuffix(out, last) {
				return fmt.Errorf("the entrypoint of %s says %q, want %q at last", id, out, last)
			}
			return nil
		})
	}
	own := l.make("--stop-signal", "RTMIN+3", ref, "--", "bash", "-c", traps)
	image := l.make(ref, "--", "bash", "-c", traps)
	says(own, "ready\n")
	says(image, "ready\n")
	stopped := map[string]int{own: 4, image: 3}
	copied := strings.TrimSpace(l.ok("fork", own, "--name", "stops", "--timeout", "10m"))
	says(copied, "ready\n")
	stopped[copied] = 4
	if l.runtime == "runsc" {
		l.ok("hibernate", image)
		l.ok("resume", image)
	}
	for id, code := range stopped {
		start := time.Now()
		l.ok("stop", "-t", "60", id)
		if i := l.inspect(id); i.Sandboxd.ExitCode == nil || *i.Sandboxd.ExitCode != code || i.Status.Reason != "stopped" ||
			time.Since(start) > 50*time.Second {
			t.Errorf("stopped after %v: %+v, code %v; want %d", time.Since(start), i.Status, i.Sandboxd.ExitCode, code)
		}
		says(id, map[int]string{3: "of the image\n", 4: "of the creation\n"}[code])
		l.ok("rm", "-f", id)
	}
}

// removal: an image in use stays, one that is not goes, and prune tells.
func removal(t *testing.T, l *lab) {
	var all []wire.ImageInspection
	if err := json.Unmarshal([]byte(l.ok("image", "inspect", "from-oci:1")), &all); err != nil || len(all) != 1 ||
		all[0].Labels["team"] != "a" || len(all[0].Layers) != 2 {
		t.Fatalf("inspect: %+v, %v", all, err)
	}
	id := l.make("--name", "holds-it", "from-oci:1")
	l.ok("image", "rm", "localhost/team/app:7", "from-dir") // their layers are also those of the third
	l.wants(l.ctl("image", "rm", "from-oci:1"), 125, "in use by holds-it")
	if _, err := l.exec(t.Context(), id, "cat", "own"); err != nil {
		t.Errorf("a sandbox whose image was to be removed: %v", err)
	}
	l.ok("image", "prune") // of what earlier runs left
	if out := l.ok("image", "prune"); !strings.Contains(out, "Total reclaimed space: 0B") {
		t.Errorf("prune with nothing to do: %q", out)
	}
	l.ok("rm", "-f", "holds-it")
	l.ok("image", "rm", "from-oci:1")
	l.wants(l.ctl("image", "inspect", "from-oci:1"), 125, "image ls")
	layers, err := os.ReadDir(filepath.Join(l.StateDir, "layers"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range layers {
		if strings.HasPrefix(e.Name(), "new-") || all[0].Layers[1] == "sha256:"+e.Name() {
			t.Errorf("left: %s", e.Name())
		}
	}
}

// TestImportIsAtomic: whoever dies in the middle of an import, client or
// daemon, nothing of it is left, and it can be done again.
func TestImportIsAtomic(t *testing.T) {
	hosttest.Root(t)
	h := newHost(t, daemontest.Options{})
	var base bytes.Buffer
	if err := h.api.Images().Export(t.Context(), "base", &base); err != nil {
		t.Fatal(err)
	}
	left := func() (n int) {
		for _, pattern := range []string{"layers/new-*", "build/*"} {
			found, _ := filepath.Glob(filepath.Join(h.StateDir, pattern))
			n += len(found)
		}
		return n
	}
	// Half an archive, then whatever die is; the rest never comes.
	half := func(format string, die func()) error {
		r, w := io.Pipe()
		defer w.Close()
		died := make(chan struct{})
		go func() {
			defer close(died)
			b := base.Bytes()
			_, _ = w.Write(b[:len(b)/2])
			die()
		}()
		_, err := h.api.Images().Import(t.Context(), client.Archive{Name: "half", Format: format, Body: r}, nil)
		r.Close()
		<-died
		return err
	}
	for _, format := range []string{"docker", "rootfs"} {
		gone := errors.New("gone")
		r, w := io.Pipe()
		go func() {
			b := base.Bytes()
			_, _ = w.Write(b[:len(b)/2])
			w.CloseWithError(gone)
		}()
		if _, err := h.api.Images().Import(t.Context(), client.Archive{Name: "half", Format: format, Body: r}, nil); !errors.Is(err, gone) {
			t.Errorf("a client that leaves, %s: %v", format, err)
		}
		settles(t, func() error {
			if n := left(); n > 0 {
				return fmt.Errorf("%d things are left of a %s import whose client left", n, format)
			}
			return nil
		})
		if err := half(format, h.Kill); err == nil {
			t.Errorf("a daemon that dies, %s: no error", format)
		}
		h.Start()
		if n := left(); n > 0 {
			t.Errorf("%d things are left of a %s import whose daemon died", n, format)
		}
	}
	if _, err := h.api.Images().Inspect(t.Context(), "half"); !errs.Is(err, errs.NotFound) {
		t.Errorf("half an image: %v", err)
	}
	im, err := h.api.Images().Import(t.Context(), client.Archive{Name: "half", Size: int64(base.Len()), Body: &base}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.api.Images().Remove(t.Context(), im.Name); err != nil {
		t.Error(err)
	}
}
