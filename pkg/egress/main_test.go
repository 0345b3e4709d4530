package egress

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/names"
)

func TestMain(m *testing.M) {
	confine.MainOfTest(map[string]confine.Verb{heads.Verb: heads.Serve, names.ServeVerb: names.Serve})
	dieAsDaemon()
	hosttest.InPrivateNetwork(m)
}
