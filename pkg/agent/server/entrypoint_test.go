package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// entrypointOf starts argv as the entrypoint of a sandbox whose image has a program for
// each of some names: it prints its arguments, each in brackets.
func entrypointOf(t *testing.T, literal bool, programs []string, argv ...string) (said string, code int, err error) {
	t.Helper()
	work, bin := t.TempDir(), t.TempDir()
	for _, name := range programs {
		path := filepath.Join(bin, name)
		if strings.Contains(name, "/") {
			path = filepath.Join(work, name)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("#!/bin/sh\nprintf '[%s]' \"${0##*/}\" \"$@\"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	e := newEnvWith(t, agent.Bootstrap{Workdir: work, Env: map[string]string{"PATH": bin + ":/usr/bin:/bin"}})
	st := start{guest: e.s.guest(), argv: argv, literal: literal}
	if code, err = e.s.startEntrypoint(&st); err != nil {
		return "", code, err
	}
	c := e.s.entrypoint.Load()
	<-c.Done()
	if want := strings.Join(argv, " "); c.Status().Content != want {
		t.Errorf("it shows %q, want %q as it was sent", c.Status().Content, want)
	}
	return string(c.Output.Tail(1 << 10)), c.End().Code, nil
}

// TestEntrypointOfOneElement: one that names no program is split into words; a program
// of the literal name is run.
func TestEntrypointOfOneElement(t *testing.T) {
	for name, c := range map[string]struct {
		programs, argv []string
		literal        bool
		said           string
	}{
		"words":             {[]string{"show"}, []string{"show  -f '/dev/null x'"}, false, "[show][-f][/dev/null x]"},
		"not expanded":      {[]string{"show"}, []string{"show $HOME * && `id`"}, false, "[show][$HOME][*][&&][`id`]"},
		"a name with space": {[]string{"show me", "show"}, []string{"show me"}, false, "[show me]"},
		"in a directory":    {[]string{"./a b/show", "show"}, []string{"a b/show"}, false, "[show]"},
		"a quote in a name": {[]string{"it's here"}, []string{"it's here"}, false, "[it's here]"},
		"literal":           {[]string{"show me", "show"}, []string{"show me"}, true, "[show me]"},
		"two elements":      {[]string{"show", "show me"}, []string{"show", "me too"}, false, "[show][me too]"},
		"two, one unknown":  {[]string{"show me"}, []string{"show me", "too"}, false, "[show me][too]"},
		"no space":          {[]string{"'show'"}, []string{"'show'"}, false, "['show']"},
	} {
		t.Run(name, func(t *testing.T) {
			said, code, err := entrypointOf(t, c.literal, c.programs, c.argv...)
			if err != nil || code != 0 || said != c.said {
				t.Errorf("%q, %d, %v; want %q", said, code, err, c.said)
			}
		})
	}
	for name, c := range map[string]struct {
		programs, argv []string
		literal        bool
		says           string
	}{
		"unknown word": {
			nil,
			[]string{"no-such x"},
			false,
			`entrypoint "no-such": no such file in the image's PATH (`,
		},
		"which element": {nil, []string{"no-such x"}, false, `it is the first word of "no-such x", which names no program either`},
		"open quote":    {[]string{"show"}, []string{"show 'me"}, false, "cannot be split into words: a quote in it is not closed"},
		"backslash":     {[]string{"show"}, []string{`show me\`}, false, "backslash"},
		"white space":   {nil, []string{" \t"}, false, "there is no word in it"},
		"literal":       {[]string{"show"}, []string{"show me"}, true, `entrypoint "show me": no such file`},
		"two elements":  {[]string{"show"}, []string{"show me", "too"}, false, `entrypoint "show me": no such file`},
	} {
		t.Run("bad "+name, func(t *testing.T) {
			if _, code, err := entrypointOf(t, c.literal, c.programs, c.argv...); err == nil || code != 127 ||
				!strings.Contains(err.Error(), c.says) {
				t.Errorf("%d, %v; want 127 and %q", code, err, c.says)
			}
		})
	}
	// A file of that name that cannot be executed is what was meant.
	e := newEnv(t)
	if err := os.WriteFile(filepath.Join(e.dir, "a b"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	st := start{guest: e.s.guest(), argv: []string{"./a b"}}
	if code, err := e.s.startEntrypoint(&st); err == nil || code != 126 || !strings.Contains(err.Error(), `"./a b": not executable`) {
		t.Errorf("%d, %v", code, err)
	}
}

// TestSettle: a sandbox counts as ready when its entrypoint waits, not when it is about
// to fail.
func TestSettle(t *testing.T) {
	const long = 10 * time.Minute // no host is that slow
	for name, c := range map[string]struct {
		text  string
		limit time.Duration
		ready bool
	}{
		"fails":         {"echo no; exit 3", long, false},
		"ends well":     {":", long, false},
		"a child fails": {"sh -c 'exit 3'; exit 3", long, false},
		"waits":         {"exec sleep 1000", long, true},
		"a child waits": {"sleep 1000; :", long, true},
		"computes":      {"while :; do :; done", 20 * time.Millisecond, true},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			if !e.s.settle(0) {
				t.Error("without an entrypoint")
			}
			st := start{guest: e.s.guest(), argv: []string{"sh", "-c", c.text}}
			if code, err := e.s.startEntrypoint(&st); err != nil {
				t.Fatal(code, err)
			}
			defer e.s.entrypoint.Load().Process.KillTree()
			start := time.Now()
			ready := e.s.settle(c.limit)
			if took := time.Since(start); ready != c.ready || c.limit != long && took < c.limit || took > long/2 {
				t.Errorf("%t after %v", ready, took)
			}
		})
	}
}
