package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// Sizes of documents. A new reader is tired and has half an hour, and reads a short
// document but not a long one. Words are counted as wc(1) counts them.
const (
	maxParagraph = 120 // words; a cell of a table and an item of a list are paragraphs
	maxColumn    = 120 // columns of a line outside of tables and blocks of code
)

// maxWords are the most words of the documents that would otherwise grow.
var maxWords = map[string]int{"README.md": 900, "ARCHITECTURE.md": 1500}

// prose are the documents whose form TestProse holds.
var prose = []string{
	"README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/tour.md", "docs/operations.md",
	"docs/commands.md", "docs/support.md", "docs/install.md",
	"docs/compatibility.md", "docs/benchmarks.md", "docs/design/*.md",
}

// linked are the documents whose links and paths TestPaths follows.
var linked = []string{"*.md", "docs/*.md", "docs/*/*.md"}

// A document is a file in Markdown, without its blocks of code.
type document struct {
	path  string // relative to the module
	text  string
	lines []line
}

// A line is a line of a document outside blocks of code.
type line struct {
	number int // counted from 1
	text   string
}

func documents(t *testing.T, patterns []string) (all []document) {
	t.Helper()
	for _, pattern := range patterns {
		paths, err := filepath.Glob(filepath.Join("../..", pattern))
		if err != nil || len(paths) == 0 {
			t.Fatalf("no document matches %s (%v)", pattern, err)
		}
		for _, p := range paths {
			text, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			rel, err := filepath.Rel("../..", p)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, document{rel, string(text), withoutCode(string(text))})
		}
	}
	return all
}

// withoutCode returns the lines outside blocks of code.
func withoutCode(text string) (all []line) {
	code := false
	for i, l := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(l), "```") {
			code = !code
			l = "" // a block ends a paragraph
		} else if code {
			continue
		}
		all = append(all, line{i + 1, l})
	}
	return all
}

// item matches the beginning of an item of a list.
var item = regexp.MustCompile(`^\s*([-*]|\d+\.) `)

// paragraphs cuts a document into paragraphs, items of lists and cells of tables. Each
// has the number of its first line.
func (d document) paragraphs() (all []line) {
	open := false
	for _, l := range d.lines {
		switch {
		case strings.TrimSpace(l.text) == "", strings.HasPrefix(l.text, "#"), strings.HasPrefix(l.text, "<!--"):
			open = false
		case isRow(l.text):
			open = false
			for cell := range strings.SplitSeq(l.text, "|") {
				all = append(all, line{l.number, cell})
			}
		case open && !item.MatchString(l.text):
			all[len(all)-1].text += " " + l.text
		default:
			all = append(all, l)
			open = true
		}
	}
	return all
}

// isRow reports whether a line is a row of a table.
func isRow(l string) bool { return strings.HasPrefix(l, "|") }

func TestProse(t *testing.T) {
	for _, d := range documents(t, prose) {
		if n, most := len(strings.Fields(d.text)), maxWords[d.path]; most > 0 && n > most {
			t.Errorf("%s has %d words, more than %d: what a reader does not need at first belongs into docs", d.path, n, most)
		}
		for _, p := range d.paragraphs() {
			if n := len(strings.Fields(p.text)); n > maxParagraph {
				t.Errorf("%s:%d: the paragraph has %d words, more than %d: give each topic one of its own", d.path, p.number,
					n, maxParagraph)
			}
		}
		for _, l := range d.lines {
			if n := utf8.RuneCountInString(l.text); n > maxColumn && !isRow(l.text) {
				t.Errorf("%s:%d: the line has %d columns, more than %d", d.path, l.number, n, maxColumn)
			}
		}
	}
}

var (
	link = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	span = regexp.MustCompile("`([^`\\s]+)`")
	// place matches a path of the checkout in a document, or several paths: a{b,c}.
	place = regexp.MustCompile(`^[\w.*/-]*(\{[\w./,-]+\}[\w.*/-]*)?$`)
)

