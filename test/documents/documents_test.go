// Package documents runs the commands that documents tell their readers to type, and
// compares their output with what the documents show.
//
// In a fenced block, lines that begin with "$ " are typed at a shell, and the lines after a
// command are its output. All such blocks of a document run in order, in one bash in an
// empty directory. A comment before a block may prevent it from running (marks). Parts
// that differ from run to run are compared by their shape (shapes).
package documents

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/test/official"
)

const top = "../../"

// documents are those whose commands run, each on a daemon of its own.
var documents = []string{"README.md", "docs/tour.md"}

// TestBlocks holds that each block of a document runs, here or in the test that its mark
// names, or has a mark with the reason why not.
func TestBlocks(t *testing.T) {
	var source strings.Builder
	tests, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range tests {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		source.Write(text)
	}
	for _, file := range documents {
		run, not := 0, 0
		for _, b := range blocksOf(t, file) {
			switch {
			case b.mark == "not run":
				not++
			case b.mark == "run by":
				if !strings.Contains(source.String(), "\nfunc "+b.reason+"(t *testing.T)") {
					t.Errorf("%s:%d: there is no test %s here", file, b.line, b.reason)
				}
			case b.isShell():
				if _, err := b.commands(); err != nil {
					t.Error(err)
				}
				run++
			case b.language == "python":
				run++
			default:
				t.Errorf("%s:%d: nothing runs this block: begin its commands with \"$ \", or say in a comment before it <!-- not run: "+
					"REASON -->", file, b.line)
			}
		}
		if not > run/3 {
			t.Errorf("%s: %d blocks run and %d do not: that proves little", file, run, not)
		}
	}
}

// TestDocuments runs the documents.
func TestDocuments(t *testing.T) {
	hosttest.Root(t)
	for _, file := range documents {
		t.Run(filepath.Base(file), func(t *testing.T) { tell(t, file) })
	}
}

// tell runs the blocks of one document on a daemon of its own.
func tell(t *testing.T, file string) {
	d := daemontest.New(t)
	for _, name := range []string{"base", "python"} {
		daemontest.Image(t, d, name)
	}
	if everything {
		daemontest.Image(t, d, "code-interpreter")
	}
	restore(t, d)
	bin := filepath.Dir(daemontest.Bin("sandboxctl"))
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "SANDBOXD_") || strings.HasPrefix(v, "PS") || strings.HasPrefix(v, "BASH_ENV=")
	})
	env = append(env, "PATH="+bin+":"+os.Getenv("PATH"), "SANDBOXD_HOST=unix://"+d.Socket, "LC_ALL=C.UTF-8", "TZ=UTC",
		"OPEN_SANDBOX_DOMAIN="+d.TCP, "OPEN_SANDBOX_API_KEY="+daemontest.Key)
	s := newSession(t, env)
	for _, b := range blocksOf(t, file) {
		switch {
		case b.mark == "not run" || b.mark == "run by" || b.mark == "run by test-all" && !everything:
		case b.language == "python":
			s.python(b)
		default:
			s.shell(b)
		}
	}
}

// shell runs the commands of a block.
func (s *session) shell(b block) {
	all, err := b.commands()
	if err != nil {
		s.t.Fatal(err)
	}
	for i, c := range all {
		run := func() ([]string, int, error) { return s.run(c.text) }
		if c.atTerminal() {
			run = func() ([]string, int, error) { return s.runAtTerminal(c) }
		}
		began := time.Now()
		printed, status, err := run()
		s.t.Logf("%s:%d: %6.2f s  $ %s", b.file, c.line, time.Since(began).Seconds(), c.text)
		if err != nil {
			s.t.Fatalf("%s:%d: $ %s: %v; it printed:\n%s", b.file, c.line, c.text, err, strings.Join(printed, "\n"))
		}
		if d := differ(c.prints, printed); d != "" {
			s.t.Errorf("%s:%d: $ %s\n%s\nall that was printed:\n%s", b.file, c.line, c.text, d, strings.Join(printed, "\n"))
		}
		asked := i+1 < len(all) && all[i+1].text == "echo $?" // the status is compared there
		if shown := c.showsFailure(); shown != (status != 0) && !asked {
			s.t.Errorf("%s:%d: $ %s\nends with status %d; the document shows it failing: %v", b.file, c.line, c.text, status, shown)
		}
	}
}

