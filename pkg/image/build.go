package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"golang.org/x/sys/unix"
)

// stopTime is how long mmdebstrap may take to clean up after SIGTERM.
const stopTime = 10 * time.Second

// tidy removes from a finished tree the files that depend on the build host and the
// time: names, logs, backups and caches. It leaves out what apt and mmdebstrap remove
// themselves.
const tidy = `set -e
cd "$1"
rm -f etc/hostname etc/resolv.conf etc/machine-id var/lib/dbus/machine-id
rm -f etc/passwd- etc/group- etc/shadow- etc/gshadow- etc/subuid- etc/subgid-
rm -f var/lib/dpkg/*-old var/cache/debconf/*-old var/cache/ldconfig/aux-cache
rm -rf var/lib/apt/lists/* var/cache/apt/* run/*
find var/log -type f -delete
find var/tmp -mindepth 1 -delete`

// Build makes the image name:latest from the recipe of that name and returns its record
// once it can be used. It writes its progress to progress, line by line.
//
// Two builds on one day (UTC) from equal packages have equal digests: a time later than
// the day's first second is set to that. If ctx is cancelled, the build ends within 10
// s and leaves nothing.
//
// It fails with errs.Unsupported if mmdebstrap or a source of the suite is missing. It
// fails with errs.Unavailable, with the last lines of mmdebstrap, if that fails: mostly
// the network is the cause. Without replace it fails with errs.Denied if another image
// has the name.
func (s *Store) Build(ctx context.Context, name string, replace bool, progress io.Writer) (record.Image, error) {
	r, err := s.recipe(name)
	if err != nil {
		return record.Image{}, err
	}
	select {
	case s.build <- struct{}{}:
		defer func() { <-s.build }()
	case <-ctx.Done():
		return record.Image{}, ctx.Err()
	}
	i, err := s.buildRecipe(ctx, name, r, replace, &oneAtATime{w: progress})
	if err != nil {
		return record.Image{}, fmt.Errorf("build image %s: %w", name, err)
	}
	return i, nil
}

func (s *Store) buildRecipe(ctx context.Context, name string, r Recipe, replace bool, progress io.Writer) (i record.Image, err error) {
	mmdebstrap, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return i, errs.Wrap(err, errs.Unsupported, "mmdebstrap, which builds images, is missing on this host: apt-get install mmdebstrap")
	}
	if r.Suite == "" {
		if r.Suite, err = hostSuite(); err != nil {
			return i, err
		}
	}
	sources, err := AptSources(os.DirFS("/etc/apt"), r.Suite)
	if err != nil {
		return i, err
	}
	tmp, err := os.MkdirTemp(s.cfg.TempDir, name+"-")
	if err != nil {
		return i, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	if err := os.Chmod(tmp, 0o755); err != nil { // apt fetches as another user
		return i, err
	}

	day := time.Now().UTC().Truncate(24 * time.Hour)
	fmt.Fprintf(progress, "building %s from %s (%s), %d packages\n", name, r.Suite, r.Variant, len(r.Packages))
	cmd := exec.CommandContext(ctx, mmdebstrap, r.arguments(tmp)...)
	cmd.Stdin = strings.NewReader(sources)
	cmd.Env = append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=/root", "LC_ALL=C.UTF-8", "TMPDIR=" + tmp,
		"SOURCE_DATE_EPOCH=" + strconv.FormatInt(day.Unix(), 10),
	}, aptProxies(ctx)...)
	layer, err := s.importOutput(ctx, cmd, progress)
	if err != nil {
		return i, err
	}
	defer s.cfg.Layers.Drop(layer.stage) //nolint:errcheck // named, or removed at the next start
	if layer.digest, err = s.ownDigest(ctx, layer.stage); err != nil {
		return i, err
	}
	config := r.config()
	if config.Labels, err = r.readVersions(tmp); err != nil {
		return i, err
	}
	if i, err = s.name(ctx, record.Image{Name: name, Config: config}, []staged{layer}, fromRecipe, replace); err != nil {
		return i, err
	}
	fmt.Fprintf(progress, "built %s, %d MiB, %s\n", i.Ref(), i.Bytes>>20, i.Digest)
	return i, nil
}

// aptProxies are the proxies of the host's apt, as environment variables: mmdebstrap
// does not read the host's apt.conf, and an option would stay in the image.
func aptProxies(ctx context.Context) (env []string) {
	for _, scheme := range []string{"http", "https"} {
		v := os.Getenv(scheme + "_proxy")
		if v == "" {
			out, err := exec.CommandContext(ctx, "apt-config", "shell", "v", "Acquire::"+scheme+"::Proxy").Output()
			if err != nil {
				continue // apt is not installed
			}
			_, v, _ = strings.Cut(strings.TrimSpace(string(out)), "=")
			v = strings.Trim(v, "'")
		}
		if v != "" && v != "DIRECT" {
			env = append(env, scheme+"_proxy="+v)
		}
	}
	if v := os.Getenv("no_proxy"); v != "" {
		env = append(env, "no_proxy="+v)
	}
	return env
}

