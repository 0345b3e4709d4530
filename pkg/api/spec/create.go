package spec

import (
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Limits of what a creation lists.
const (
	maxEnv      = 1000
	maxEnvBytes = 256 << 10
	maxArgs     = 1000      // of an entrypoint
	maxArgBytes = 128 << 10 // of all of them; no program takes a longer one

	// maxSpec bounds all that the state keeps of a creation, as JSON: lists and texts are
	// each bounded, but not together, and the state of a thousand sandboxes is in memory.
	maxSpec = 1 << 20
	// maxCopy bounds a copy, which has what its request states and the rest from its source.
	// Earlier commits took 1 MiB of environment beside the rest: such a source can be copied.
	maxCopy = 3 * maxSpec
)

// Spec makes the specification of a sandbox from a request. It checks everything except
// that the image or the snapshot exists: the caller looks that up and puts it in.
//
// The template of a pool that the request names is in it already: see FromPool.
func (o *Offer) Spec(req *wire.CreateRequest) (record.Spec, error) {
	spec := record.Spec{
		Entrypoint: req.Entrypoint, Labels: req.Metadata, ResourceLimits: req.ResourceLimits,
		Extensions: req.Extensions, Runtime: o.Runtime, Security: o.Security, SecureAccess: req.SecureAccess,
	}
	if err := o.refuse(req); err != nil {
		return spec, err
	}
	spec.Pool = req.Extensions[wire.ExtPool]
	if req.SnapshotID != "" && len(req.Entrypoint) == 0 && req.Extensions[wire.ExtIdle] != "true" &&
		req.Extensions[wire.ExtImageCommand] != "true" && req.Extensions[wire.ExtMemory] != "true" {
		req.Entrypoint = clientsDefault() // as the lifecycle document says
		spec.Entrypoint = req.Entrypoint
	}
	for _, check := range []func() error{
		func() error { return checkLabels(req.Metadata) },
		func() error { return o.applyLimits(&spec, req.ResourceLimits) },
		func() error { return applyEnv(&spec, req.Env) },
		func() error { return applyPlatform(&spec, req.Platform) },
		func() error { return o.applyPolicy(&spec, req.NetworkPolicy) },
		func() error { return o.applyExtensions(&spec, req) },
		func() error { return o.applyVolumes(&spec, req.Volumes) },
		func() error { return o.applyTimeout(&spec, req) },
		func() error { return checkEntrypoint(req) },
	} {
		if err := check(); err != nil {
			return spec, err
		}
	}
	// That of a policy by name is set by the store, which gives the sandbox its rules.
	spec.Inspect = req.CredentialProxy != nil && req.CredentialProxy.Enabled || spec.Network.AboutRequests()
	if spec.Inspect && o.NoInspect {
		return spec, errNoInspect
	}
	return spec, checkStored(&spec, maxSpec)
}

// checkStored refuses a specification that is too large for the state.
func checkStored(spec *record.Spec, most int) error {
	b, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encode the specification of a sandbox: %w", err)
	}
	if size := plainSize(b); size > most {
		return httperr.Invalid("the sandbox would take %d KiB of the daemon's state, by its env, entrypoint, metadata, extensions, "+
			"volumes and networkPolicy together; at most %d are allowed: put data into files, and rules into a named policy or a CIDR",
			size>>10, most>>10)
	}
	return nil
}

// plainSize is the size of JSON in which each escaped character is one byte, and not up to six:
// otherwise an environment of < and > would be refused at a sixth of its own bound.
func plainSize(b []byte) (n int) {
	for i := 0; i < len(b); i++ {
		if n++; b[i] == '\\' {
			if i++; b[i] == 'u' {
				i += 4
			}
		}
	}
	return n
}

// refuse refuses what this release cannot do, and what never makes sense.
func (o *Offer) refuse(req *wire.CreateRequest) error {
	switch {
	case req.TemplateID != "":
		return errs.Wire(errs.New(errs.Unsupported, "templateId: templates need OpenSandbox's Kubernetes runtime, which sandboxd does "+
			"not have; use an image, or a snapshot by snapshotId"), "FSB::API_NOT_SUPPORTED")
	case given(req.Lifecycle):
		return errs.Wire(errs.New(errs.Unsupported, "lifecycle: preStart and periodic hooks are not supported; leave it out, and "+
			"start such commands from the entrypoint or with the command API (%s defines when a sandbox is ready)", wire.ExtReadyCmd),
			"SANDBOX::INVALID_PARAMETER")
	case req.Extensions[wire.ExtPool] != "" && o.NoPools:
		return errs.Wire(errs.New(errs.Unsupported, "extensions.poolRef: this daemon has no pools; leave it out and use an image"),
			"SANDBOX::UNSUPPORTED_POOL_REF")
	case req.Image != nil && req.SnapshotID != "":
		return httperr.Invalid("image and snapshotId are both given; leave one out")
	case len(req.SnapshotID) > maxSnapshotName:
		return httperr.Invalid("snapshotId has %d characters; no snapshot here has an id or a name that long", len(req.SnapshotID))
	case req.SnapshotID != "": // no image to look at
	case req.Image == nil:
		return httperr.Invalid("image is missing; send {\"image\":{\"uri\":\"python\"}} " +
			"(`sandboxctl image ls` lists the images of this host)")
	case strings.TrimSpace(req.Image.URI) == "":
		return httperr.Invalid("image.uri is empty; send the name of an image (`sandboxctl image ls` lists the images of this host)")
	case len(req.Image.URI) > 512:
		return httperr.Invalid("image.uri has %d characters; no image here has a name longer than 512", len(req.Image.URI))
	default:
		if err := CheckAuth("image.auth", req.Image.Auth); err != nil {
			return err
		}
	}
	return nil
}

