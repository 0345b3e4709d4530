// Package spec reads what a client asks of a sandbox and shows what became of it:
//
//	body ─▶ Decode ─▶ wire request ─▶ Offer ─▶ record.Spec, record.Terms
//	record.Record ─▶ Sandbox, Inspection ─▶ wire.Sandbox, wire.Inspection
//
// All of it is pure: values in, values and errors out, no clock and no I/O. The
// caller asks the host (is there such an image, is that name taken?). Every error is
// one that a client may read, and names the field.
//
// The surprise: checks have an order. Extensions are read before volumes, which
// must not hide a tmpfs, and before the timeout, which a oneshot sandbox gets cut.
package spec

import (
	"cmp"
	"net/netip"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// An Offer is what this host offers to one sandbox: the defaults, the most that a
// request may ask for, and what the host cannot do. Where a field is zero, the value
// beside it holds; see Complete.
type Offer struct {
	// A request that does not say gets these.
	Runtime     string             // runsc
	Security    record.Security    // default
	Network     record.NetworkMode // rules
	MemoryBytes int64              // 512 Mi
	CPUMillis   int64              // 1000
	Pids        int64              // 256
	DiskBytes   int64              // 10 Gi; see NoDisk
	LogBytes    int64              // 16 Mi
	VolumeBytes int64              // of a new volume; 0: no bound, and see NoDisk

	// HostMemoryBytes is the memory of this host; 0: not known. A limit may be more, as
	// limits together may: see Notes.
	HostMemoryBytes int64

	// The most that one request may ask for. The disks of all sandboxes together
	// may be larger than the pool, as their memory may.
	MaxMemoryBytes int64 // 1 Ti
	MaxCPUMillis   int64 // 1024 cores
	MaxDiskBytes   int64 // 64 Ti; the daemon gives the size of its pool
	// MaxTimeout bounds a new sandbox, also one that asks for no timeout, and what an
	// access adds. It does not bound renewals: see Renewal. 0: no bound.
	MaxTimeout time.Duration

	Runtimes []string // of this host; default runsc and runc
	// SecurityLevels are those that a request may ask for, the strictest first; default
	// strict and default.
	SecurityLevels []record.Security

	NoDisk    bool // the storage pool cannot limit: asking for a disk size is an error
	NoIO      bool // this host cannot limit I/O: asking for that is an error
	NoVolumes bool // there are no named volumes

	NoPolicies bool // there are no named policies
	NoPools    bool // there are no pools of ready sandboxes
	NoInspect  bool // requests cannot be inspected: neither rules about them nor a vault
	NoForks    bool // sandboxes cannot be copied

	// ParseRule parses a rule of sandboxd.allow. (policy.ParseRule)
	// ParsePolicy parses a networkPolicy as it was sent. (policy.FromJSON)
	// Where one is nil, rules of that form are refused.
	ParseRule   func(string) (record.Rule, error)
	ParsePolicy func([]byte) (record.Network, error)
	// NormalName returns a domain name as rules have it; "*." may stand before it.
	// (policy.NormalName) Nil: names are written in lower case, and that is all.
	NormalName func(string) (string, error)
	// HostAddress reports whether an address is one of this host's own. (egress.Engine)
	// Nil: none is known.
	HostAddress func(netip.Addr) bool
}

// Complete sets the fields of o that are zero to their defaults.
func (o *Offer) Complete() {
	o.MemoryBytes = cmp.Or(o.MemoryBytes, 512<<20)
	o.CPUMillis = cmp.Or(o.CPUMillis, 1000)
	o.Pids = cmp.Or(o.Pids, 256)
	o.DiskBytes = cmp.Or(o.DiskBytes, 10<<30)
	o.LogBytes = cmp.Or(o.LogBytes, 16<<20)
	o.MaxMemoryBytes = cmp.Or(o.MaxMemoryBytes, 1<<40)
	o.MaxCPUMillis = cmp.Or(o.MaxCPUMillis, 1024*1000)
	o.MaxDiskBytes = cmp.Or(o.MaxDiskBytes&^(1<<20-1), 64<<40) // whole MiB, since errors name it
	o.DiskBytes = min(o.DiskBytes, o.MaxDiskBytes)             // the default may be of a larger host
	o.Runtime = cmp.Or(o.Runtime, "runsc")
	o.Security = cmp.Or(o.Security, record.SecurityDefault)
	o.Network = cmp.Or(o.Network, record.NetworkRules)
	if o.Runtimes == nil {
		o.Runtimes = []string{"runsc", "runc"}
	}
	if o.SecurityLevels == nil {
		o.SecurityLevels = []record.Security{record.SecurityStrict, record.SecurityDefault}
	}
	if o.ParseRule == nil {
		o.ParseRule = func(string) (record.Rule, error) { return record.Rule{}, errNoRules }
	}
	if o.NormalName == nil {
		o.NormalName = func(s string) (string, error) { return strings.ToLower(s), nil }
	}
	if o.HostAddress == nil {
		o.HostAddress = func(netip.Addr) bool { return false }
	}
	if o.ParsePolicy == nil {
		o.ParsePolicy = func([]byte) (record.Network, error) { return record.Network{}, errNoRules }
	}
}

var errNoInspect = errs.New(errs.Unsupported, "this daemon was built without a way to inspect requests; leave out credentialProxy, "+
	"and the http of rules")

var errNoRules = errs.New(errs.Unsupported, "this daemon was built without network rules; leave them out")