// arguments are those of mmdebstrap(1): a tar on standard output, sources on
// standard input, and what readVersions reads in the directory tmp.
func (r *Recipe) arguments(tmp string) []string {
	// force-unsafe-io stays in the image: the disk of a sandbox does not promise what
	// dpkg would sync.
	a := []string{"--mode=root", "--format=tar", "--variant=" + r.Variant, "--dpkgopt=force-unsafe-io"}
	if len(r.Packages) > 0 {
		a = append(a, "--include="+strings.Join(r.Packages, ","))
	}
	for _, p := range r.Exclude {
		a = append(a, "--dpkgopt=path-exclude="+p)
	}
	for _, p := range r.Include {
		a = append(a, "--dpkgopt=path-include="+p)
	}
	for _, h := range append(slices.Clone(r.Hooks), keepVersions(tmp), tidy) {
		a = append(a, "--customize-hook="+h)
	}
	return append(a, r.Suite, "-", "-")
}

// importOutput runs mmdebstrap and stages the tar it writes. A tar counts only
// if mmdebstrap ended well.
func (s *Store) importOutput(ctx context.Context, cmd *exec.Cmd, progress io.Writer) (l staged, err error) {
	// The kernel sends the parent-death signal when this thread ends, so the thread
	// must live.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &unix.SysProcAttr{
		Setpgid:      true, // one signal reaches apt and dpkg too
		Pdeathsig:    unix.SIGTERM,
		Unshareflags: unix.CLONE_NEWNS, // the host never sees or keeps a mount of it
	}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGTERM) }
	cmd.WaitDelay = stopTime
	words := &lastWords{w: progress}
	cmd.Stderr = words
	out, err := cmd.StdoutPipe()
	if err != nil {
		return l, err
	}
	if err := cmd.Start(); err != nil {
		return l, fmt.Errorf("start mmdebstrap: %w", err)
	}
	end := &endOfProcess{r: out, wait: func() error {
		if err := cmd.Wait(); err != nil {
			return errs.Wrap(err, errs.Unavailable, "mmdebstrap failed: %s", words.tail())
		}
		return nil
	}}
	var mark int64
	l.stage, l.digest, l.bytes, err = s.cfg.Layers.Stage(ctx, end, func(read int64) {
		if read-mark >= 50<<20 {
			mark = read
			fmt.Fprintf(progress, "imported %d MiB\n", read>>20)
		}
	})
	if err == nil {
		return l, nil
	}
	if !end.waited { // the import failed first: nothing reads the pipe any more
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGTERM)
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
	}
	if end.waited && !errors.Is(end.err, io.EOF) {
		err = end.err // its own error, not the one of a tar cut short
	}
	_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) // for a process that ignored SIGTERM; usually there is none
	return staged{}, errors.Join(ctx.Err(), err)
}

// endOfProcess reads a pipe and gives the end of the process instead of the end of the
// pipe: an import of half a tar then fails before the image is named.
type endOfProcess struct {
	r      io.Reader
	wait   func() error
	waited bool
	err    error
}

func (e *endOfProcess) Read(p []byte) (int, error) {
	if e.waited {
		return 0, e.err
	}
	n, err := e.r.Read(p)
	if err == nil || n > 0 {
		return n, nil
	}
	e.waited, e.err = true, e.wait()
	if e.err == nil {
		e.err = err // io.EOF
	}
	return 0, e.err
}

// oneAtATime orders the simultaneous output of mmdebstrap and the import.
type oneAtATime struct {
	mu sync.Mutex
	w  io.Writer
}

func (o *oneAtATime) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.w.Write(p)
}

// lastWords passes output on and keeps the end of it for an error.
type lastWords struct {
	w   io.Writer
	end []byte
}

const keptWords = 2048

func (l *lastWords) Write(p []byte) (int, error) {
	l.end = append(l.end, p...)
	if len(l.end) > 2*keptWords {
		l.end = append([]byte(nil), l.end[len(l.end)-keptWords:]...)
	}
	_, _ = l.w.Write(p) // the reader may go away
	return len(p), nil
}

// tail is the last three lines.
func (l *lastWords) tail() string {
	lines := bytes.Split(bytes.TrimSpace(l.end), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-3):], []byte(" / ")))
}
