package cli

import (
	"io"
	"testing"

	"github.com/sandboxd/sandboxd/internal/cli/group"
	"github.com/sandboxd/sandboxd/internal/manual"
)

// TestManual checks what commands say of themselves and makes their man pages.
func TestManual(t *testing.T) { manual.Test(t, newRoot("unknown"), "1") }

// TestGroups holds that no command with subcommands takes an unknown one for help.
func TestGroups(t *testing.T) {
	manual.Groups(t, newRoot("unknown"), func(args []string) error {
		root := newRoot("unknown")
		root.SetOut(io.Discard)
		root.SetArgs(args)
		group.Strict(root)
		return root.Execute()
	})
}
