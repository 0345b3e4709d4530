package shell

import "testing"

func TestWords(t *testing.T) {
	for line, want := range map[string]bool{
		"true": true, "ls -la /tmp": true, "  python3   x.py --a=b ": true, "dd if=a of=b": true, "./run": true, "echo a b": true,
		"/bin/echo -n": true, "a.b_c-d:e,f+g@h %i": true,
		"": false, "   ": false, "a b\n": false, "a\tb": false, "ls *": false, "ls ?": false, "ls [a]": false, "echo $A": false,
		"echo ~": false, "echo 'a'": false, `echo "a"`: false, `a\ b`: false,
		"a|b": false, "a;b": false, "a&": false, "a>b": false, "a<b": false, "(a)": false, "{a,b}": false, "a#b": false, "!a": false,
		"`a`": false, "a^b": false, "ä": false, "a\x00": false,
		"A=b": false, "A=b c": false, "%1": false, "echo -n a": false, "cd /": false, ". x": false, ": x": false, "test a": false,
		"kill 1": false, "pwd": false, "exec ls": false, "if": false, "time ls": false,
		"coproc ls": false, "printf a": false, "export A": false, "local": false, "wait": false, "source x": false, "function f": false,
		"then": false, "ulimit": false,
	} {
		if _, ok := words(line); ok != want {
			t.Errorf("%q: %v", line, ok)
		}
	}
}
