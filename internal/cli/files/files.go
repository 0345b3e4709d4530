// Package files has the commands for the files of a sandbox: cp copies them, diff
// lists what was changed.
//
// What surprises: the names of files come from a guest. cp writes below the
// destination and nowhere else, whatever the names are.
package files

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newCp(p), newDiff(p)}
}