// clientsDefault is the entrypoint of a sandbox that begins as a snapshot, when a client names none.
// OpenSandbox's SDKs send it themselves then.
func clientsDefault() []string { return []string{"tail", "-f", "/dev/null"} }

func checkEntrypoint(req *wire.CreateRequest) error {
	idle, own := req.Extensions[wire.ExtIdle] == "true", req.Extensions[wire.ExtImageCommand] == "true"
	memory := req.Extensions[wire.ExtMemory] == "true"
	switch {
	case memory && req.SnapshotID == "":
		return httperr.Invalid("extension %s needs a snapshot with memory: send its id as snapshotId", wire.ExtMemory)
	case memory && own:
		return httperr.Invalid("the extensions %s and %s exclude each other: the programs in the memory run on; leave one out",
			wire.ExtMemory, wire.ExtImageCommand)
	case idle && own:
		return httperr.Invalid("the extensions %s and %s exclude each other: leave one out", wire.ExtIdle, wire.ExtImageCommand)
	}
	if len(req.Entrypoint) == 0 {
		if idle || own || memory {
			return nil
		}
		return errs.Wire(httperr.Invalid("entrypoint is missing; send the command to run, such as [\"tail\",\"-f\",\"/dev/null\"], "+
			"or extension %s=true for a sandbox without one, or %s=true for that of the image", wire.ExtIdle, wire.ExtImageCommand),
			"DOCKER::INVALID_ENTRYPOINT")
	}
	total := 0
	for i, a := range req.Entrypoint {
		total += len(a) + 1
		if strings.ContainsRune(a, 0) {
			return errs.Wire(httperr.Invalid("entrypoint[%d] contains a NUL byte; remove it", i), "DOCKER::INVALID_ENTRYPOINT")
		}
	}
	switch {
	case idle:
		return httperr.Invalid("both an entrypoint and extension %s=true are given; leave one out", wire.ExtIdle)
	case req.Entrypoint[0] == "":
		return errs.Wire(httperr.Invalid("entrypoint[0] is empty; it must name the program to run"), "DOCKER::INVALID_ENTRYPOINT")
	case total > maxArgBytes || len(req.Entrypoint) > maxArgs:
		return errs.Wire(httperr.Invalid("entrypoint has %d arguments with %d bytes in total; at most %d and %d are allowed",
			len(req.Entrypoint), total, maxArgs, maxArgBytes), "DOCKER::INVALID_ENTRYPOINT")
	}
	return nil
}

// egressSettings are the settings of OpenSandbox's egress sidecar that its server takes
// from a creation (ALLOWED_EGRESS_ENV_VARS). There is no sidecar here, so they have no
// effect. Its server refuses all other names with the prefix.
var egressSettings = []string{
	record.EgressVariables + "CREDENTIAL_VAULT_REQUIRE_SCOPED_MATCH",
	record.EgressVariables + "CREDENTIAL_VAULT_REQUIRE_TLS",
	record.EgressVariables + "CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS",
	record.EgressVariables + "DENY_WEBHOOK",
	record.EgressVariables + "DNS_UPSTREAM_TIMEOUT",
	record.EgressVariables + "LOG_LEVEL",
	record.EgressVariables + "METRICS_EXTRA_ATTRS",
	record.EgressVariables + "MITMPROXY_EXTRA_PORTS",
	record.EgressVariables + "MITMPROXY_SSL_INSECURE",
	record.EgressVariables + "MITMPROXY_TRANSPARENT",
	record.EgressVariables + "POLICY_FILE",
}

