package spec

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/internal/fields"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The keys of resourceLimits. The first four are OpenSandbox's; the others ours.
const (
	keyMemory    = "memory"
	keyCPU       = "cpu"
	keyPids      = "pids"
	keyDisk      = "disk"
	keyShares    = "cpuShares"
	keyReadBps   = "ioReadBps"
	keyWriteBps  = "ioWriteBps"
	keyReadIOPS  = "ioReadIops"
	keyWriteIOPS = "ioWriteIops"
	keyShm       = "shm"
	keyLog       = "logSize"

	keyEphemeral = "ephemeral-storage" // Kubernetes' word for the disk, which clients of OpenSandbox send
)

var (
	limitKeys = []string{
		keyCPU, keyMemory, keyPids, keyDisk, keyShares, keyReadBps, keyWriteBps, keyReadIOPS, keyWriteIOPS, keyShm, keyLog,
	}
	limitKeyNames = strings.Join(limitKeys, ", ")
)

// LimitsOfOthers changes limits, as clients of OpenSandbox send them to any of its hosts, into those of this one. It
// takes out those that nothing here honours, which OpenSandbox ignores, and returns them. A misspelled one is an
// error: without it the sandbox would have another limit than was meant.
func (o *Offer) LimitsOfOthers(limits map[string]string) (ignored []string, err error) {
	for _, key := range slices.Sorted(maps.Keys(limits)) {
		switch _, twice := limits[keyDisk]; {
		case slices.Contains(limitKeys, key), key == "gpu", key == "inodes": // setLimit has a word on these
			continue
		case key == keyEphemeral && !o.NoDisk && !twice:
			limits[keyDisk] = limits[key]
		default:
			for _, k := range limitKeys {
				if fields.Near(strings.ToLower(key), strings.ToLower(k)) || strings.EqualFold(key, k) {
					return nil, httperr.Invalid("resourceLimits.%s is no limit; did you mean %s? The limits are %s",
						httperr.Clip(key, 40), k, limitKeyNames)
				}
			}
			ignored = append(ignored, "resourceLimits."+key)
		}
		delete(limits, key)
	}
	return ignored, nil
}

// applyLimits puts resourceLimits, over the defaults, into spec.
func (o *Offer) applyLimits(spec *record.Spec, limits map[string]string) error {
	spec.Limits = record.Limits{
		MemoryBytes: o.MemoryBytes, CPUMillis: o.CPUMillis, Pids: o.Pids, DiskBytes: o.DiskBytes, LogBytes: o.LogBytes,
	}
	if o.NoDisk {
		spec.DiskBytes = 0
	}
	for _, key := range slices.Sorted(maps.Keys(limits)) {
		if err := o.setLimit(&spec.Limits, key, limits[key]); err != nil {
			return err
		}
	}
	if spec.ShmBytes > spec.MemoryBytes {
		return httperr.Invalid("resourceLimits.shm of %s is more than the memory limit of %s, and its contents count as memory",
			record.Size(spec.ShmBytes), record.Size(spec.MemoryBytes))
	}
	return nil
}

// amounts returns a function that writes an amount with its unit.
func amounts(unit string) func(int64) string {
	return func(n int64) string { return strconv.FormatInt(n, 10) + unit }
}

