package terminate

import (
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

// noteBurst is how many notes are sent at once.
const noteBurst = 16

// notes sends as many notes as a Note says: a guest can make as many as it likes.
type notes struct {
	mu   sync.Mutex
	left int
	last time.Time // when left was counted
}

func (n *notes) tell(line *child.Conn, note Note) {
	if n.may(time.Now()) {
		note.Text = plain(note.Text, maxNote)
		line.Tell(KindNote, note.Append(nil), nil) //nolint:errcheck // fails if the daemon is gone
	}
}

func (n *notes) may(now time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.last.IsZero() {
		n.left, n.last = noteBurst, now
	}
	if more := int(now.Sub(n.last) / time.Second); more > 0 {
		n.left = min(n.left+more, noteBurst)
		n.last = n.last.Add(time.Duration(more) * time.Second)
	}
	if n.left == 0 {
		return false
	}
	n.left--
	return true
}