// TestPaths holds that the targets of documents exist: the files and headings of links,
// and the paths of the checkout. A Go file is always named by its path.
func TestPaths(t *testing.T) {
	all := documents(t, linked)
	for _, d := range all {
		for _, l := range d.lines {
			for _, m := range link.FindAllStringSubmatch(l.text, -1) {
				if to := m[1]; !strings.Contains(to, "://") {
					if why := broken(all, d.path, to); why != "" {
						t.Errorf("%s:%d: the link to %s leads nowhere: %s", d.path, l.number, to, why)
					}
				}
			}
			for _, m := range span.FindAllStringSubmatch(l.text, -1) {
				for _, p := range places(m[1]) {
					if found, err := filepath.Glob(filepath.Join("../..", p)); err != nil || len(found) == 0 {
						t.Errorf("%s:%d: there is no %s; name files by their path", d.path, l.number, p)
					}
				}
			}
		}
	}
}

// inComment matches the path of a document in a comment.
var inComment = regexp.MustCompile(`\bdocs/[\w/-]+\.md\b`)

// TestCommentPaths holds that the documents that comments name exist.
func TestCommentPaths(t *testing.T) {
	for _, s := range sources(t) {
		for _, group := range s.file.Comments {
			for _, p := range inComment.FindAllString(group.Text(), -1) {
				if _, err := os.Stat(filepath.Join("../..", p)); err != nil {
					t.Errorf("%s: a comment names %s, which is not there", s.path, p)
				}
			}
		}
	}
}

// broken says why a link of the document at path is broken; "" if it is not.
func broken(all []document, path, to string) string {
	file, heading, _ := strings.Cut(to, "#")
	target := path
	if file != "" {
		target = filepath.Join(filepath.Dir(path), file)
	}
	if _, err := os.Stat(filepath.Join("../..", target)); err != nil {
		return "there is no such file"
	}
	if heading == "" {
		return ""
	}
	at := slices.IndexFunc(all, func(d document) bool { return d.path == target })
	if at < 0 || !slices.ContainsFunc(all[at].lines, func(l line) bool { return anchor(l.text) == heading }) {
		return "there is no such heading"
	}
	return ""
}

// anchor is the link target of a heading; "" if the line is no heading.
func anchor(l string) string {
	text := strings.TrimLeft(l, "#")
	if text == l {
		return ""
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-', r == '_', unicode.IsLetter(r), unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, strings.TrimSpace(text))
}

// places returns the paths of the checkout that a code span names; none if the span is
// no path.
func places(text string) []string {
	if !place.MatchString(text) {
		return nil
	}
	top, _, below := strings.Cut(text, "/")
	if !strings.HasSuffix(text, ".go") {
		fi, err := os.Stat(filepath.Join("../..", top))
		if !below || top == "" || top == "build" || err != nil || !fi.IsDir() { // make creates build
			return nil
		}
	}
	before, rest, braces := strings.Cut(text, "{")
	if !braces {
		return []string{text}
	}
	inner, after, _ := strings.Cut(rest, "}")
	var all []string
	for part := range strings.SplitSeq(inner, ",") {
		all = append(all, before+part+after)
	}
	return all
}

// TestParagraphs holds that paragraphs cuts a text correctly.
func TestParagraphs(t *testing.T) {
	const text = "# head\n\none\ntwo\n- three\n  four\n- five\n\n| a b | c |\n|---|---|\n\n```\ncode\n```\nsix\n<!-- seven -->\n"
	d := document{text: text, lines: withoutCode(text)}
	var got []string
	for _, p := range d.paragraphs() {
		if s := strings.Join(strings.Fields(p.text), " "); s != "" {
			got = append(got, s)
		}
	}
	if want := []string{"one two", "- three four", "- five", "a b", "c", "---", "---", "six"}; !slices.Equal(got, want) {
		t.Errorf("the paragraphs are %q, want %q", got, want)
	}
	for heading, want := range map[string]string{
		"## What, if `x` is_y?": "what-if-x-is_y", "text": "", "### Two commands": "two-commands",
	} {
		if got := anchor(heading); got != want {
			t.Errorf("%q is linked to by %q, want %q", heading, got, want)
		}
	}
	for text, want := range map[string][]string{
		"pkg/{oci,netns}": {"pkg/oci", "pkg/netns"}, "cmd/*": {"cmd/*"}, "x.go": {"x.go"},
		"application/json": nil, "pkg": nil, "/pkg": nil, "build/test": nil, "<run>/ns": nil, "GET /pkg": nil,
	} {
		if got := places(text); !slices.Equal(got, want) {
			t.Errorf("%q stands for %q, want %q", text, got, want)
		}
	}
}
