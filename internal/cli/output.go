package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// output is how a command prints: -o json, table or name.
type output struct {
	format  string
	quiet   bool
	noTrunc bool
	lines   bool // more than one answer comes: as JSON each is a line
}

func (o *output) flags(cmd *cobra.Command, quiet bool) {
	cmd.Flags().StringVarP(&o.format, "output", "o", "table", "output format: table, json or name")
	if quiet {
		cmd.Flags().BoolVarP(&o.quiet, "quiet", "q", false, "print names only, as -o name")
	}
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json", "name"}, cobra.ShellCompDirectiveNoFileComp))
}

func (o *output) check() error {
	switch o.format {
	case "json", "table", "name":
	default:
		return errs.New(errs.Invalid, "--output %q: want table, json or name", o.format)
	}
	if o.quiet {
		o.format = "name"
	}
	return nil
}

// printJSON prints v as the API sent it, and in several lines.
func printJSON(w io.Writer, v any) error { return writeJSON(w, v, "  ") }

// writeJSON writes v and a new line. encoding/json escapes control characters of
// ASCII but DEL; what else could steer a terminal is escaped here.
func writeJSON(w io.Writer, v any, indent string) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return errs.Wrap(err, errs.Internal, "the answer can not be printed as JSON")
	}
	_, err := w.Write(unsteered(b.Bytes()))
	return err
}

// unsteered escapes in JSON what is not for print; that is in strings only.
func unsteered(b []byte) []byte {
	fit := func(r rune) bool { return r < 0x7f || r != utf8.RuneError && unicode.IsPrint(r) }
	if bytes.IndexFunc(b, func(r rune) bool { return !fit(r) }) < 0 {
		return b
	}
	out := make([]byte, 0, len(b)+64)
	for _, r := range string(b) {
		switch {
		case fit(r):
			out = utf8.AppendRune(out, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default: // a byte that is no UTF-8, too
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}

// table prints rows below a header, columns aligned. Cells are escaped: some
// hold what a guest or another client chose.
func table(w io.Writer, header []string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(tw, strings.Join(header, "\t"))
	for _, r := range rows {
		for i, cell := range r {
			if i > 0 {
				fmt.Fprint(tw, "\t")
			}
			fmt.Fprint(tw, printable(cell, false))
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

// printable escapes what would steer a terminal: control characters, ESC among
// them, and direction overrides. Lines are kept if lines is set.
func printable(s string, lines bool) string {
	s = strings.ToValidUTF8(s, "\ufffd") // some terminals take a lone 0x9b for ESC [
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		switch {
		case unicode.IsPrint(r), lines && r == '\n':
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r < 0x80:
			fmt.Fprintf(&b, `\x%02x`, r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

func clip(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

// bytesOf prints a size as docker does, in powers of 1024.
func bytesOf(n int64) string { return units.BytesSize(float64(n)) }

// ago prints how long ago t was.
func ago(t time.Time) string {
	d := time.Since(t)
	if d < time.Second {
		return "just now"
	}
	return units.HumanDuration(d) + " ago"
}

// until prints how long it is to t.
func until(t *time.Time) string {
	if t == nil {
		return "never"
	}
	d := time.Until(*t)
	if d <= 0 {
		return "now"
	}
	return "in " + units.HumanDuration(d)
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }
