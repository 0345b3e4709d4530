package exec

import (
	"os/exec"
	"strings"
	"testing"
)

// TestShellLine: a shell reads the words that were given.
func TestShellLine(t *testing.T) {
	for _, words := range [][]string{
		{"echo", "plain", "a b", "", "$HOME", "it's", `"x"`, "a\nb", "*", "~", "#", "a=b", "x;y", "-n"},
		{"printf", "%s", "\\"},
	} {
		out, err := exec.Command("sh", "-c", "printf '<%s>' "+shellLine(words)).Output()
		if want := "<" + strings.Join(words, "><") + ">"; err != nil || string(out) != want {
			t.Errorf("%q: %s, %v", shellLine(words), out, err)
		}
	}
	if got := shellLine([]string{"cd /usr && ls"}); got != "cd /usr && ls" {
		t.Errorf("one word became %q", got)
	}
}
