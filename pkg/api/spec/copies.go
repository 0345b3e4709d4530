package spec

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/fork"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Began takes over what a new sandbox has of the snapshot that it begins as: the files,
// the image and, unless the request names another, the level of security. It never takes
// over a level that is less strict than this host's default.
func Began(spec *record.Spec, req *wire.CreateRequest, snap *record.Snapshot) {
	spec.Snapshot, spec.Image = snap.ID, snap.Image
	if !stated(req, wire.ExtSecurity) {
		spec.Security = record.Stricter(spec.Security, snap.Level())
	}
	if spec.Memory && snap.Memory != nil {
		recall(spec, req, &snap.Memory.Spec)
	}
}

// recall takes over what a sandbox that begins with the memory of another one has from that,
// unless the request states it. The Manager refuses what is stated and cannot be
// (record.Spec.Differs). An entrypoint that is the default of OpenSandbox's clients counts as not
// stated: they send it with every creation.
func recall(spec *record.Spec, req *wire.CreateRequest, was *record.Spec) {
	if !stated(req, wire.ExtRuntime) {
		spec.Runtime = was.Runtime
	}
	if len(req.Entrypoint) == 0 || slices.Equal(req.Entrypoint, clientsDefault()) {
		spec.Entrypoint, spec.Literal = was.Entrypoint, was.Literal
	}
	if !stated(req, wire.ExtStopSignal) {
		spec.StopSignal = was.StopSignal
	}
	if !stated(req, wire.ExtReadOnly) {
		spec.ReadOnly = was.ReadOnly
	}
	if !stated(req, wire.ExtTmpfs) {
		spec.Tmpfs = was.Tmpfs
	}
	if !stated(req, wire.ExtPrestart) {
		spec.Prestart = was.Prestart
	}
	if len(req.Volumes) == 0 {
		spec.Volumes = was.Volumes
	}
	if req.CredentialProxy == nil {
		spec.Inspect = spec.Inspect || was.Inspect
	}
	for key, limit := range limitsByKey(&spec.Limits, &was.Limits) {
		if _, stated := req.ResourceLimits[key]; !stated {
			*limit[0] = *limit[1]
		}
	}
}

func stated(req *wire.CreateRequest, extension string) bool {
	_, ok := req.Extensions[extension]
	return ok
}

// limitsByKey returns each limit of two sandboxes, by its key in resourceLimits.
func limitsByKey(a, b *record.Limits) map[string][2]*int64 {
	return map[string][2]*int64{
		keyMemory:    {&a.MemoryBytes, &b.MemoryBytes},
		keyCPU:       {&a.CPUMillis, &b.CPUMillis},
		keyPids:      {&a.Pids, &b.Pids},
		keyDisk:      {&a.DiskBytes, &b.DiskBytes},
		keyShares:    {&a.CPUShares, &b.CPUShares},
		keyReadBps:   {&a.IOReadBps, &b.IOReadBps},
		keyWriteBps:  {&a.IOWriteBps, &b.IOWriteBps},
		keyReadIOPS:  {&a.IOReadIOPS, &b.IOReadIOPS},
		keyWriteIOPS: {&a.IOWriteIOPS, &b.IOWriteIOPS},
		keyShm:       {&a.ShmBytes, &b.ShmBytes},
		keyLog:       {&a.LogBytes, &b.LogBytes},
	}
}

// Forked makes the specifications of the copies of source that a request asks for. A copy has
// what the request states, and everything else from source, but not its published ports: each
// belongs to one sandbox. keepsMemory says whether the runtime of source can copy memory.
func (o *Offer) Forked(req *wire.ForkRequest, source *record.Record, keepsMemory bool) (copies []record.Spec, memory bool, err error) {
	switch {
	case req.Count < 1 || req.Count > fork.Max:
		return nil, false, httperr.Invalid("count %d: want 1 to %d copies", req.Count, fork.Max)
	case req.Mode == wire.ForkMemory:
		memory = true
	case req.Mode != "" && req.Mode != wire.ForkFiles:
		return nil, false, httperr.Invalid("mode %q: want %s or %s", httperr.Clip(req.Mode, 20), wire.ForkMemory, wire.ForkFiles)
	}
	if memory && !keepsMemory {
		return nil, false, errs.New(errs.Unsupported, "the memory of sandbox %s cannot be copied: memory snapshots need runtime runsc, "+
			"and it is on %s; copy its files (mode files, or sandboxctl fork without --memory)", source.ID, source.Spec.Runtime)
	}
	create, err := forkCreate(req, memory)
	if err != nil {
		return nil, false, err
	}
	one, err := o.Spec(create)
	if err != nil {
		return nil, false, err
	}
	inherit(&one, create, source)
	if err := checkStored(&one, maxCopy); err != nil { // with what it has from the source
		return nil, false, err
	}
	if err := o.allowed(&one, source, memory); err != nil {
		return nil, false, err
	}
	one.Extensions = nil // as they were sent
	if req.Overrides != nil {
		one.Extensions = req.Overrides.Extensions
	}
	for i := range req.Count {
		c := one
		if one.Name != "" && req.Count > 1 {
			if c.Name = fmt.Sprintf("%s-%d", one.Name, i+1); checkName(c.Name) != nil {
				return nil, false, checkName(c.Name)
			}
		}
		copies = append(copies, c)
	}
	return copies, memory, nil
}

