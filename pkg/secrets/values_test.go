package secrets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// source is Inspection.Value of a sandbox whose only credential has this source, as JSON.
func (w *world) source(source string) func(context.Context) ([]byte, error) {
	w.t.Helper()
	if _, err := w.Get(w.t.Context(), w.box); err == nil {
		if err := w.Delete(w.t.Context(), w.box); err != nil {
			w.t.Fatal(err)
		}
	}
	if _, err := w.CreateTrusted(w.t.Context(), w.box, []byte(`{"credentials":[{"name":"c","source":`+source+`}]}`)); err != nil {
		w.t.Fatal(err)
	}
	i, err := w.Inspection(w.t.Context(), w.box)
	if err != nil {
		w.t.Fatal(err)
	}
	return func(ctx context.Context) ([]byte, error) { return i.Value(ctx, "c") }
}

func (w *world) file(path string) func(context.Context) ([]byte, error) {
	return w.source(fmt.Sprintf(`{"type":"file","path":%q,"cacheSeconds":60}`, path))
}

func (w *world) shell(script string, cache int) func(context.Context) ([]byte, error) {
	return w.source(fmt.Sprintf(`{"type":"command","argv":["/bin/sh","-c",%q,"sh",%q],"cacheSeconds":%d}`, script, w.dir, cache))
}

// gives fails unless a source gives that value.
func gives(t *testing.T, get func(context.Context) ([]byte, error), want string) {
	t.Helper()
	if got, err := get(t.Context()); err != nil || string(got) != want {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

// fails fails unless a source gives an error with that text, and without a value.
func fails(t *testing.T, what string, get func(context.Context) ([]byte, error), text string) {
	t.Helper()
	got, err := get(t.Context())
	if err == nil || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), value) {
		t.Errorf("%s: %q, %v; want %q", what, got, err, text)
	}
}

