package command

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// A Bar shows how far an import or a pull of an image is, on one line of a terminal. The
// zero value shows nothing.
type Bar struct {
	On    *os.File // the terminal
	drawn bool
}

const barWidth = 30

// Show draws p over what was drawn before.
func (b *Bar) Show(p wire.ImportProgress) {
	if b.On == nil {
		return
	}
	line := barLine(p)
	if width, _, err := term.GetSize(int(b.On.Fd())); err == nil && width > 1 {
		line = text.Clip(line, width-1)
	}
	b.drawn = true
	fmt.Fprintf(b.On, "\r\x1b[K%s", line)
}

func barLine(p wire.ImportProgress) string {
	what := "receiving"
	switch p.Stage {
	case "resolve":
		return "asking the registry"
	case "unpack":
		what = fmt.Sprintf("unpacking layer %d of %d", p.Layer, p.Layers)
	case "download":
		what = "downloading"
	}
	if p.Total <= 0 {
		return fmt.Sprintf("%s  %s", what, text.Bytes(p.Bytes))
	}
	done := min(1, float64(p.Bytes)/float64(p.Total))
	full := int(done * barWidth)
	return fmt.Sprintf("%s  [%s%s] %s of %s  %d%%",
		what, strings.Repeat("=", full), strings.Repeat(" ", barWidth-full), text.Bytes(p.Bytes), text.Bytes(p.Total), int(done*100))
}

// Clear removes the line. Call it before anything else is printed.
func (b *Bar) Clear() {
	if b.drawn {
		fmt.Fprint(b.On, "\r\x1b[K")
	}
	b.drawn = false
}
