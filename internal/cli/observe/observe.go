// Package observe has the commands that watch sandboxes: events, stats and top
// print until they are stopped, diagnostics says what is wrong with one sandbox.
//
// What surprises: a CPU percentage needs two measurements, so stats and top measure
// once before they print.
package observe

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newEvents(p), newStats(p), newTop(p), newDiagnostics(p)}
}