// complaint matches what sandboxctl prints about itself; note matches those of these lines
// that are no errors.
var (
	complaint = regexp.MustCompile(`^sandboxctl: `)
	note      = regexp.MustCompile(`^sandboxctl: (note|detached)\b`)
)

// showsFailure reports whether the last line of a command's output is an error.
func (c command) showsFailure() bool {
	if len(c.prints) == 0 {
		return false
	}
	last := c.prints[len(c.prints)-1]
	return complaint.MatchString(last) && !note.MatchString(last)
}

// answer matches the output that a line of a program gives in a comment: print(6*7)  # 42
var answer = regexp.MustCompile(`(?m)^print\(.*\)  # (.*)$`)

// python runs a program with the official SDK and compares its output with the comments
// on its lines.
func (s *session) python(b block) {
	python, err := official.Python(s.t.Context(), top+"test/compat/python/requirements.txt")
	if err != nil {
		s.t.Fatal(err)
	}
	program := strings.Join(b.text, "\n") + "\n"
	var shown []string
	for _, m := range answer.FindAllStringSubmatch(program, -1) {
		shown = append(shown, m[1])
	}
	if len(shown) != strings.Count(program, "\nprint(") {
		s.t.Errorf("%s:%d: a line that prints does not end with what is printed, as print(x)  # 42", b.file, b.line)
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), hosttest.Patient(commandLimit))
	defer cancel()
	cmd := exec.CommandContext(ctx, python, "-")
	cmd.Dir, cmd.Env, cmd.Stdin = s.dir, s.env, strings.NewReader(program)
	var errors bytes.Buffer
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		s.t.Errorf("%s:%d: the program: %v\n%s", b.file, b.line, err, errors.String())
	}
	if d := differ(shown, strings.Split(strings.TrimRight(string(out), "\n"), "\n")); d != "" {
		s.t.Errorf("%s:%d: the program %s", b.file, b.line, d)
	}
}

// restore removes what earlier tests left in the instance and, at the end of the test, what
// the document left: everything except the images that were there before.
func restore(t *testing.T, d *daemontest.Daemon) {
	t.Helper()
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	before, err := c.Images().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	clear(t, c)
	t.Cleanup(func() {
		defer c.Close()
		clear(t, c)
		now, err := c.Images().List(context.Background())
		for _, i := range now {
			if !slices.ContainsFunc(before, func(b wire.ImageInfo) bool { return b.Name == i.Name && b.Tag == i.Tag }) {
				_, rerr := c.Images().Remove(context.Background(), i.Name+":"+i.Tag)
				err = errors.Join(err, rerr)
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
}

// clear removes all sandboxes, snapshots and volumes.
func clear(t *testing.T, c *client.Client) {
	t.Helper()
	ctx := context.Background() // it also runs when the test's context has ended
	sandboxes, err := c.List(ctx, client.Filter{})
	for _, sb := range sandboxes {
		err = errors.Join(err, c.Delete(ctx, sb.ID))
	}
	snapshots, failed := c.Snapshots().List(ctx, "")
	err = errors.Join(err, failed)
	for _, s := range snapshots {
		err = errors.Join(err, c.Snapshots().Remove(ctx, s.ID))
	}
	volumes, failed := c.Volumes().List(ctx)
	err = errors.Join(err, failed)
	for _, v := range volumes {
		err = errors.Join(err, c.Volumes().Remove(ctx, v.Name))
	}
	if err != nil {
		t.Errorf("clear the instance: %v", err)
	}
}
