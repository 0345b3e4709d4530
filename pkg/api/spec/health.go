package spec

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// defaultProbe has the values of a probe that a request leaves out. docker tries every
// 30 s; agents wait for what they start, so this probe tries more often.
var defaultProbe = record.Probe{Interval: 10 * time.Second, Timeout: 5 * time.Second, StartPeriod: 30 * time.Second, Retries: 3}

// Bounds of probes and restart policies.
const (
	maxProbeCommand = 4 << 10 // bytes
	maxRetries      = 100
	maxRestarts     = 1_000_000
)

// parseRestart reads a restart policy in docker's words.
func parseRestart(v string) (r record.Restart, err error) {
	policy, times, limited := strings.Cut(v, ":")
	switch policy {
	case "no":
		r.Policy = record.RestartNo
	case "on-failure":
		r.Policy = record.RestartOnFailure
	case "always", "unless-stopped": // what was stopped stays stopped under either
		r.Policy = record.RestartAlways
	default:
		return r, httperr.Invalid("extension %s %q: want no, on-failure, on-failure:3 (at most three times), always or unless-stopped",
			wire.ExtRestart, httperr.Clip(v, 40))
	}
	if !limited {
		return r, nil
	}
	if r.Policy != record.RestartOnFailure {
		return r, httperr.Invalid("extension %s %q: only on-failure takes a number; use %s or on-failure:%s", wire.ExtRestart,
			httperr.Clip(v, 40), policy, httperr.Clip(times, 20))
	}
	r.Max, err = strconv.Atoi(times)
	if err != nil || r.Max < 1 || r.Max > maxRestarts || times[0] == '+' {
		return r, httperr.Invalid("extension %s %q: want a whole number from 1 to %d after the colon, or just on-failure for no limit",
			wire.ExtRestart, httperr.Clip(v, 40), maxRestarts)
	}
	return r, nil
}

// maxIdle bounds idle times: more is no policy.
const maxIdle = 365 * 24 * time.Hour

// applyIdle reads the idle policy.
func applyIdle(spec *record.Spec, ext map[string]string) error {
	after, given := ext[wire.ExtIdleAfter]
	action, acts := ext[wire.ExtIdleAction]
	if !given {
		if acts {
			return httperr.Invalid("extension %s is given without %s; add that, such as 10m", wire.ExtIdleAction, wire.ExtIdleAfter)
		}
		return nil
	}
	d, err := time.ParseDuration(after)
	if err != nil || d < time.Second || d > maxIdle {
		return httperr.Invalid("extension %s %q: want a duration from 1s to %dh, such as 10m; leave it out for a sandbox that may be idle",
			wire.ExtIdleAfter, httperr.Clip(after, 40), int(maxIdle.Hours()))
	}
	spec.Idle = record.Idle{After: d, Action: record.IdleActions[0]}
	if !acts {
		return nil
	}
	spec.Idle.Action = record.IdleAction(action)
	if !slices.Contains(record.IdleActions, spec.Idle.Action) {
		var names []string
		for _, a := range record.IdleActions {
			names = append(names, string(a))
		}
		return httperr.Invalid("extension %s %q: want one of %s", wire.ExtIdleAction, httperr.Clip(action, 20), strings.Join(names, ", "))
	}
	return nil
}

// applyHealth reads the probe, and refuses extensions that exclude one another.
func applyHealth(spec *record.Spec, ext map[string]string) error {
	if spec.OneShot && spec.Restart.Policy != record.RestartNo {
		return httperr.Invalid(
			"extensions %s and %s exclude each other: a sandbox that is deleted when it ends cannot restart; leave one out",
			wire.ExtOneShot, wire.ExtRestart)
	}
	p := defaultProbe
	if v, ok := ext[wire.ExtReadyCmd]; ok {
		switch {
		case strings.TrimSpace(v) == "":
			return httperr.Invalid(
				"extension %s is empty; give a command for the shell of the sandbox, such as \"test -e /tmp/ready\", or leave it out",
				wire.ExtReadyCmd)
		case len(v) > maxProbeCommand:
			return httperr.Invalid("extension %s has %d bytes; at most %d are allowed: put a script into the sandbox", wire.ExtReadyCmd,
				len(v), maxProbeCommand)
		case strings.ContainsRune(v, 0):
			return httperr.Invalid("extension %s contains a NUL byte; remove it", wire.ExtReadyCmd)
		}
		p.Command = v
	}
	if v, ok := ext[wire.ExtReadyPort]; ok {
		n, err := strconv.ParseUint(v, 10, 16)
		if err != nil || n == 0 {
			return httperr.Invalid("extension %s %q: want the number of a TCP port, from 1 to 65535", wire.ExtReadyPort,
				httperr.Clip(v, 20))
		}
		p.Port = uint16(n)
	}
	for _, d := range []struct {
		key         string
		to          *time.Duration
		least, most time.Duration
	}{
		{wire.ExtReadyInterval, &p.Interval, time.Second, time.Hour},
		{wire.ExtReadyTimeout, &p.Timeout, 100 * time.Millisecond, 5 * time.Minute},
		{wire.ExtReadyStartPeriod, &p.StartPeriod, 0, time.Hour},
	} {
		v, ok := ext[d.key]
		if !ok {
			continue
		}
		n, err := time.ParseDuration(v)
		if err != nil || n < d.least || n > d.most {
			return httperr.Invalid("extension %s %q: want a duration from %v to %v, such as 5s", d.key, httperr.Clip(v, 20), d.least,
				d.most)
		}
		*d.to = n
	}
	if v, ok := ext[wire.ExtReadyRetries]; ok {
		n, err := strconv.ParseUint(v, 10, 16)
		if err != nil || n < 1 || n > maxRetries {
			return httperr.Invalid("extension %s %q: want a whole number from 1 to %d", wire.ExtReadyRetries, httperr.Clip(v, 20),
				maxRetries)
		}
		p.Retries = int(n)
	}
	if p.Given() {
		spec.Ready = p
		return nil
	}
	for _, k := range []string{wire.ExtReadyInterval, wire.ExtReadyTimeout, wire.ExtReadyStartPeriod, wire.ExtReadyRetries} {
		if _, ok := ext[k]; ok {
			return httperr.Invalid("extension %s is given, but no check; add %s or %s", k, wire.ExtReadyPort, wire.ExtReadyCmd)
		}
	}
	return nil
}
