// Package network has the commands for what a sandbox may reach (egress, policy), what it
// has reached (network) and how it is reached (endpoint, port).
//
// What surprises: rules are split into their parts here and checked by the daemon,
// whose errors say what is wrong with them.
package network

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newEgress(p), newPolicy(p), newEndpoint(p), newNetwork(p), newPort(p)}
}
