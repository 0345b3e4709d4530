package egress

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
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
type flowCounts [ways][policy.Causes]atomic.Uint64

func (c *flowCounts) add(w way, by policy.Cause) { c[w][by].Add(1) }

// FlowCount is the number of new flows with one verdict and one cause.
type FlowCount struct {
	Verdict string // "allow", "deny" (refused) or "drop" (not answered)
	Cause   string // "rule", "mode", "private_range", "blocked", "name", "limit" or "fault"
	Count   uint64
}

// FlowCounts returns the counts since Open, including those that are 0.
func (e *Engine) FlowCounts() []FlowCount {
	out := make([]FlowCount, 0, int(ways)*int(policy.Causes))
	for w, verdict := range [ways]string{"allow", "deny", "drop"} {
		for by, name := range [policy.Causes]string{"rule", "mode", "private_range", "blocked", "name", "limit", "fault"} {
			if way(w) == passed && policy.Cause(by) > policy.ByMode || way(w) == dropped && policy.Cause(by) != policy.ByFault {
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

// NameCounts are queries for which name servers were asked, since Open.
type NameCounts struct{ Answered, Unanswered int64 }

// CountNames returns how many queries of e name servers have answered.
func CountNames(e *Engine) NameCounts {
	return NameCounts{e.dns.servers.answered.Load(), e.dns.servers.unanswered.Load()}
}

// Name servers are silent when so many queries in a row got no answer, over so long a time: a name
// whose own servers are gone is asked for again and again, too, but other names are answered meanwhile.
const (
	silentQueries = 5
	silentTime    = 5 * time.Second
)

// servers knows whether name servers answer. Whoever handles the messages of the child alone calls heard.
type servers struct {
	answered, unanswered atomic.Int64

	row    int // queries without an answer since the last one
	since  time.Time
	silent bool
}

// heard counts a query that had an answer, or none. The log says when name servers become silent, and
// when they answer again.
func (s *servers) heard(answer bool, now time.Time, log *slog.Logger) {
	switch {
	case answer && s.silent:
		log.Info("name servers answer again", "silent", now.Sub(s.since))
		fallthrough
	case answer:
		s.answered.Add(1)
		s.row, s.silent = 0, false
		return
	}
	s.unanswered.Add(1)
	if s.row++; s.row == 1 {
		s.since = now
	}
	if !s.silent && s.row >= silentQueries && now.Sub(s.since) >= silentTime {
		s.silent = true
		log.Warn("no name server answers: sandboxes resolve only names that are cached; check network.upstreams, or "+resolvConf,
			"unanswered", s.row, "for", now.Sub(s.since))
	}
}

// count enters a flow into the log of its sandbox. If name is empty, it is that which the
// sandbox knows the address by. If it knows it by several, nobody can say which is meant.
func (e *Engine) count(s *sandbox, f policy.Flow, name string, allowed bool) {
	if s.log == nil { // of an Engine that Open did not make
		return
	}
	if name == "" {
		if names := s.leased(f.Dst); len(names) == 1 {
			name = names[0]
		}
	}
	to := flowlog.Destination{Name: name, Port: f.Port, Proto: f.Proto}
	if name == "" {
		to.Addr = f.Dst
	}
	s.log.Count(to, allowed, time.Now())
}
