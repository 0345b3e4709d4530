package snapshot

import "os"

// users opens the user namespaces by which overlays and volumes are idmapped.
type users struct {
	sandbox  func(id string) (*os.File, error) // of a sandbox that has its own
	identity *os.File                          // for all others: maps 0..65535 to itself
}

// open returns the user namespace of a sandbox, which has its own or not. The caller
// calls done after its last use.
func (u users) open(id string, own bool) (ns *os.File, done func(), err error) {
	if !own {
		return u.identity, func() {}, nil
	}
	if ns, err = u.sandbox(id); err != nil {
		return nil, nil, err
	}
	return ns, func() { ns.Close() }, nil
}
