package documents

import (
	"fmt"
	"regexp"
	"strings"
)

// shapes match what differs from run to run. It is replaced, in this order, in the document
// and in the printed output before the two are compared. Everything else must be equal.
var shapes = []struct{ is, as string }{
	{`\bsnap-[a-z2-7]{12}\b`, "<snapshot>"},
	{`\bsbxph_[A-Z2-7]{26}\b`, "<placeholder>"},
	{`\b[0-9a-f]{12}\b`, "<terminal>"},
	{`\b[a-z2-7]{12}\b`, "<sandbox>"},
	{`\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`, "<time>"},
	{`\b(just now|\d+ (second|minute)s? ago|in \d+ (seconds|minutes|hours))\b`, "<age>"},
	{`\b[\d.]+% +[\d.]+(B|[KMG]iB)`, "<percent>  <size>"}, // in use, of what stats shows: limits stay
	{`\b[\d.]+(B|[KMG]iB) /`, "<size> /"},
	{`/ [\d.]+(B|KiB)`, "/ <size>"},
	{`(\b\d+|-) / 256\b`, "<processes> / 256"},
	{` {2,}`, "  "}, // the width of columns depends on their content
}

var compiled = func() (all []*regexp.Regexp) {
	for _, s := range shapes {
		all = append(all, regexp.MustCompile(s.is))
	}
	return all
}()

// shape is a line with the parts that differ from run to run replaced.
func shape(line string) string {
	for i, re := range compiled {
		line = re.ReplaceAllString(line, shapes[i].as)
	}
	return strings.TrimRight(line, " ")
}

// differ compares what a document shows with what was printed, line by line, and returns
// the first difference; "" if there is none.
func differ(shown, printed []string) string {
	for i := range max(len(shown), len(printed)) {
		switch {
		case i >= len(printed):
			return fmt.Sprintf("shows %q, and nothing more was printed", shown[i])
		case i >= len(shown):
			return fmt.Sprintf("shows nothing where %q was printed", printed[i])
		case shape(shown[i]) != shape(printed[i]):
			return fmt.Sprintf("shows   %q\nprinted %q\ncompared as %q\nand         %q", shown[i], printed[i], shape(shown[i]),
				shape(printed[i]))
		}
	}
	return ""
}