func write(t *testing.T, path, text string, mode os.FileMode) string {
	t.Helper()
	if err := errors.Join(os.WriteFile(path, []byte(text), mode), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
	return path
}

// pipes makes named pipes, by which a test and its command wait for one another.
func (w *world) pipes(names ...string) {
	w.t.Helper()
	for _, name := range names {
		if err := unix.Mkfifo(filepath.Join(w.dir, name), 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
}

// TestFile: a file is read when it is needed, and again when it is older than the cache's bound.
func TestFile(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(w.dir, "token")
	get := w.file(path)
	fails(t, "no file", get, "no such file")
	write(t, path, value+"\n", 0o600)
	fails(t, "the error is kept for a moment", get, "no such file")
	w.later(maxBad)
	gives(t, get, value)
	got, _ := get(t.Context())
	clear(got) // it is the caller's
	write(t, path+".new", "rotated\r\n", 0o640)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	gives(t, get, value)
	w.later(time.Minute)
	gives(t, get, "rotated")
	write(t, path, "two\nlines\n\n", 0o644)
	gives(t, w.file(path), "two\nlines\n")
	// As a service does that renews a directory: token -> ..data/token, ..data -> 1.
	if err := errors.Join(os.Mkdir(filepath.Join(w.dir, "1"), 0o700), os.Symlink("1", filepath.Join(w.dir, "..data")),
		os.Remove(path), os.Symlink("..data/token", path)); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(w.dir, "1", "token"), "linked", 0o600)
	gives(t, w.file(path), "linked")
	write(t, filepath.Join(w.dir, "long"), strings.Repeat("x", vault.MaxValue)+"\n", 0o600)
	gives(t, w.file(filepath.Join(w.dir, "long")), strings.Repeat("x", vault.MaxValue))
}

// TestFileRefused: what is no value, and what another user could change, is not read.
func TestFileRefused(t *testing.T) {
	w := newWorld(t)
	at := func(name string) string { return filepath.Join(w.dir, name) }
	write(t, at("group"), value, 0o660)
	write(t, at("world"), value, 0o602)
	write(t, at("empty"), "\n", 0o600)
	write(t, at("long"), strings.Repeat("x", vault.MaxValue+1), 0o600)
	write(t, at("endless"), strings.Repeat("x", vault.MaxValue+3), 0o600)
	write(t, at("binary"), value+"\x00", 0o600)
	write(t, at("placeholder"), vault.PlaceholderPrefix+value, 0o600)
	if err := errors.Join(unix.Mkfifo(at("pipe"), 0o600), os.Mkdir(at("open"), 0o700), os.Chmod(at("open"), 0o777),
		os.Mkdir(at("sticky"), 0o700), os.Chmod(at("sticky"), 0o777|os.ModeSticky), os.Symlink("loop", at("loop")),
		os.Symlink("open/../token", at("through"))); err != nil {
		t.Fatal(err)
	}
	write(t, at("token"), value, 0o600)
	write(t, at("open/token"), value, 0o600)
	write(t, at("sticky/token"), value, 0o600)
	for name, want := range map[string]string{
		"group":       "others than root can change",
		"world":       "others than root can change",
		"open/token":  "others than root can change " + at("open"),
		"through":     "others than root can change " + at("open"),
		"empty":       "the value is empty",
		"long":        "longer than 65536 bytes",
		"endless":     "it has more than 65536 bytes",
		"binary":      "control characters",
		"placeholder": "with which placeholders begin",
		"pipe":        "it is no regular file",
		"open":        "others than root can change",
		"1":           "no such file",
		"loop":        "too many levels of symbolic links",
		"token/x":     "not a directory",
	} {
		fails(t, name, w.file(at(name)), want)
	}
	fails(t, "a directory", w.file(w.dir), "it is no regular file")
	gives(t, w.file(at("sticky/token")), value)
	if os.Geteuid() == 0 {
		if err := os.Chown(at("token"), 12345, 0); err != nil {
			t.Fatal(err)
		}
		fails(t, "a file of a user", w.file(at("token")), "it belongs to user 12345")
	}
}

// TestCommand: a command sees no more than its arguments, and its last end of line is cut.
func TestCommand(t *testing.T) {
	w := newWorld(t)
	t.Setenv("SECRET_OF_THE_DAEMON", "x")
	gives(t, w.shell(`echo "$1"; pwd; read x && echo input; echo; env | grep -v -e '^PWD=' -e '^_=' -e '^SHLVL=' -e '^OLDPWD=' | sort`, 0), w.dir+"\n/\n\n"+
		"LC_ALL=C\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	gives(t, w.shell(`read pid comm state ppid pgrp rest </proc/$$/stat; [ $pgrp = $$ ] && echo alone`, 0), "alone")
	write(t, filepath.Join(w.dir, "program"), "#!/bin/sh\necho x\n", 0o777)
	fails(t, "a program that others can change", w.source(`{"type":"command","argv":["`+w.dir+`/program"]}`), "others than root can change")
	fails(t, "no program", w.source(`{"type":"command","argv":["`+w.dir+`/none"]}`), "no such file")
	fails(t, "one that prints nothing", w.shell(`exit 0`, 0), "the value is empty")
	fails(t, "one that prints too much", w.shell(`while echo `+value+`; do :; done`, 0), "it prints more than 65536 bytes")
	gives(t, w.shell(`sleep 1000 & echo x`, 0), "x") // what is in its group ends with it
	w.pipes("up", "go")
	w.grace = 200 * time.Millisecond
	fails(t, "one that holds its output", w.shell(`setsid sh -c 'echo up >"$0/up"; read x <"$0/go"' "$1" & read x <"$1/up"; echo `+value, 0),
		"a process that it left behind holds its standard output")
	write(t, filepath.Join(w.dir, "go"), "go\n", 0o600) // that process ends
	if strings.Contains(w.log.String(), value) {
		t.Errorf("the log: %s", &w.log)
	}
}

// TestCommandError: of a command that fails an error has how it ended and how much it said on its
// standard error, and nothing that it said. The log of the Keeper has no line of it.
func TestCommandError(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct{ script, want string }{
		"exit 3":      {`echo ` + value + ` >&2; exit 3`, fmt.Sprintf("run /bin/sh: exit status 3; %d bytes of its standard error", len(value)+1)},
		"set -x":      {`set -x; echo ` + value + `; false`, "exit status 1; "},
		"one byte":    {`for i in s E c r 3 T; do printf $i >&2; done; false`, "exit status 1; 6 bytes"},
		"silent":      {`echo ` + value + `; false`, "exit status 1; 0 bytes"},
		"much":        {`head -c 100000 /dev/zero >&2; false`, "exit status 1; 100000 bytes"},
		"by a signal": {`echo ` + value + ` >&2; kill -TERM $$`, "signal: terminated; "},
	} {
		get := w.shell(c.script, 0)
		fails(t, name, get, c.want)
		if _, err := get(t.Context()); err == nil || strings.Contains(err.Error(), "sEcr3T") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if log := w.log.String(); log != "" {
		t.Errorf("the log: %s", log)
	}
}

// TestFailing: a command that fails is not run for each request, whatever the bound of its values,
// and however long it has taken.
func TestFailing(t *testing.T) {
	w := newWorld(t)
	w.pipes("up", "go")
	get := w.shell(`printf x >>"$1/began"; echo up >"$1/up"; read x <"$1/go"; exit 3`, 0)
	let := func() { // it fails when it has run for an hour
		if _, err := os.ReadFile(filepath.Join(w.dir, "up")); err != nil {
			t.Error(err)
		}
		w.later(time.Hour)
		write(t, filepath.Join(w.dir, "go"), "go\n", 0o600)
	}
	w.clock.fixed = time.Unix(1e9, 0)
	for run := 1; run <= 2; run++ {
		var wg sync.WaitGroup
		wg.Go(let)
		fails(t, "the run", get, "exit status 3")
		wg.Wait()
		w.later(maxBad - 1)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // another run would wait for ever
		_, err := get(ctx)
		cancel()
		if n := w.began(); n != run || err == nil || !strings.Contains(err.Error(), "exit status 3") {
			t.Errorf("a request after it: %v", err)
			t.Fatalf("%d runs, want %d", n, run)
		}
		w.later(1)
	}
}

// TestCommandLimit: a command that does not end is killed, with what it has started.
func TestCommandLimit(t *testing.T) {
	w := newWorld(t)
	w.pipes("pipe")
	pipe := filepath.Join(w.dir, "pipe")
	r, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	held, err := os.OpenFile(pipe, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.limit = 300 * time.Millisecond
	fails(t, "a command without an end", w.shell(`exec 3>"$1/pipe"; sleep 1000 & sleep 1000; echo `+value, 0), "did not end within 300ms and was killed")
	held.Close()
	if err := r.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); err != nil { // the end comes when nobody has the pipe any more
		t.Errorf("a process is left: %v", err)
	}
}

// began is how often the commands of a test have begun.
func (w *world) began() int {
	b, err := os.ReadFile(filepath.Join(w.dir, "began"))
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.Count(string(b), "x")
}

// TestOneRun: those who ask at once wait for one run, and what it gives is used until the bound.
func TestOneRun(t *testing.T) {
	w := newWorld(t)
	get := w.shell(`printf x >>"$1/began"; echo `+value, 60)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() { gives(t, get, value) })
	}
	wg.Wait()
	if n := w.began(); n != 1 {
		t.Errorf("%d runs for 20 requests", n)
	}
	w.later(time.Minute)
	gives(t, get, value)
	gives(t, get, value)
	if n := w.began(); n != 2 {
		t.Errorf("%d runs after the bound", n)
	}
}

// TestHangUp: a run goes on when the one that asked goes away, and serves the next.
func TestHangUp(t *testing.T) {
	w := newWorld(t)
	w.pipes("up", "go")
	get := w.shell(`printf x >>"$1/began"; echo up >"$1/up"; read x <"$1/go"; echo `+value, 60)
	ctx, hangUp := context.WithCancel(t.Context())
	answer := make(chan error)
	go func() {
		_, err := get(ctx)
		answer <- err
	}()
	if _, err := os.ReadFile(filepath.Join(w.dir, "up")); err != nil {
		t.Fatal(err)
	}
	hangUp()
	if err := <-answer; !errors.Is(err, context.Canceled) {
		t.Errorf("the one that hung up: %v", err)
	}
	if _, err := get(ctx); !errors.Is(err, context.Canceled) { // the lock is taken
		t.Errorf("one that has hung up before: %v", err)
	}
	write(t, filepath.Join(w.dir, "go"), "go\n", 0o600)
	gives(t, get, value)
	if n := w.began(); n != 1 {
		t.Errorf("%d runs", n)
	}
}

// TestFresh: what was read serves those who asked before, and others until the bound.
func TestFresh(t *testing.T) {
	since, bad := time.Unix(1000, 0), errors.New("x")
	for _, c := range []struct {
		cache time.Duration
		err   error
		asked time.Duration // after the reading began
		want  bool
	}{
		{time.Minute, nil, 0, true},
		{time.Minute, nil, time.Minute - 1, true},
		{time.Minute, nil, time.Minute, false},
		{time.Minute, bad, maxBad - 1, true},
		{time.Minute, bad, maxBad, false},
		{0, nil, 0, false},
		{0, nil, -1, true},
		{0, bad, -1, true},
		{0, bad, maxBad - 1, true},
		{0, bad, maxBad, false},
	} {
		h := hostValue{source: vault.Source{Cache: c.cache}, since: since, err: c.err}
		if got := h.fresh(since.Add(c.asked)); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
	if (&hostValue{source: vault.Source{Cache: time.Hour}}).fresh(time.Time{}) {
		t.Error("what was never read is fresh")
	}
}
