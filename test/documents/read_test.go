package documents

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A block is one fenced block of a document.
type block struct {
	file     string
	line     int    // of its first line, counted from 1
	language string // after the fence; empty for most
	mark     string // the beginning of the comment before the block, one of marks; empty for most
	reason   string // the rest of that comment
	text     []string
}

// A command is one line of a shell block, or several lines joined by backslashes.
type command struct {
	line   int
	text   string
	prints []string
}

// marks are the beginnings that a comment before a block may have. A reason follows, as in
// <!-- not run: it needs a registry -->.
var marks = []string{
	"not run",         // no test runs it; the reason says why, or which other test covers it
	"run by",          // another test of this package runs it; its name follows
	"run by test-all", // TestDocuments runs it, only with the build tag all
}

var (
	fence   = regexp.MustCompile("^```([a-z]*)$")
	comment = regexp.MustCompile(`^<!-- ([a-z -]+): (.+) -->$`)
)

// parse returns the fenced blocks of a document.
func parse(file, text string) (blocks []block, err error) {
	var open *block
	var before []string // the comments since the last line of text
	for i, line := range strings.Split(text, "\n") {
		m := fence.FindStringSubmatch(line)
		switch {
		case m != nil && open == nil:
			open = &block{file: file, line: i + 2, language: m[1]}
			if err := open.setMark(before); err != nil {
				return nil, err
			}
			before = nil
		case line == "```":
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text = append(open.text, line)
		case strings.HasPrefix(line, "<!--"):
			before = append(before, line)
		case line != "" && len(before) > 0:
			return nil, fmt.Errorf("%s:%d: no block follows %s", file, i+1, before[0])
		}
		if bare := strings.TrimSpace(line); m == nil && (strings.HasPrefix(bare, "```") || strings.HasPrefix(bare, "~~~")) {
			return nil, fmt.Errorf("%s:%d: what fence is %q?", file, i+1, line)
		}
	}
	if open != nil {
		return nil, fmt.Errorf("%s:%d: the block has no end", file, open.line)
	}
	if len(before) > 0 {
		return nil, fmt.Errorf("%s: no block follows %s", file, before[0])
	}
	return blocks, nil
}

func (b *block) setMark(comments []string) error {
	for _, c := range comments {
		m := comment.FindStringSubmatch(c)
		if m == nil || !slices.Contains(marks, m[1]) || b.mark != "" {
			return fmt.Errorf("%s:%d: want one comment before the block, <!-- MARK: REASON --> with a mark of %q; it is %q", b.file, b.line,
				marks, comments)
		}
		b.mark, b.reason = m[1], m[2]
	}
	return nil
}

// commands splits a shell block into commands, which begin with "$ ", and their output.
func (b block) commands() (all []command, err error) {
	joined := false
	for i, line := range b.text {
		typed, isCommand := strings.CutPrefix(line, "$ ")
		switch {
		case joined:
			last := &all[len(all)-1]
			last.text += "\n" + line
		case isCommand:
			all = append(all, command{line: b.line + i, text: typed})
		case len(all) == 0:
			return nil, fmt.Errorf("%s:%d: output without a command", b.file, b.line+i)
		default:
			last := &all[len(all)-1]
			last.prints = append(last.prints, line)
		}
		joined = (isCommand || joined) && strings.HasSuffix(line, `\`)
	}
	return all, nil
}

// isShell reports whether the block is typed at a shell.
func (b block) isShell() bool {
	return slices.ContainsFunc(b.text, func(line string) bool { return strings.HasPrefix(line, "$ ") })
}

// blocksOf reads a document of the checkout.
func blocksOf(t *testing.T, file string) []block {
	t.Helper()
	text, err := os.ReadFile(top + file)
	if err != nil {
		t.Fatal(err)
	}
	blocks, err := parse(file, string(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(blocks) == 0 {
		t.Fatalf("%s has no fenced block", file)
	}
	return blocks
}
