package sbom

import (
	"bytes"
	"fmt"
	"strings"
)

// paragraph is one paragraph of a file in the form of deb822(5): fields by their name in lower
// case. The lines of a value are separated by "\n", with the white space around each removed.
type paragraph map[string]string

// deb822 calls each with the paragraphs of a file. why is not "" if the paragraph is not what
// deb822(5) has; then its fields are those before the mistake. line is where it begins.
func deb822(b []byte, each func(line int, p paragraph, why string)) {
	var p paragraph
	var last, why string
	begin := 0
	end := func() {
		if p != nil {
			each(begin, p, why)
		}
		p, last, why = nil, "", ""
	}
	n := 0
	for raw := range bytes.Lines(b) {
		n++
		line := string(bytes.TrimRight(raw, "\r\n"))
		text := strings.Trim(line, " \t")
		if text == "" {
			end()
			continue
		}
		if line[0] == '#' {
			continue
		}
		if p == nil {
			p, begin = paragraph{}, n
		}
		name, value, ok := strings.Cut(line, ":")
		switch {
		case why != "":
		case line[0] == ' ' || line[0] == '\t':
			if last == "" {
				why = fmt.Sprintf("line %d continues no field", n)
				break
			}
			p[last] = more(p[last], "\n", text)
		case !ok || !isFieldName(name):
			why = fmt.Sprintf("line %d is no field", n)
		default:
			last = strings.ToLower(name)
			if _, twice := p[last]; twice {
				why = fmt.Sprintf("line %d has the field %.40s again", n, name)
				break
			}
			p[last] = strings.Trim(value, " \t")
		}
	}
	end()
}

// maxValue bounds a value of more than one line, in bytes; what follows is left out. Nothing that is
// read has more lines, and an image may have millions.
const maxValue = 1 << 10

// more is a value with one more line.
func more(value, between, text string) string {
	if len(value) > maxValue {
		return value
	}
	return value + between + text
}

// isFieldName reports whether s is the name of a field: printable ASCII without spaces.
func isFieldName(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return s != ""
}

// firstLine is the first line of a value.
func firstLine(value string) string {
	line, _, _ := strings.Cut(value, "\n")
	return line
}
