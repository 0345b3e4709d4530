package files

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/cli/command"
)

// TestProgress: the bar goes when the copy has ended, and does not come back with bytes that a
// request still reads.
func TestProgress(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "terminal"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p := &progress{what: "copying", total: 200, bar: &command.Bar{On: f}}
	r := p.of(strings.NewReader(strings.Repeat("x", 200)))
	io.CopyN(io.Discard, r, 100) //nolint:errcheck // counted below
	if n := p.end(); n != 100 {
		t.Error(n)
	}
	io.Copy(io.Discard, r) //nolint:errcheck // it is a string
	got, err := os.ReadFile(f.Name())
	if err != nil || string(got) != "\r\x1b[Kcopying  [===============               ] 100B of 200B  50%\r\x1b[K" {
		t.Errorf("%q %v", got, err)
	}
}

func TestParsing(t *testing.T) {
	for s, want := range map[string]string{
		"lab:/tmp": "lab /tmp", "lab:x": "lab /x", "./a:b": " ./a:b", "/a:b": " /a:b",
		"a/b:c": " a/b:c", "file": " file", ":x": " :x", "my.box:/x": "my.box /x", "../a:b": " ../a:b",
	} {
		if box, p := splitRemote(s); box+" "+p != want {
			t.Errorf("splitRemote(%q) = %q %q", s, box, p)
		}
	}
}