// setLimit reads one of resourceLimits into l.
func (o *Offer) setLimit(l *record.Limits, key, v string) error {
	if len(v) > maxAmount {
		return httperr.Invalid("resourceLimits.%s has %d characters; no amount needs more than %d", httperr.Clip(key, 40), len(v),
			maxAmount)
	}
	put := func(to *int64, parse func(string) (int64, error), least, most int64, text func(int64) string) error {
		n, err := parse(v)
		switch {
		case err != nil:
			return httperr.Invalid("resourceLimits.%s: %s", key, err.Error())
		case n < least:
			return httperr.Invalid("resourceLimits.%s: %q is too small; the minimum is %s", key, httperr.Clip(v, 40), text(least))
		case n > most:
			return httperr.Invalid("resourceLimits.%s: %q is more than this host gives to one sandbox (at most %s)", key,
				httperr.Clip(v, 40), text(most))
		}
		*to = n
		return nil
	}
	io := func(to *int64, parse func(string) (int64, error), least, most int64, text func(int64) string) error {
		if o.NoIO {
			return errs.New(errs.Unsupported, "resourceLimits.%s: this host cannot limit I/O: it has no io (v1: blkio) controller, or "+
				"its storage pool is not on a block device; leave it out", key)
		}
		if v == "max" { // as the kernel writes it
			*to = 0
			return nil
		}
		return put(to, parse, least, most, text)
	}
	switch key {
	case keyMemory:
		return put(&l.MemoryBytes, parseSize, minMemory, o.MaxMemoryBytes, record.Size)
	case keyCPU:
		return put(&l.CPUMillis, parseCPU, minMillis, o.MaxCPUMillis, amounts("m"))
	case keyPids:
		return put(&l.Pids, parseCount, minPids, maxPids, amounts(" processes"))
	case keyDisk:
		if o.NoDisk {
			return errs.New(errs.Unsupported, "resourceLimits.disk: the storage pool of this host is a plain directory and cannot limit "+
				"disks; leave disk out, or set another storage.pool in the daemon's configuration")
		}
		return put(&l.DiskBytes, parseSize, minDisk, o.MaxDiskBytes, record.Size)
	case keyShares:
		return put(&l.CPUShares, parseCount, minShares, maxShares, amounts(" shares; 1024 is the default"))
	case keyReadBps:
		return io(&l.IOReadBps, parseSize, minIOBps, maxIOBps, func(n int64) string { return record.Size(n) + " a second" })
	case keyWriteBps:
		return io(&l.IOWriteBps, parseSize, minIOBps, maxIOBps, func(n int64) string { return record.Size(n) + " a second" })
	case keyReadIOPS:
		return io(&l.IOReadIOPS, parseCount, minIOPS, maxIOPS, amounts(" operations a second"))
	case keyWriteIOPS:
		return io(&l.IOWriteIOPS, parseCount, minIOPS, maxIOPS, amounts(" operations a second"))
	case keyShm:
		return put(&l.ShmBytes, parseSize, minShm, o.MaxMemoryBytes, record.Size)
	case keyLog:
		return put(&l.LogBytes, parseSize, minLog, MaxLog, record.Size)
	case "inodes":
		return errs.New(errs.Unsupported, "resourceLimits.inodes: `disk` also limits the number of files: to one per 8 KiB in a pool with "+
			"project quotas, and on btrfs each file uses some of the bytes; leave inodes out")
	case "gpu":
		return errs.New(errs.Unsupported, "resourceLimits.gpu: sandboxd has no GPU support; leave gpu out")
	}
	return httperr.Invalid("resourceLimits.%s is not a limit of sandboxd; the limits are %s", httperr.Clip(key, 40), limitKeyNames)
}

// PatchLimits reads new limits for a sandbox that runs or is paused, and returns a
// function that puts them into its terms.
func (o *Offer) PatchLimits(limits map[string]string) (func(*record.Terms) error, error) {
	if len(limits) == 0 {
		return nil, httperr.Invalid("resourceLimits is missing or empty; send the limits to change, such as " +
			"{\"resourceLimits\":{\"memory\":\"1Gi\"}}")
	}
	change := func(t *record.Terms) error {
		for _, key := range slices.Sorted(maps.Keys(limits)) {
			if key == keyShm || key == keyLog {
				return errs.New(errs.Unsupported, "resourceLimits.%s cannot change while a sandbox runs; create another sandbox with it",
					key)
			}
			if err := o.setLimit(&t.Limits, key, limits[key]); err != nil {
				return err
			}
		}
		return nil
	}
	return change, change(&record.Terms{}) // limits that can never work fail at once
}
