package command

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Confirm lists on standard error what goes, with the filters that narrow it down, and asks
// whether it may. Where nobody can be asked it fails; show is the command that lists what there is.
func Confirm(show string, goes, filters []string) error {
	if !IsTerminal(os.Stdin) {
		return errs.New(errs.Invalid, "this permanently removes %s; use -f to confirm (`%s` shows what there is)",
			strings.Join(goes, ", "), show)
	}
	w := os.Stderr // standard output is for what was removed
	fmt.Fprintln(w, "WARNING! This will remove:")
	for _, line := range goes {
		fmt.Fprintln(w, "  - "+line)
	}
	if len(filters) > 0 {
		fmt.Fprintf(w, "\n  Items to be removed will be filtered with:\n  - %s\n", text.Printable(strings.Join(filters, "\n  - ")))
	}
	fmt.Fprint(w, "\nAre you sure you want to continue? [y/N] ")
	line, _ := bufio.NewReader(os.Stdin).ReadString('\n') // without an answer it is no
	switch strings.ToLower(strings.TrimSpace(line)) {
	case "y", "yes":
		return nil
	}
	return errs.New(errs.Invalid, "nothing was removed")
}
