package shell

import (
	"bytes"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"
)

// FuzzSplit: what was quoted is one word again, and plain words are what spaces separate.
func FuzzSplit(f *testing.F) {
	f.Add("tail -f /dev/null", "it's \\ \"here\"")
	f.Add("a\\\nb \"c\\\nd\"", "")
	f.Add(`'a`, "\x00\xff\n")
	f.Fuzz(func(t *testing.T, text, word string) {
		all, err := Split(text)
		if err == nil {
			var again []string
			for _, w := range all {
				again = append(again, Quote(w))
			}
			if back, err := Split(strings.Join(again, " ")); err != nil || !slices.Equal(back, all) {
				t.Fatalf("%q is %q, which comes back as %q, %v", text, all, back, err)
			}
			if n := len(strings.Join(all, "")); n > len(text) {
				t.Fatalf("%q has words of %d bytes", text, n)
			}
		}
		if plain, ok := words(text); ok && (err != nil || !slices.Equal(plain, all) || !slices.Equal(plain, strings.Fields(text))) {
			t.Fatalf("%q is %q to the agent, %q to a shell", text, plain, all)
		}
		if got, err := Split(Quote(word) + " " + Quote(word)); err != nil || !slices.Equal(got, []string{word, word}) {
			t.Fatalf("%q is quoted as %s, which is %q", word, Quote(word), got)
		}
	})
}

// FuzzLine: the line that a shell gets has the same words for every command, directory
// and state, but for these themselves: none of them ends its quotes.
func FuzzLine(f *testing.F) {
	f.Add("echo 'x", "/a'b", "'; reboot; '", true)
	f.Add("cat <<E\nx\n", "", "\\", false)
	f.Add("'\n\n'", "\n", "declare -x A=$'\\n'\n", false)
	const word = "w0rd"
	f.Fuzz(func(t *testing.T, command, dir, state string, trace bool) {
		if strings.ContainsRune(command+dir+state, 0) {
			return // refused before, and no shell has one
		}
		for _, d := range []dialect{bash, posix} {
			lines := func(command, dir, state string) (all []string) {
				r := runLine{word: word, command: command, marker: 1024, cwd: dir, back: dir, older: state, trace: trace}
				for _, l := range [][]byte{d.line(r), d.greeting(word, []byte(state), dir)} {
					w, err := Split(string(l))
					if err != nil || !bytes.HasSuffix(l, []byte("\n")) {
						t.Fatalf("%q: %v", l, err)
					}
					all = append(all, w...)
				}
				return all
			}
			same := func(s string) string { // it changes the words as a whole, or not at all
				if s == "" {
					return ""
				}
				return "?"
			}
			got, want := lines(command, dir, state), lines(same(command), same(dir), same(state))
			if len(got) != len(want) {
				t.Fatalf("%q, %q and %q make %d words, want %d: %q", command, dir, state, len(got), len(want), got)
			}
			sent := command
			if trace {
				sent = d.own + "set -x\n" + command
			}
			if !slices.Contains(got, sent) || dir != "" && !slices.Contains(got, dir) || !slices.Contains(got, state) {
				t.Fatalf("%q, %q or %q is not among the words %q", sent, dir, state, got)
			}
			for i := range got { // the report has the directories quoted once more
				if got[i] == want[i] || got[i] == sent || got[i] == dir || got[i] == state {
					continue
				}
				if a, err := Split(got[i]); err != nil || !slices.Contains(a, word) {
					t.Fatalf("word %d is %q, want %q", i, got[i], want[i])
				}
			}
		}
	})
}

