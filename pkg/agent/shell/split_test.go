package shell

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

func TestSplit(t *testing.T) {
	for text, want := range map[string][]string{
		"tail -f /dev/null":       {"tail", "-f", "/dev/null"},
		"  a\t b \t c ":           {"a", "b", "c"},
		"a":                       {"a"},
		`a 'b c' d`:               {"a", "b c", "d"},
		`a "b 'c' d"`:             {"a", "b 'c' d"},
		`'' a ""`:                 {"", "a", ""},
		`a''b c"d"'e'\f`:          {"ab", "cdef"},
		`a\ b \\ \'`:              {"a b", `\`, "'"},
		`'a\b' '\'`:               {`a\b`, `\`},
		`"a\b\"\\\$\` + "`" + `"`: {`a\b"\$` + "`"},
		"a\\\nb \"c\\\nd\"":       {"ab", "cd"},
		`a#b \#c`:                 {"a#b", "#c"},
		"ä\u00a0ö \xff":           {"ä\u00a0ö", "\xff"},
	} {
		got, err := Split(text)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
		out, err := exec.CommandContext(t.Context(), "sh", "-c", `printf '%s\0' `+text).Output() // it says the same
		if said := strings.TrimSuffix(string(out), "\x00"); err != nil || said != strings.Join(want, "\x00") {
			t.Errorf("%q: sh says %q, %v", text, said, err)
		}
	}
	if got, err := Split("a\nb\n"); err != nil || !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("two lines: %q, %v", got, err)
	}
	// What has a meaning for a shell has none here.
	want := []string{"$A", "`b`", "*", "~", "a|b;", "&&", ">c", "#", "{d,e}", "X=1", "$(f)"}
	if got, err := Split("$A `b` * ~ a|b; && >c # {d,e} X=1 $(f)"); err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
	for text, want := range map[string]error{
		`a 'b`: errQuote, `a "b`: errQuote, `it's`: errQuote, `"a\"`: errQuote, `a\`: errBackslash, `a "b\`: errQuote,
		"": errNoWords, " \t\n": errNoWords, "\\\n": errNoWords,
	} {
		if got, err := Split(text); !errors.Is(err, want) {
			t.Errorf("%q: %q, %v, want %v", text, got, err, want)
		}
	}
}
