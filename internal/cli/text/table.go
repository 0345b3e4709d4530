package text

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// A Grid is a table for people: rows below a header, columns aligned. Its cells are escaped.
type Grid struct {
	Header []string
	Rows   [][]string
	Width  int      // of the terminal; 0: as wide as it gets
	Drop   []string // columns that are left out, one after the other, until the rest fits
	// Colour returns the colour of a cell, a parameter of SGR (ECMA-48, 8.3.117); nil, or "": none.
	Colour func(row int, column string) string
}

const gap = 3 // between columns

// Table prints rows below a header.
func Table(w io.Writer, header []string, rows [][]string) error {
	return Grid{Header: header, Rows: rows}.Write(w)
}

// Write prints the table.
func (g Grid) Write(w io.Writer) error {
	lines := [][]string{g.Header}
	for _, row := range g.Rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = Printable(cell)
		}
		lines = append(lines, cells)
	}
	widths := make([]int, len(g.Header))
	for _, cells := range lines {
		for i, cell := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	shown := g.fit(widths)
	var b bytes.Buffer
	for n, cells := range lines {
		for k, i := range shown {
			cell, colour := cells[i], ""
			if n > 0 && g.Colour != nil {
				colour = g.Colour(n-1, g.Header[i])
			}
			if colour != "" {
				cell = "\x1b[" + colour + "m" + cell + "\x1b[0m"
			}
			b.WriteString(cell)
			if k < len(shown)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cells[i])+gap))
			}
		}
		b.WriteByte('\n')
	}
	_, err := w.Write(b.Bytes())
	return err
}

// fit returns the columns that are shown.
func (g Grid) fit(widths []int) []int {
	all := -gap
	var shown []int
	for i, w := range widths {
		all += w + gap
		shown = append(shown, i)
	}
	for _, column := range g.Drop {
		if g.Width == 0 || all <= g.Width {
			break
		}
		i := slices.Index(g.Header, column)
		all -= widths[i] + gap
		shown = slices.DeleteFunc(shown, func(s int) bool { return s == i })
	}
	return shown
}