// FuzzAnswer: an answer is found as the shell has written it, in whatever pieces it
// comes and whatever comes before it, and no more is kept of the rest than the bound.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte("noise"), uint8(3), "/tmp", "/", "declare -x A='1'\n", uint16(5))
	f.Add([]byte("w0rd"), uint8(255), "/a\nb", "", "", uint16(1))
	f.Add([]byte("w0rd 1 x\n"), uint8(0), "", "", "\n", uint16(0))
	const word = "w0rd"
	f.Fuzz(func(t *testing.T, before []byte, code uint8, dir, older, state string, cut uint16) {
		if strings.Contains(string(before)+dir+older+state, word) {
			return // it is random
		}
		text := fmt.Sprintf("%s%s %d ehB\n%[2]s\n%[4]s\n%[2]s\n%[5]s\n%[2]s\n%[6]s%[2]s.\n", before, word, code, dir, older, state)
		for _, step := range []int{len(text), int(cut) + 1} {
			var c scanner
			var a answer
			found := false
			for rest := []byte(text); len(rest) > 0 && !found; {
				n := min(step, len(rest))
				a, found = c.scan(rest[:n], "another", word)
				if rest = rest[n:]; found != (len(rest) == 0) {
					t.Fatalf("%q is found %d bytes before its end: %v", text, len(rest), found)
				}
			}
			if a.word != word || a.code != int(code) || a.trace || a.dir != dir || a.older != older || string(a.state) != state {
				t.Fatalf("%q is read as %+v", text, a)
			}
		}
		var c scanner
		for range 2 + maxState/(1+len(before)) {
			if c.scan(before, word); len(c.buf) > maxState+128<<10+len(before) {
				t.Fatalf("%d bytes are kept", len(c.buf))
			}
			if len(before) < 64<<10 {
				break // it would take long
			}
		}
	})
}

// FuzzNotices: what PID 1 parses takes a bounded stack; where it adds the word exec, this
// is one more word of one command and changes no other.
func FuzzNotices(f *testing.F) {
	for _, list := range commands(f) {
		for _, c := range list {
			f.Add(c)
		}
	}
	f.Fuzz(func(t *testing.T, c string) {
		defer debug.SetMaxStack(debug.SetMaxStack(64 << 20)) // beyond it the process dies, whatever is recovered
		fit := notices(c)
		if fit == nil || fit.at < 0 {
			return
		}
		if !strings.HasPrefix(c[fit.at:], fit.name) {
			t.Fatalf("%q is not at %d of %q", fit.name, fit.at, c)
		}
		was, is := calls(t, c), calls(t, c[:fit.at]+"_="+quoteLine("/bin/it's\n")+" exec "+c[fit.at:])
		changed := 0
		for i := range was {
			if len(is) != len(was) {
				t.Fatalf("%q has the commands %q, then %q", c, was, is)
			}
			if is[i] != was[i] {
				if changed++; !strings.HasSuffix(is[i], "exec "+was[i]) || changed > 1 {
					t.Fatalf("in %q the command %q becomes %q", c, was[i], is[i])
				}
			}
		}
		if changed != 1 {
			t.Fatalf("%q has no command %q", c, fit.name)
		}
	})
}

// calls are the arguments of all simple commands of a text.
func calls(t *testing.T, text string) (all []string) {
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(text), "")
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	syntax.Walk(file, func(n syntax.Node) bool {
		if c, ok := n.(*syntax.CallExpr); ok && len(c.Args) > 0 {
			all = append(all, text[c.Args[0].Pos().Offset():c.Args[len(c.Args)-1].End().Offset()])
		}
		return true
	})
	return all
}

// FuzzExports: the export that a shell gets sets the variables that differ, to their
// values as another parser reads them.
func FuzzExports(f *testing.F) {
	f.Add("A", "it's\n$x `y` \\", "B", "")
	f.Add("LD_PRELOAD", "x", "PATH", "/bin")
	f.Add("A=B", "x", "1", "\x07")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2 string) {
		base, env := map[string]string{"PATH": "/bin", "SAME": "1"}, map[string]string{"PATH": "/bin", "SAME": "1"}
		env[k1], env[k2] = v1, v2
		words, ok := exports(base, env)
		if !ok || !utf8.ValidString(words) {
			return
		}
		file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader("export"+words), "")
		if err != nil || len(file.Stmts) != 1 || strings.Contains(words, "\n") {
			t.Fatalf("export%s: %v", words, err)
		}
		d, ok := file.Stmts[0].Cmd.(*syntax.DeclClause)
		if !ok {
			t.Fatalf("export%s is no export", words)
		}
		for _, a := range d.Args {
			value := ""
			if a.Value != nil {
				fields, err := expand.Fields(&expand.Config{}, a.Value)
				if err != nil || len(fields) != 1 {
					t.Fatalf("export%s: %q, %v", words, fields, err)
				}
				value = fields[0]
			}
			if a.Name == nil || env[a.Name.Value] != value {
				t.Fatalf("export%s sets %+v to %q", words, a.Name, value)
			}
			base[a.Name.Value] = value
		}
		for k, v := range env {
			if base[k] != v {
				t.Fatalf("export%s makes %s %q, want %q", words, k, base[k], v)
			}
		}
	})
}