func applyEnv(spec *record.Spec, env map[string]*string) error {
	if len(env) > maxEnv {
		return httperr.Invalid("env has %d variables; at most %d are allowed", len(env), maxEnv)
	}
	total := 0
	for _, k := range slices.Sorted(maps.Keys(env)) {
		v := env[k]
		switch {
		case v == nil: // Python's SDK sends null for "not set"
			continue
		case !record.IsVariable(k):
			return httperr.Invalid("env: %q is not the name of a variable; want a name without =, NUL and newline", httperr.Clip(k, 80))
		case slices.Contains(egressSettings, k):
			continue // without a sidecar, as OpenSandbox's server does without a network policy
		case k == record.LifecycleVariable:
			return httperr.Invalid("env: %s is reserved by OpenSandbox for lifecycle hooks, which are not supported; leave it out", k)
		case record.IsReserved(k):
			return httperr.Invalid("env: %q is reserved: OpenSandbox keeps names that begin with %s for its egress sidecar; leave it out, "+
				"and describe what the sandbox may reach in networkPolicy", httperr.Clip(k, 80), record.EgressVariables)
		case strings.ContainsRune(*v, 0):
			return httperr.Invalid("env: the value of %q contains a NUL byte; remove it", httperr.Clip(k, 80))
		}
		if total += len(k) + len(*v) + 2; total > maxEnvBytes {
			return httperr.Invalid("env is larger than %d KiB in total; put the data into a file", maxEnvBytes>>10)
		}
		if spec.Env == nil {
			spec.Env = map[string]string{}
		}
		spec.Env[k] = *v
	}
	return nil
}

func applyPlatform(spec *record.Spec, p *wire.Platform) error {
	switch {
	case p == nil:
		return nil
	case p.OS == "" || p.Arch == "":
		return httperr.Invalid("platform needs both os and arch, such as {\"os\":\"linux\",\"arch\":\"%s\"}", runtime.GOARCH)
	case p.OS != "linux" || p.Arch != runtime.GOARCH:
		return httperr.Invalid("platform %s/%s cannot run here; this host is linux/%s", httperr.Clip(p.OS, 20), httperr.Clip(p.Arch, 20),
			runtime.GOARCH)
	}
	spec.Platform = map[string]string{"os": p.OS, "arch": p.Arch}
	return nil
}

func (o *Offer) applyTimeout(spec *record.Spec, req *wire.CreateRequest) error {
	ext, has := req.Extensions[wire.ExtTimeout]
	switch {
	case has && req.Timeout != nil:
		return httperr.Invalid("timeout and extension %s are both given; leave one out", wire.ExtTimeout)
	case has:
		d, err := time.ParseDuration(ext)
		if err != nil || d < time.Second {
			return httperr.Invalid("extension %s %q: want a duration of at least 1s, such as 90s or 30m", wire.ExtTimeout,
				httperr.Clip(ext, 40))
		}
		spec.Timeout = d
	case req.Timeout != nil:
		n := *req.Timeout
		if n < 60 {
			return httperr.Invalid(
				"timeout %d: want at least 60 seconds, or none for a sandbox that lives until it is deleted (extension %s allows "+
					"shorter timeouts)", n, wire.ExtTimeout)
		}
		if n > int64(100*365*24*time.Hour/time.Second) {
			return httperr.Invalid("timeout %d is more than a hundred years; leave it out for a sandbox that lives until it is deleted", n)
		}
		spec.Timeout = time.Duration(n) * time.Second
	}
	if spec.Timeout == 0 {
		spec.Timeout = o.MaxTimeout // 0: no limit
	}
	if o.MaxTimeout > 0 && spec.OneShot { // a lease: whoever holds it renews it
		spec.Timeout = min(spec.Timeout, o.MaxTimeout)
	}
	if o.MaxTimeout > 0 && spec.Timeout > o.MaxTimeout {
		return httperr.Invalid("timeout of %s is longer than this host allows; the maximum is %s", spec.Timeout, o.MaxTimeout)
	}
	if spec.Timeout > 100*365*24*time.Hour {
		return httperr.Invalid("a timeout of %s is more than a hundred years; leave it out for a sandbox that lives until it is deleted",
			spec.Timeout)
	}
	return nil
}

// Renewal checks the time that a sandbox is to live until, at the moment now.
// MaxTimeout bounds what a creation asks for, so that forgotten sandboxes end; a
// client that renews has not forgotten. (OpenSandbox: "the creation-time limit does
// not apply".)
func Renewal(expiresAt string, rec *record.Record, now time.Time) (time.Time, error) {
	bad := func(code errs.Code, format string, args ...any) error {
		return errs.Wire(errs.New(code, format, args...), "DOCKER::INVALID_EXPIRATION")
	}
	t, err := ParseTime(expiresAt)
	if err != nil {
		return t, bad(errs.Invalid, "expiresAt %q is not a time; send RFC 3339, such as 2030-01-02T15:04:05Z", httperr.Clip(expiresAt, 60))
	}
	at := t.UTC().Format(time.RFC3339)
	switch {
	case !t.After(now):
		return t, bad(errs.Invalid, "expiresAt %s is not in the future (the daemon's clock says %s); send a later time, or delete the "+
			"sandbox", at, now.UTC().Format(time.RFC3339))
	case t.After(now.AddDate(100, 0, 0)):
		return t, bad(errs.Invalid, "expiresAt %s is more than a hundred years ahead; create the sandbox without a timeout to keep it "+
			"until it is deleted", at)
	case rec.Expires.IsZero():
		return t, bad(errs.WrongState, "sandbox %s has no timeout and lives until it is deleted; there is nothing to renew", rec.ID)
	}
	return t, nil
}
