package archtest

import (
	"go/ast"
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	maxFiles    = 20  // of a package, without tests
	maxFile     = 500 // lines
	maxFunction = 95  // lines
	maxMethods  = 40  // of a type
	maxManager  = 20  // exported methods of the Manager
	maxCode     = 140 // columns; a tab is four
	maxComment  = 120 // columns
)

func TestSizes(t *testing.T) {
	files, methods, exported := map[string]int{}, map[string]int{}, 0
	for _, s := range sources(t) {
		if s.test() {
			continue
		}
		files[s.dir]++
		if n := s.set.File(s.file.Pos()).LineCount(); n > maxFile {
			t.Errorf("%s has %d lines, more than %d: look for the seam", s.path, n, maxFile)
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if n := s.set.Position(f.End()).Line - s.set.Position(f.Pos()).Line + 1; n > maxFunction {
				t.Errorf("%s: %s has %d lines, more than %d", s.path, f.Name.Name, n, maxFunction)
			}
			if f.Recv == nil {
				continue
			}
			methods[s.dir+"."+receiver(f)]++
			if s.dir == "pkg/sandbox" && f.Name.IsExported() && receiver(f) == "Manager" {
				exported++
			}
		}
	}
	for dir, n := range files {
		if n > maxFiles {
			t.Errorf("%s has %d files, more than %d: it is more than one idea", dir, n, maxFiles)
		}
	}
	for name, n := range methods {
		if n > maxMethods {
			t.Errorf("%s has %d methods, more than %d: it is more than one thing", name, n, maxMethods)
		}
	}
	if exported > maxManager {
		t.Errorf("sandbox.Manager has %d exported methods, more than %d: what is not order, state or recovery lives in a package that "+
			"calls it", exported, maxManager)
	}
}

func receiver(f *ast.FuncDecl) string {
	e := f.Recv.List[0].Type
	if p, ok := e.(*ast.StarExpr); ok {
		e = p.X
	}
	if id, ok := e.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}

// TestColumns holds that no line is too long to read. Lines with text in backquotes,
// which cannot be broken, may be longer.
func TestColumns(t *testing.T) {
	for _, s := range sources(t) {
		text, err := os.ReadFile(filepath.Join("../..", s.path))
		if err != nil {
			t.Fatal(err)
		}
		raw, comments := literals(text)
		for i, line := range strings.Split(string(text), "\n") {
			n, limit := columns(line), maxCode
			if comments[i+1] {
				limit = maxComment
			}
			if n > limit && !raw[i+1] && !strings.HasPrefix(line, "//go:") {
				t.Errorf("%s:%d has %d columns, more than %d", s.path, i+1, n, limit)
			}
		}
	}
}

// literals returns the lines of a file that have text in backquotes, and the lines that
// are nothing but a comment.
func literals(text []byte) (raw, comments map[int]bool) {
	raw, comments = map[int]bool{}, map[int]bool{}
	file := token.NewFileSet().AddFile("", 1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	for last := 0; ; {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return raw, comments
		}
		from := file.Line(pos)
		to := from + strings.Count(lit, "\n")
		for line := from; line <= to; line++ {
			switch {
			case tok == token.STRING && lit[0] == '`':
				raw[line] = true
			case tok == token.COMMENT && line > last:
				comments[line] = true
			}
		}
		if tok != token.SEMICOLON || lit != "\n" {
			last = to
		}
	}
}

func columns(line string) int {
	return utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    "))
}
