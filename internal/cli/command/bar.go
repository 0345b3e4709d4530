package command

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/text"
)

// A Bar shows on one line of a terminal how far something is.
type Bar struct{ W *os.File }

const barWidth = 30

// Show shows that n bytes of total are done; total is 0 if it is not known.
func (b Bar) Show(what string, n, total int64) {
	line := fmt.Sprintf("%s  %s", what, text.Bytes(n))
	if total > 0 {
		done := min(1, float64(n)/float64(total))
		full := int(done * barWidth)
		line = fmt.Sprintf("%s  [%s%s] %s of %s  %d%%",
			what, strings.Repeat("=", full), strings.Repeat(" ", barWidth-full), text.Bytes(n), text.Bytes(total), int(done*100))
	}
	b.Say(line)
}

// Say shows a line without a bar.
func (b Bar) Say(line string) {
	if width, _, err := term.GetSize(int(b.W.Fd())); err == nil && width > 1 {
		line = text.Clip(line, width-1)
	}
	fmt.Fprintf(b.W, "\r\x1b[K%s", line)
}

// Clear removes the line.
func (b Bar) Clear() { fmt.Fprint(b.W, "\r\x1b[K") }
