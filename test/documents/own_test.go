package documents

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestParse holds that a malformed block is an error, and not a block that does not run.
func TestParse(t *testing.T) {
	const shell = "```\n$ echo hello\nhello\n```\n"
	for name, c := range map[string]struct{ text, says string }{
		"a block":               {shell, ""},
		"a reason":              {"<!-- not run: it needs a registry -->\n" + shell, ""},
		"no reason":             {"<!-- not run: -->\n" + shell, "want one comment"},
		"an unknown mark":       {"<!-- runs never: it is hard -->\n" + shell, "want one comment"},
		"two marks":             {"<!-- not run: a -->\n<!-- not run: b -->\n" + shell, "want one comment"},
		"a mark without block":  {"<!-- not run: a -->\ntext\n" + shell, "no block follows"},
		"a mark at the end":     {shell + "<!-- not run: a -->\n", "no block follows"},
		"no end":                {"```\n$ echo hello\n", "no end"},
		"an indented fence":     {"  ```\n  $ echo hello\n  ```\n", "fence"},
		"a fence of four":       {"````\n$ echo hello\n````\n", "fence"},
		"a fence with an extra": {"```sh title\n$ echo hello\n```\n", "fence"},
	} {
		_, err := parse("d.md", c.text)
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
	blocks, err := parse("d.md", "# title\n\n```\n$ a \\\n    b\n1\n2\n$ c\n```\n")
	if err != nil || len(blocks) != 1 {
		t.Fatal(blocks, err)
	}
	all, err := blocks[0].commands()
	if err != nil || len(all) != 2 || all[0].text != "a \\\n    b" || !slices.Equal(all[0].prints, []string{"1", "2"}) ||
		all[1].line != 8 || all[1].prints != nil {
		t.Errorf("commands are %+v, %v", all, err)
	}
	if _, err := (block{text: []string{"1", "$ a"}}).commands(); err == nil {
		t.Error("output without a command is no error")
	}
}

// TestShape holds that texts count as equal if they differ only in what differs from run to
// run.
func TestShape(t *testing.T) {
	for _, c := range []struct {
		shown, printed string
		equal          bool
	}{
		{"Linux dsieshzj2hee 4.19.0-gvisor", "Linux tsieshzj2hef 4.19.0-gvisor", true},
		{"Linux dsieshzj2hee 4.19.0-gvisor", "Linux tsieshzj2hef 4.20.0-gvisor", false},
		{"snap-dk3v7cyfzq2h", "snap-tk3v7cyfzq22", true},
		{"snap-dk3v7cyfzq2h", "tk3v7cyfzq22", false},
		{"lab", "tk3v7cyfzq22", false},
		{"just now   in 29 minutes", "2 seconds ago   in 30 minutes", true},
		{"just now   in 29 minutes", "just now   never", false},
		{"memory limit of 64MiB", "memory limit of 63MiB", false},
		{"lab   1.6%   17.12MiB / 256MiB   6.7%   19MiB   0 / 256", "lab   11%   1GiB / 256MiB   10.4%   27.36MiB   14 / 256", true},
		{"lab   1.6%   17.12MiB / 256MiB   6.7%   19MiB   0 / 256", "lab   1.6%   17.12MiB / 512MiB   6.7%   19MiB   0 / 256", false},
		{"42", "43", false},
		{"Running", "Paused", false},
	} {
		if equal := shape(c.shown) == shape(c.printed); equal != c.equal {
			t.Errorf("%q and %q: %v, as %q and %q", c.shown, c.printed, equal, shape(c.shown), shape(c.printed))
		}
	}
}

// TestSession runs commands that fail, print nothing or do not end their line.
func TestSession(t *testing.T) {
	s := newSession(t, os.Environ())
	for _, c := range []struct {
		text   string
		prints []string
		status int
	}{
		{"a=6", nil, 0},
		{"echo $((a * 7))", []string{"42"}, 0},
		{"printf 'no end'", []string{"no end"}, 0},
		{"echo out; echo err >&2; false", []string{"out", "err"}, 1},
		{"echo $?", []string{"1"}, 0},
		{"cat; pwd -P", []string{s.dir}, 0}, // stdin is empty
		{"for i in 1 2; do\n  echo $i\ndone", []string{"1", "2"}, 0},
	} {
		prints, status, err := s.run(c.text)
		if err != nil || status != c.status || !slices.Equal(prints, c.prints) {
			t.Errorf("%s: %q, status %d, %v; want %q, %d", c.text, prints, status, err, c.prints, c.status)
		}
	}
	if _, _, err := s.run("exit 3"); err == nil {
		t.Error("the end of the shell is no error")
	}
}

// TestTerminal types at a prompt.
func TestTerminal(t *testing.T) {
	s := newSession(t, os.Environ())
	shows := []string{"root@lab:/x# echo hello", "hello", "root@lab:/x# exit", "exit"}
	c := command{text: "PS1='root@lab:/x# ' bash --noprofile --norc", prints: shows}
	if !c.atTerminal() {
		t.Fatal("it is not seen to be at a terminal")
	}
	printed, status, err := s.runAtTerminal(c)
	if err != nil || status != 0 || !slices.Equal(printed, shows) {
		t.Errorf("%q, status %d, %v; want %q", printed, status, err, shows)
	}
}
