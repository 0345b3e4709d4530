package netns

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

func TestMain(m *testing.M) { hosttest.InPrivateNetwork(m) }
