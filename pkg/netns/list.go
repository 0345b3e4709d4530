package netns

import (
	"context"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/dump"
)

// skipStats is RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h: a list without counters.
const skipStats = 1 << 3

// ListLinks lists the IDs of this instance that have a host link, including links that
// are being removed.
//
// It reads names alone, on a socket of its own: the library's list of 1000 links takes
// 20 ms, in which a create would wait for the shared socket.
func (m *Manager) ListLinks(context.Context) ([]string, error) {
	indexes, err := dump.Again(m.linkIndexes)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	m.listed.Store(&indexes)
	ids := make([]string, 0, len(indexes))
	for id := range indexes {
		ids = append(ids, id)
	}
	return ids, nil
}

// linkIndexes returns the index of each link of this instance, by ID.
func (m *Manager) linkIndexes() (map[string]int, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(skipStats)))
	all := map[string]int{}
	var failed error
	err := req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWLINK, func(msg []byte) bool {
		info := nl.DeserializeIfInfomsg(msg)
		attrs, err := nl.ParseRouteAttr(msg[info.Len():])
		if err != nil {
			failed = err
			return false
		}
		for _, a := range attrs {
			if a.Attr.Type != unix.IFLA_IFNAME {
				continue
			}
			name := strings.TrimRight(string(a.Value), "\x00")
			if id, ok := strings.CutPrefix(name, Link("")); ok && m.check(id) == nil {
				all[id] = int(info.Index)
			}
			break
		}
		return true
	})
	if err == nil {
		err = failed
	}
	return all, err
}

// wasListed reports whether the link of id had that index when ListLinks listed it last.
// The kernel gives each new link another index.
func (m *Manager) wasListed(id string, index int) bool {
	listed := m.listed.Load()
	return listed != nil && index != 0 && (*listed)[id] == index
}
