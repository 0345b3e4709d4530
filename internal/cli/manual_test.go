package cli

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/manual"
)

// TestManual checks what commands say of themselves and makes their man pages.
func TestManual(t *testing.T) { manual.Test(t, newRoot("unknown"), "1") }
