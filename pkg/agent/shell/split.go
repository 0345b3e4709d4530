package shell

import (
	"errors"
	"strings"
)

// The errors of Split.
var (
	errQuote     = errors.New("a quote in it is not closed")
	errBackslash = errors.New("it ends with a backslash, which quotes nothing")
	errNoWords   = errors.New("there is no word in it")
)

// Split splits text into words as a shell does (POSIX.1-2024, Shell Command Language,
// 2.2), without its operators, comments and expansions: spaces, tabs and newlines
// separate words, and quotes and backslashes keep them together. Everything else stands
// for itself. There is at least one word.
func Split(text string) (all []string, err error) {
	var word strings.Builder
	in := false // a word, which quotes make even if it is empty
	for i := 0; i < len(text); i++ {
		switch c := text[i]; c {
		case ' ', '\t', '\n':
			if in {
				all = append(all, word.String())
			}
			in = false
			word.Reset()
		case '\\':
			if i++; i == len(text) {
				return nil, errBackslash
			}
			if text[i] != '\n' { // else it joins two lines
				in = true
				word.WriteByte(text[i])
			}
		case '\'', '"':
			n, ok := quoted(&word, text[i:])
			if !ok {
				return nil, errQuote
			}
			in, i = true, i+n-1
		default:
			in = true
			word.WriteByte(c)
		}
	}
	if in {
		all = append(all, word.String())
	}
	if len(all) == 0 {
		return nil, errNoWords
	}
	return all, nil
}

// quoted appends what text quotes at its beginning to word, and returns the length of
// that with its quotes. It reports false if the quote is not closed.
func quoted(word *strings.Builder, text string) (n int, ok bool) {
	quote := text[0]
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == quote:
			return i + 1, true
		case c == '\\' && quote == '"' && i+1 < len(text) && strings.IndexByte("$`\"\\\n", text[i+1]) >= 0:
			if i++; text[i] != '\n' {
				word.WriteByte(text[i])
			}
		default:
			word.WriteByte(c)
		}
	}
	return 0, false
}
