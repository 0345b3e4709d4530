package egress

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"
)

// A reason says why a flow was allowed or denied: the cause is counted, the text is for
// people.
type reason struct {
	cause cause
	text  string
}

// cause is a kind of reason.
type cause uint8

const (
	byRule  cause = iota // a rule of the policy
	byMode               // no rule matched: the mode decided
	byRange              // a private range that no rule names
	byBlock              // never allowed by a policy: the host, other sandboxes, metadata services, …
	byLimit              // the sandbox has as many flows as it may
	byFault              // not a packet that can be decided on, or its sandbox is not registered yet
	causes
)

// way is what happens to a flow.
type way uint8

const (
	passed  way = iota
	refused     // at once, with an answer
	dropped     // without an answer: the guest tries again
	ways
)

// flowCounts counts new flows. Only the readers of the queues add; anybody may read.
type flowCounts [ways][causes]atomic.Uint64

func (c *flowCounts) add(w way, by cause) { c[w][by].Add(1) }

// FlowCount is the number of new flows with one verdict and one cause.
type FlowCount struct {
	Verdict string // "allow", "deny" (refused) or "drop" (not answered)
	Cause   string // "rule", "mode", "private_range", "blocked", "limit" or "fault"
	Count   uint64
}

// FlowCounts returns the counts since Open, including those that are 0.
func (e *Engine) FlowCounts() []FlowCount {
	out := make([]FlowCount, 0, int(ways)*int(causes))
	for w, verdict := range [ways]string{"allow", "deny", "drop"} {
		for by, name := range [causes]string{"rule", "mode", "private_range", "blocked", "limit", "fault"} {
			if way(w) == passed && cause(by) > byMode || way(w) == dropped && cause(by) != byFault {
				continue // this combination cannot occur
			}
			out = append(out, FlowCount{verdict, name, e.flowCounts[w][by].Load()})
		}
	}
	return out
}

// QueueCounts are packets of both queues of new flows.
type QueueCounts struct {
	Waiting    int64 // now, for a verdict
	Overflowed int64 // dropped since Open: the queue was full
	Lost       int64 // dropped since Open: the socket's buffer was full
}

// queueFile lists the queues of this network namespace: number, port id,
// waiting, copy mode, copy range, overflowed, lost, id of the last packet, 1
// (linux/net/netfilter/nfnetlink_queue.c, seq_show).
const queueFile = "/proc/net/netfilter/nfnetlink_queue"

// QueueCounts reads the counters from the kernel. They are zero if the queues are not
// bound.
func (e *Engine) QueueCounts() (QueueCounts, error) {
	b, err := os.ReadFile(queueFile)
	if errors.Is(err, fs.ErrNotExist) {
		return QueueCounts{}, nil
	}
	if err != nil {
		return QueueCounts{}, fmt.Errorf("count packets of the queues of new flows: %w", err)
	}
	return parseQueueCounts(b, e.cfg.Instance.Queue(), e.cfg.Instance.BusyQueue())
}

func parseQueueCounts(b []byte, nums ...uint16) (c QueueCounts, err error) {
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		var n uint16
		var port, mode, size int64
		var one QueueCounts
		if _, err := fmt.Sscan(sc.Text(), &n, &port, &one.Waiting, &mode, &size, &one.Overflowed, &one.Lost); err != nil {
			return QueueCounts{}, fmt.Errorf("%s: %q: %w", queueFile, sc.Text(), err)
		}
		if slices.Contains(nums, n) {
			c.Waiting += one.Waiting
			c.Overflowed += one.Overflowed
			c.Lost += one.Lost
		}
	}
	return c, sc.Err()
}

// count enters a new flow into the log of its sandbox. An empty name is not known.
func (e *Engine) count(s *sandbox, f flow, name string, allowed bool) {
	if s.log == nil { // of an Engine that Open did not make
		return
	}
	to := flowlog.Destination{Name: name, Port: f.port, Proto: f.proto}
	if name == "" {
		to.Addr = f.dst
	}
	s.log.Count(to, allowed, time.Now())
}
