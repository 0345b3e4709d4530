// Package instance derives every host-wide name of one sandboxd from a single
// character, so that two daemons live on one host and neither touches the other's
// resources.
//
// The instance is the first character of every sandbox ID. Link match, chains,
// sets, queue number, gateway, address pool, user-id ranges, cgroup root and
// default directories are functions of it.
package instance

import (
	"fmt"
	"net/netip"
	"strings"
)

// Alphabet is the alphabet of sandbox IDs: lower-case base32 of RFC 4648 §6.
const Alphabet = "abcdefghijklmnopqrstuvwxyz234567"

// MaxSlots is how many sandboxes one instance can hold: 32 instances of 2,000
// slots of 65,536 user ids fill the 32-bit id space above firstUID.
const MaxSlots = 2000

// firstUID is where the first slot of the first instance starts; below it are
// the host's own users.
const firstUID = 100000

// Instance is the first character of an ID: "a" by default, "d" for the
// development daemon.
type Instance byte

// Parse checks that s is one character of Alphabet.
func Parse(s string) (Instance, error) {
	if len(s) != 1 || !strings.Contains(Alphabet, s) {
		return 0, fmt.Errorf("instance %q: want one character of a-z, 2-7", s)
	}
	return Instance(s[0]), nil
}

func (i Instance) String() string { return string(rune(i)) }

// Index is the position of the instance in Alphabet, 0..31.
func (i Instance) Index() int { return strings.IndexByte(Alphabet, byte(i)) }

// LinkPrefix is what the host link of every sandbox of the instance starts
// with. "sb-" and an ID are exactly the 15 bytes that IFNAMSIZ leaves.
func (i Instance) LinkPrefix() string { return "sb-" + i.String() }

// LinkMatch is LinkPrefix as iptables matches it.
func (i Instance) LinkMatch() string { return i.LinkPrefix() + "+" }

// Chain names a chain of the instance, as SANDBOXD-D-FORWARD.
func (i Instance) Chain(name string) string {
	return "SANDBOXD-" + strings.ToUpper(i.String()) + "-" + name
}

// Set names an ipset of the instance, as sandboxd-d-src.
func (i Instance) Set(name string) string { return "sandboxd-" + i.String() + "-" + name }

// Queue is the NFQUEUE number, and the NFLOG group, of the instance.
func (i Instance) Queue() uint16 { return 7100 + uint16(i.Index()) }

// BusyQueue is the NFQUEUE number of the instance for sandboxes that open many flows.
func (i Instance) BusyQueue() uint16 { return 7200 + uint16(i.Index()) }

// Gateway is the link-local address that guests of the instance route through
// and ask for names.
func (i Instance) Gateway() netip.Addr {
	return netip.AddrFrom4([4]byte{169, 254, 100 + byte(i.Index()), 1})
}

// Pool is the default address pool: one /16 of 10/8 for each instance.
func (i Instance) Pool() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 160 + byte(i.Index()), 0, 0}), 16)
}

// UsersPerSlot is how many host ids a slot owns, and a sandbox's user namespace maps.
const UsersPerSlot = 65536

// UIDBase is the host id that guest id 0 of the slot maps to. Each slot owns
// UsersPerSlot ids that no other slot of any instance has.
func (i Instance) UIDBase(slot int) uint32 {
	return firstUID + UsersPerSlot*uint32(i.Index()*MaxSlots+slot)
}

// CgroupRoot is the name of the cgroup below which all sandboxes live.
func (i Instance) CgroupRoot() string { return "sandboxd-" + i.String() }

// StateDir and RunDir are the default directories. The default instance has
// the plain names that operators expect.
func (i Instance) StateDir() string { return "/var/lib/sandboxd" + i.suffix() }

// RunDir is the default directory for what does not survive a reboot.
func (i Instance) RunDir() string { return "/run/sandboxd" + i.suffix() }

func (i Instance) suffix() string {
	if i == 'a' {
		return ""
	}
	return "-" + i.String()
}
