package server

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

// FuzzPreScript: the shell that reads a pre-script gets the same words for every name of
// one but for the name itself, and the entrypoint as it was sent. It is not run here.
func FuzzPreScript(f *testing.F) {
	f.Add("setup.sh", "python3")
	f.Add("/a b/it's; reboot '", "'")
	f.Add("-x\n$(id)", "")
	words := func(t *testing.T, script, program string) (all []string) {
		g := &guest{env: map[string]string{preScriptVar: script, "PATH": "/usr/bin:/bin"}}
		argv, p, err := g.withPreScript([]string{program, "arg"})
		if err != nil {
			t.Fatal(err)
		}
		p.exported.Close()
		syscall.Close(p.end)
		if len(argv) != 6 || argv[1] != "-c" || argv[3] != "sh" || argv[4] != program || argv[5] != "arg" {
			t.Fatalf("%q is run as %q", program, argv)
		}
		if all, err = shell.Split(argv[2]); err != nil {
			t.Fatalf("%q: %v", argv[2], err)
		}
		return all
	}
	f.Fuzz(func(t *testing.T, script, program string) {
		if script == "" || strings.ContainsRune(script+program, 0) {
			return // no variable and no argument has one
		}
		file := script
		if !strings.Contains(file, "/") {
			file = "./" + file
		}
		got, want := words(t, script, program), words(t, "/x", program)
		for i, w := range want { // the name is a word of its own, or a part of one that echo prints
			if w == "/x" {
				want[i] = file
				continue
			}
			want[i] = strings.NewReplacer("=/x ", "="+script+" ", "pre-script /x;", "pre-script "+script+";").Replace(w)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%q makes %q, want %q", script, got, want)
		}
	})
}

// FuzzExported: what a pre-script exports, or writes there in its place, becomes an
// environment that programs can be started with.
func FuzzExported(f *testing.F) {
	f.Add([]byte("A=1\x00PATH=/bin\x00_=/usr/bin/env\x00SHLVL=1\x00PWD=/\x00"))
	f.Add([]byte("A=1\x00GIVEN=g\x00"))
	f.Add([]byte("A=1\x00=x\x00no\x00A=2=3\nB=4"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 {
			return // the shell has ended
		}
		fd, err := unix.MemfdCreate("exported", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		file := os.NewFile(uintptr(fd), "exported")
		if _, err := file.WriteAt(b, 0); err != nil {
			t.Fatal(err)
		}
		g := &guest{env: map[string]string{"OLD": "1", "PWD": "/work"}}
		g.given.Store(&map[string]string{"GIVEN": "g"}) // which the host may take away
		if !(&preScript{exported: file}).take(g, nil) {
			t.Fatalf("%q is no environment", b)
		}
		size := 0
		for k, v := range g.env {
			size += len(k) + len(v)
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
				t.Fatalf("%q exports %q as %q", b, k, v)
			}
			last := bytes.LastIndex(append([]byte{0}, b...), []byte("\x00"+k+"="))
			if k != "PWD" && (last < 0 || !bytes.HasPrefix(b[last+len(k)+1:], []byte(v))) {
				t.Fatalf("%q exports %q as %q", b, k, v)
			}
		}
		if g.env["PWD"] != "/work" || g.env["SHLVL"] != "" || g.env["_"] != "" || g.env["GIVEN"] == "g" ||
			g.files.User.Home != g.env["HOME"] || size > len(b)+8 {
			t.Fatalf("%q makes %q", b, g.env)
		}
	})
}