// allowed refuses what a copy cannot have: what this host no longer offers, and with memory what
// must be as it is at the source.
func (o *Offer) allowed(s *record.Spec, source *record.Record, memory bool) error {
	if _, err := o.security(string(s.Level())); err != nil {
		return errs.Wrap(err, errs.Denied, "sandbox %s has the level of security %s, which this host no longer offers, so it cannot be "+
			"copied", source.ID, s.Level())
	}
	if s.Inspect && o.NoInspect {
		return errNoInspect
	}
	if !memory {
		return nil
	}
	whole := *s
	whole.Image = source.Spec.Image // it comes with the snapshot
	if differ := whole.Differs(&source.Spec); len(differ) > 0 {
		return httperr.Invalid("a copy of the memory of sandbox %s must be as that is; these differ: %s", source.ID,
			strings.Join(differ, ", "))
	}
	return nil
}

// forkCreate is the creation of one copy.
func forkCreate(req *wire.ForkRequest, memory bool) (*wire.CreateRequest, error) {
	over := req.Overrides
	if over == nil {
		over = &wire.ForkOverrides{}
	}
	create := &wire.CreateRequest{
		SnapshotID: "of the fork", Timeout: req.Timeout, ResourceLimits: over.ResourceLimits, Env: over.Env, Metadata: over.Metadata,
		NetworkPolicy: over.NetworkPolicy, Extensions: maps.Clone(over.Extensions),
	}
	if create.Extensions == nil {
		create.Extensions = map[string]string{}
	}
	for _, k := range []string{
		wire.ExtRuntime, wire.ExtSecurity, wire.ExtPrestart, wire.ExtIdle, wire.ExtMemory, wire.ExtImageCommand, wire.ExtLiteral,
		wire.ExtPool,
	} {
		if _, given := create.Extensions[k]; given {
			return nil, httperr.Invalid("overrides.extensions: %s cannot be changed for copies; leave it out", k)
		}
	}
	if _, given := create.Extensions[wire.ExtPublish]; given && req.Count > 1 {
		return nil, httperr.Invalid("overrides.extensions: %s is for one copy: a port of the host belongs to one sandbox", wire.ExtPublish)
	}
	if create.Timeout == nil && create.Extensions[wire.ExtTimeout] == "" {
		return nil, httperr.Invalid("timeout is missing; say how many seconds each copy may live (or extension %s)", wire.ExtTimeout)
	}
	if memory {
		create.Extensions[wire.ExtMemory] = "true"
	} else {
		create.Extensions[wire.ExtIdle] = "true" // until inherit
	}
	return create, nil
}

// inherit takes over from the source what a creation does not state.
func inherit(s *record.Spec, create *wire.CreateRequest, source *record.Record) {
	was := &source.Spec
	recall(s, create, was)
	s.Security = was.Level()
	if env := maps.Clone(was.Env); env != nil {
		maps.Copy(env, s.Env)
		s.Env = env
	}
	if labels := maps.Clone(was.Labels); labels != nil {
		maps.Copy(labels, s.Labels)
		s.Labels = labels
	}
	if !given(create.NetworkPolicy) && !stated(create, wire.ExtNetwork) && !stated(create, wire.ExtAllow) &&
		!stated(create, wire.ExtRules) && !stated(create, wire.ExtPolicy) {
		s.Network, s.NetworkPolicy, s.Policy = was.Network, was.NetworkPolicy, was.Policy
	}
	if !stated(create, wire.ExtRestart) {
		s.Restart = was.Restart
	}
	if !s.Ready.Given() {
		s.Ready = was.Ready
	}
	if !s.Idle.Given() {
		s.Idle = was.Idle
	}
	s.SecureAccess, s.Platform, s.ResourceLimits = was.SecureAccess, was.Platform, limitTexts(was.ResourceLimits, create.ResourceLimits)
}

// limitTexts are the limits of a copy as clients sent them.
func limitTexts(was, now map[string]string) map[string]string {
	all := maps.Clone(was)
	if all == nil {
		return now
	}
	maps.Copy(all, now)
	return all
}
