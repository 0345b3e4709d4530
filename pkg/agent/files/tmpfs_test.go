package files

import (
	"strings"
	"testing"
)

// A mount point may have any name: the kernel escapes some of it.
func TestUnescape(t *testing.T) {
	if got := unescape([]byte(`/a\040b\134c`)); got != `/a b\c` {
		t.Errorf("%q", got)
	}
}

// FuzzUnescape: a name is read as it was before the kernel escaped it, and any other
// bytes make no more than they are.
func FuzzUnescape(f *testing.F) {
	f.Add(`/a b\c`)
	f.Add("\\9\t\n\\")
	escape := strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`)
	f.Fuzz(func(t *testing.T, name string) {
		if got := unescape([]byte(escape.Replace(name))); got != name {
			t.Fatalf("%q comes back as %q", name, got)
		}
		if got := unescape([]byte(name)); len(got) > len(name) {
			t.Fatalf("%q becomes %q", name, got)
		}
	})
}
