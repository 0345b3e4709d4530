package command

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// A Bar shows on one line of a terminal how far something is. The zero value shows
// nothing.
type Bar struct {
	On    *os.File // the terminal
	drawn bool
}

const barWidth = 30

// Show shows that n bytes of total are done; total is 0 if it is not known.
func (b *Bar) Show(what string, n, total int64) {
	line := fmt.Sprintf("%s  %s", what, text.Bytes(n))
	if total > 0 {
		done := min(1, float64(n)/float64(total))
		line = fmt.Sprintf("%s  %s %s of %s  %d%%", what, filled(done), text.Bytes(n), text.Bytes(total), int(done*100))
	}
	b.say(line)
}

// Count shows that n things of total are done.
func (b *Bar) Count(what string, n, total int) {
	b.say(fmt.Sprintf("%s  %s %d of %d", what, filled(min(1, float64(n)/float64(total))), n, total))
}

// filled is a bar of which a part is full.
func filled(part float64) string {
	full := int(part * barWidth)
	return "[" + strings.Repeat("=", full) + strings.Repeat(" ", barWidth-full) + "]"
}

// Image shows how far an import or a pull of an image is.
func (b *Bar) Image(p wire.ImportProgress) {
	switch p.Stage {
	case "unpack":
		b.Show(fmt.Sprintf("unpacking layer %d of %d", p.Layer, p.Layers), p.Bytes, p.Total)
	case "resolve":
		b.say("asking the registry")
	case "download":
		b.Show("downloading", p.Bytes, p.Total)
	default:
		b.Show("receiving", p.Bytes, p.Total)
	}
}

func (b *Bar) say(line string) {
	if b.On == nil {
		return
	}
	if width, _, err := term.GetSize(int(b.On.Fd())); err == nil && width > 1 {
		line = text.Clip(line, width-1)
	}
	b.drawn = true
	fmt.Fprintf(b.On, "\r\x1b[K%s", line)
}

// Clear removes the line. Call it before anything else is printed.
func (b *Bar) Clear() {
	if b.drawn {
		fmt.Fprint(b.On, "\r\x1b[K")
	}
	b.drawn = false
}
