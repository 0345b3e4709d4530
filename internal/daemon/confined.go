package daemon

import (
	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
)

// Confined is what this program does when it starts itself again without
// privileges, to read bytes that nobody vouches for.
func Confined() map[string]confine.Verb {
	verbs := archive.Verbs()
	verbs[layer.UnpackVerb] = layer.Unpack
	return verbs
}
