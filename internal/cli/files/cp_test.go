package files

import "testing"

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
