// Package code has eval, which runs code in an interpreter of a sandbox, and the
// commands that make, list and remove interpreters (contexts).
//
// What surprises: an interpreter remembers. Without --context code runs in the one
// that the sandbox keeps for the language.
package code

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newEval(p), newCode(p)}
}

// languageFlag adds --language.
func languageFlag(cmd *cobra.Command, to *string, value, usage string) {
	cmd.Flags().StringVarP(to, "language", "l", value, usage)
	command.Choices(cmd, "language", agent.CodeLanguages...)
}
