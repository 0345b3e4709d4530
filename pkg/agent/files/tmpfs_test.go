package files

import "testing"

// A mount point may have any name: the kernel escapes some of it.
func TestUnescape(t *testing.T) {
	if got := unescape([]byte(`/a\040b\134c`)); got != `/a b\c` {
		t.Errorf("%q", got)
	}
}
