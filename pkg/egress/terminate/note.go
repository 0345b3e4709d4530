package terminate

import (
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

// noteBurst is how many notes are sent at once.
const noteBurst = 16

// Notes lets noteBurst notes pass at once, and then one each second: a guest can make as many
// as it likes. The zero value is ready for use, and its methods may be called concurrently.
type Notes struct {
	mu   sync.Mutex
	left int
	last time.Time // when left was counted
}

func (n *Notes) tell(line *child.Conn, note Note) {
	if n.May(time.Now()) {
		note.Text = plain(note.Text, maxNote)
		line.Tell(KindNote, note.Append(nil), nil) //nolint:errcheck // fails if the daemon is gone
	}
}

// May reports whether one more may pass at a time, which is not before that of another call.
func (n *Notes) May(now time.Time) bool {
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
