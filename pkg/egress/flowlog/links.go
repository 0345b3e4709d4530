package flowlog

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/dump"
)

const (
	// saveEvery is how often new connections are written: what a killed daemon loses.
	saveEvery = 10 * time.Second
	// syncEvery is how often all is written so that it survives a power cut. Every log is
	// a file, and to sync one takes some milliseconds.
	syncEvery = 5 * time.Minute
	// saveShare bounds what writing may cost: a round that took 1 s is followed by a
	// pause of saveShare seconds.
	saveShare = 10
)

// A Recorder is a Book that reads the counters of the sandboxes' links.
type Recorder struct {
	*Book
	prefix string // of the names of links, before the ID
}

// NewRecorder opens a Book for sandboxes whose links are called prefix and ID.
func NewRecorder(dir, prefix string, log *slog.Logger) (*Recorder, error) {
	b, err := OpenBook(dir, log)
	return &Recorder{b, prefix}, err
}

// Report is what is known of a sandbox up to now, also after its end. If there is no log,
// it is empty.
func (r *Recorder) Report(id string) Report {
	r.sample(id)
	return r.Book.Report(id)
}

// End is called before the link of a sandbox goes. The log takes the last of the link's
// counters, and leaves memory after the next Save.
func (r *Recorder) End(id string) {
	r.Open(id)
	r.sample(id)
	r.Close(id)
}

// Save is Book.Save, with the present counters of the links.
func (r *Recorder) Save(sync bool) error { return errors.Join(r.sampleAll(), r.Book.Save(sync)) }

// Leave is Book.Leave, with the present counters of the links.
func (r *Recorder) Leave() error { return errors.Join(r.sampleAll(), r.Book.Leave()) }

// Keep saves the logs until ctx ends.
func (r *Recorder) Keep(ctx context.Context) {
	next := time.NewTimer(saveEvery)
	defer next.Stop()
	fault, synced := "", time.Now()
	for {
		select {
		case <-next.C:
		case <-ctx.Done():
			return
		}
		start := time.Now()
		sync := start.Sub(synced) >= syncEvery
		if sync {
			synced = start
		}
		switch err := r.Save(sync); {
		case err == nil:
			fault = ""
		case err.Error() != fault: // each new fault is logged once
			fault = err.Error()
			r.log.Error("cannot keep the flow logs of sandboxes: what they counted is lost when this daemon ends, unless a later write "+
				"succeeds; sandboxd tries again every ten seconds", "err", err)
		}
		next.Reset(max(saveEvery, saveShare*time.Since(start)))
	}
}

// sample reads the counters of a sandbox's link, if it has one.
func (r *Recorder) sample(id string) {
	err := eachLink(r.prefix+id, func(_ string, index int, t Traffic) { r.Sample(id, index, t) })
	if err != nil && !errors.Is(err, unix.ENODEV) {
		r.log.Warn("cannot read the counters of a link; the flow log has those of the last time", "sandbox", id, "err", err)
	}
}

func (r *Recorder) sampleAll() error {
	_, err := dump.Again(func() (struct{}, error) {
		return struct{}{}, eachLink("", func(link string, index int, t Traffic) {
			if id, ok := strings.CutPrefix(link, r.prefix); ok {
				r.Sample(id, index, t)
			}
		})
	})
	return err
}

// eachLink calls f for the link called name, or with an empty name for all. It has a
// socket of its own, so that nobody waits for a list of 1,000 links.
func eachLink(name string, f func(link string, index int, t Traffic)) error {
	flags := 0
	if name == "" {
		flags = unix.NLM_F_DUMP
	}
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, flags)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	if name != "" {
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	}
	var failed error
	err := req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWLINK, func(msg []byte) bool {
		info := nl.DeserializeIfInfomsg(msg)
		attrs, err := nl.ParseRouteAttr(msg[info.Len():])
		if err != nil {
			failed = err
			return false
		}
		link, stats := "", []byte(nil)
		for _, a := range attrs {
			switch a.Attr.Type {
			case unix.IFLA_IFNAME:
				link = strings.TrimRight(string(a.Value), "\x00")
			case unix.IFLA_STATS64:
				stats = a.Value
			}
		}
		if len(stats) >= 32 {
			f(link, int(info.Index), trafficOf(stats))
		}
		return true
	})
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("read the counters of links: %w", err)
	}
	return nil
}

// trafficOf reads struct rtnl_link_stats64 (linux/if_link.h), which begins with packets
// and bytes, received and sent. What the host's end of a link receives, the sandbox sent.
func trafficOf(stats []byte) Traffic {
	n := func(i int) uint64 { return binary.NativeEndian.Uint64(stats[8*i:]) }
	return Traffic{TxPackets: n(0), RxPackets: n(1), TxBytes: n(2), RxBytes: n(3)}
}
