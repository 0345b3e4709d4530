package daemon

import (
	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/judge"
	"github.com/sandboxd/sandboxd/pkg/egress/names"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
)

// Confined returns the tasks for which this program starts itself again without
// privileges, to read untrusted bytes.
func Confined() map[string]confine.Verb {
	verbs := archive.Verbs()
	verbs[layer.UnpackVerb] = layer.Unpack
	verbs[heads.Verb] = heads.Serve
	verbs[names.ServeVerb] = names.Serve
	verbs[terminate.Verb] = terminate.Serve(judge.Make)
	return verbs
}
