package egress

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	childjudge "github.com/sandboxd/sandboxd/pkg/egress/judge"
	"github.com/sandboxd/sandboxd/pkg/egress/names"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
)

func TestMain(m *testing.M) {
	confine.MainOfTest(map[string]confine.Verb{
		heads.Verb: heads.Serve, names.ServeVerb: names.Serve, terminate.Verb: terminate.Serve(childjudge.Make),
	})
	dieAsDaemon()
	hosttest.InPrivateNetwork(m)
}
