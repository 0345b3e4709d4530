// Package runsc pins the one build of gVisor's runsc that sandboxd ships.
//
// It is a module of its own, so that gVisor's dependencies never move
// sandboxd's. `make build` compiles gvisor.dev/gvisor/runsc at this pin.
package runsc

import _ "gvisor.dev/gvisor/runsc/cli/maincli" // the pin
