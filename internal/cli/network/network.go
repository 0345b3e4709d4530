// Package network has the commands for what a sandbox may reach (egress) and how
// it is reached (endpoint, port).
package network

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newEgress(p), newEndpoint(p), newPort(p)}
}
