// Package code has eval, which runs code in an interpreter of a sandbox, and the
// commands that look after interpreters.
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
