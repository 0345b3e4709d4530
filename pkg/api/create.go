package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// create answers when the intent is durable, and with ?wait=true or "Prefer:
// wait" when the sandbox runs or has failed.
func (s *Server) create(w http.ResponseWriter, r *http.Request) error {
	wait, err := wantsWait(r)
	if err != nil {
		return err
	}
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	once, err := s.request(r, body)
	if err != nil {
		return err
	}
	rec, again, err := s.madeBy(r, once)
	if err == nil && !again {
		rec, err = s.createOf(r, body, once)
		if isRace(err) {
			rec, again, err = s.madeBy(r, once)
		}
	}
	if err != nil {
		return err
	}
	infoOf(r).sandbox = rec.ID
	if again {
		w.Header().Set(wire.HeaderReplayed, "true")
	}
	if wait {
		if rec, err = s.await(w, r, rec.ID); err != nil {
			return err
		}
	}
	out := s.show(rec)
	out.Image, out.SnapshotID = nil, "" // the create answer of OpenSandbox has none
	writeJSON(w, http.StatusAccepted, out)
	return nil
}

// createOf makes a sandbox of a body.
func (s *Server) createOf(r *http.Request, body []byte, once record.Request) (record.Record, error) {
	var req wire.CreateRequest
	if err := unmarshal(body, &req); err != nil {
		return record.Record{}, err
	}
	spec, err := s.toSpec(&req)
	if err != nil {
		return record.Record{}, err
	}
	if err := s.origin(r.Context(), &spec, &req); err != nil {
		return record.Record{}, err
	}
	spec.Image.Config.Labels = nil // the image's; not for each record of a sandbox to repeat
	spec.Request = once
	rec, err := s.sandboxes.Create(withAuth(admission.By(r.Context(), s.client(r)), req.Image), spec)
	if err != nil {
		return rec, fmt.Errorf("create a sandbox of %s: %w", spec.Image.Ref(), err)
	}
	return rec, nil
}

// waitLimit is how long an answer waits for a sandbox: less than clients do for
// the beginning of one. Behind a long queue it is then as it is: Pending.
const waitLimit = 90 * time.Second

// await waits until a sandbox is no longer being brought up, and if it has a
// probe until it is ready, unhealthy or ended; it says in the answer how long
// each step took.
func (s *Server) await(w http.ResponseWriter, r *http.Request, id string) (record.Record, error) {
	ctx, cancel := context.WithTimeout(r.Context(), s.waitLimit)
	defer cancel()
	rec, err := s.sandboxes.Await(ctx, id)
	if err != nil && ctx.Err() != nil && r.Context().Err() == nil {
		return s.sandboxes.Get(r.Context(), id)
	}
	if err != nil {
		return rec, fmt.Errorf("wait for sandbox %s: %w", id, err)
	}
	if rec, err = s.awaitReady(ctx, r.Context(), rec); err != nil {
		return rec, fmt.Errorf("wait until sandbox %s is ready: %w", id, err)
	}
	if t := serverTiming(s.sandboxes.Steps(id)); t != "" {
		w.Header().Set("Server-Timing", t)
	}
	w.Header().Set("Preference-Applied", "wait")
	return rec, nil
}

// origin finds the files that a sandbox begins with.
func (s *Server) origin(ctx context.Context, spec *record.Spec, req *wire.CreateRequest) (err error) {
	if req.SnapshotID != "" {
		return s.fromSnapshot(ctx, spec, req.SnapshotID)
	}
	spec.Image, err = s.images.Resolve(ctx, req.Image.URI)
	if errs.Is(err, errs.NotFound) && s.images.CanPull(req.Image.URI) {
		spec.Image, err = image.Kept(req.Image.URI), nil // it is pulled when the sandbox is brought up
	}
	if errs.Is(err, errs.NotFound) {
		return errs.Wire(err, "IMAGE::NOT_FOUND")
	}
	if err != nil {
		return fmt.Errorf("resolve image %q: %w", httperr.Clip(req.Image.URI, 200), err)
	}
	spec.ImageURI = req.Image.URI
	return nil
}

func wantsWait(r *http.Request) (bool, error) {
	for _, p := range r.Header.Values("Prefer") {
		for part := range strings.SplitSeq(p, ",") {
			if name, _, _ := strings.Cut(strings.TrimSpace(part), "="); strings.EqualFold(name, "wait") {
				return true, nil
			}
		}
	}
	v := r.URL.Query().Get("wait")
	if v == "" {
		return false, nil
	}
	b, err := parseBool(v)
	if err != nil {
		return false, httperr.Invalid("wait %q: want true or false", httperr.Clip(v, 20))
	}
	return b, nil
}

// parseBool also takes Python's True and False.
func parseBool(v string) (bool, error) { return strconv.ParseBool(strings.ToLower(v)) }

// serverTiming writes steps as in https://www.w3.org/TR/server-timing, in milliseconds.
func serverTiming(steps []Step) string {
	var b strings.Builder
	for _, st := range steps {
		if b.Len() > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s;dur=%.3f", st.Name, float64(st.Took)/float64(time.Millisecond))
	}
	return b.String()
}

// toSpec checks all of a request but the image's existence.
func (s *Server) toSpec(req *wire.CreateRequest) (record.Spec, error) {
	spec := record.Spec{
		Entrypoint: req.Entrypoint, Labels: req.Metadata, ResourceLimits: req.ResourceLimits,
		Extensions: req.Extensions, Runtime: s.cfg.Runtime, SecureAccess: req.SecureAccess,
	}
	if err := refuse(req); err != nil {
		return spec, err
	}
	if req.SnapshotID != "" && len(req.Entrypoint) == 0 && req.Extensions[wire.ExtIdle] != "true" {
		req.Entrypoint = []string{"tail", "-f", "/dev/null"} // as the lifecycle document says
		spec.Entrypoint = req.Entrypoint
	}
	for _, check := range []func() error{
		func() error { return checkLabels(req.Metadata) },
		func() error { return s.applyLimits(&spec, req.ResourceLimits) },
		func() error { return applyEnv(&spec, req.Env) },
		func() error { return applyPlatform(&spec, req.Platform) },
		func() error { return s.applyPolicy(&spec, req.NetworkPolicy) },
		func() error { return s.applyExtensions(&spec, req) },
		func() error { return s.applyVolumes(&spec, req.Volumes) },
		func() error { return s.applyTimeout(&spec, req) },
		func() error { return checkEntrypoint(req) },
	} {
		if err := check(); err != nil {
			return spec, err
		}
	}
	return spec, nil
}

// refuse says no to what this release can not do, and to what never makes sense.
func refuse(req *wire.CreateRequest) error {
	switch {
	case req.TemplateID != "":
		return errs.Wire(errs.New(errs.Unsupported, "templateId: templates are built by OpenSandbox's Kubernetes runtime, which this is not; name an image, or a snapshot by snapshotId"), "FSB::API_NOT_SUPPORTED")
	case given(req.Lifecycle):
		return errs.Wire(errs.New(errs.Unsupported, "lifecycle: preStart and periodic hooks are not run here, so the sandbox would not be what was asked for; leave it out, and start such commands by the entrypoint or the command API (%s tells when a sandbox is ready)", wire.ExtReadyCmd), "SANDBOX::INVALID_PARAMETER")
	case req.Extensions[wire.ExtPool] != "":
		return errs.Wire(errs.New(errs.Unsupported, "extensions.poolRef: a single host has no pools; leave it out and name an image"), "SANDBOX::UNSUPPORTED_POOL_REF")
	case req.Image != nil && req.SnapshotID != "":
		return httperr.Invalid("image and snapshotId are both given; a sandbox starts from one of them")
	case len(req.SnapshotID) > maxSnapshotName:
		return httperr.Invalid("snapshotId has %d characters; no snapshot here has an id or a name that long", len(req.SnapshotID))
	case req.SnapshotID != "": // no image to look at
	case req.Image == nil:
		return httperr.Invalid("image is missing; send {\"image\":{\"uri\":\"python\"}} (`sandboxctl image ls` lists what there is)")
	case strings.TrimSpace(req.Image.URI) == "":
		return httperr.Invalid("image.uri is empty; send the name of an image (`sandboxctl image ls` lists what there is)")
	case len(req.Image.URI) > 512:
		return httperr.Invalid("image.uri has %d characters; no image here has a name longer than 512", len(req.Image.URI))
	default:
		if err := checkAuth("image.auth", req.Image.Auth); err != nil {
			return err
		}
	}
	switch {
	case req.CredentialProxy != nil && req.CredentialProxy.Enabled:
		return errs.Wire(errs.New(errs.Unsupported, "credentialProxy comes with a later release; leave it out"), "SANDBOX::INVALID_PARAMETER")
	}
	return nil
}

func checkEntrypoint(req *wire.CreateRequest) error {
	idle := req.Extensions[wire.ExtIdle] == "true"
	if len(req.Entrypoint) == 0 {
		if idle {
			return nil
		}
		return errs.Wire(httperr.Invalid("entrypoint is missing; send the command to run, as [\"tail\",\"-f\",\"/dev/null\"], or extension %s=true for none", wire.ExtIdle), "DOCKER::INVALID_ENTRYPOINT")
	}
	total := 0
	for i, a := range req.Entrypoint {
		total += len(a) + 1
		if strings.ContainsRune(a, 0) {
			return errs.Wire(httperr.Invalid("entrypoint[%d] holds a NUL byte, which no argument can", i), "DOCKER::INVALID_ENTRYPOINT")
		}
	}
	switch {
	case idle:
		return httperr.Invalid("both an entrypoint and extension %s=true are given; leave one out", wire.ExtIdle)
	case req.Entrypoint[0] == "":
		return errs.Wire(httperr.Invalid("entrypoint[0] is empty; it names the program to run"), "DOCKER::INVALID_ENTRYPOINT")
	case total > maxArgBytes || len(req.Entrypoint) > maxArgs:
		return errs.Wire(httperr.Invalid("entrypoint has %d arguments of %d bytes; at most %d of %d fit", len(req.Entrypoint), total, maxArgs, maxArgBytes), "DOCKER::INVALID_ENTRYPOINT")
	}
	return nil
}

// envLifecycle is how OpenSandbox hands hooks to its agent.
const envLifecycle = "OPENSANDBOX_LIFECYCLE"

func applyEnv(spec *record.Spec, env map[string]*string) error {
	if len(env) > maxEnv {
		return httperr.Invalid("env has %d variables; at most %d are taken", len(env), maxEnv)
	}
	total := 0
	for _, k := range slices.Sorted(maps.Keys(env)) {
		v := env[k]
		switch {
		case v == nil: // Python's SDK sends null for "not set"
			continue
		case k == "" || strings.ContainsAny(k, "=\x00"):
			return httperr.Invalid("env: %q can not be the name of a variable; it must not be empty nor hold = or NUL", httperr.Clip(k, 80))
		case k == envLifecycle:
			return httperr.Invalid("env: %s is reserved by OpenSandbox for lifecycle hooks, which are not run here; leave it out", k)
		case strings.ContainsRune(*v, 0):
			return httperr.Invalid("env: the value of %q holds a NUL byte, which no variable can", httperr.Clip(k, 80))
		}
		if total += len(k) + len(*v) + 2; total > maxEnvBytes {
			return httperr.Invalid("env is larger than %d KiB in all; put the data into a file", maxEnvBytes>>10)
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
		return httperr.Invalid("platform needs both os and arch, as {\"os\":\"linux\",\"arch\":\"%s\"}", runtime.GOARCH)
	case p.OS != "linux" || p.Arch != runtime.GOARCH:
		return httperr.Invalid("platform %s/%s can not run here; this host is linux/%s", httperr.Clip(p.OS, 20), httperr.Clip(p.Arch, 20), runtime.GOARCH)
	}
	spec.Platform = map[string]string{"os": p.OS, "arch": p.Arch}
	return nil
}

func (s *Server) applyTimeout(spec *record.Spec, req *wire.CreateRequest) error {
	ext, has := req.Extensions[wire.ExtTimeout]
	switch {
	case has && req.Timeout != nil:
		return httperr.Invalid("timeout and extension %s are both given; leave one out", wire.ExtTimeout)
	case has:
		d, err := time.ParseDuration(ext)
		if err != nil || d < time.Second {
			return httperr.Invalid("extension %s %q: want a duration of at least 1s, as 90s or 30m", wire.ExtTimeout, httperr.Clip(ext, 40))
		}
		spec.Timeout = d
	case req.Timeout != nil:
		n := *req.Timeout
		if n < 60 {
			return httperr.Invalid("timeout %d: want at least 60 seconds, or none for a sandbox that lives until it is deleted (extension %s takes shorter ones)", n, wire.ExtTimeout)
		}
		if n > int64(100*365*24*time.Hour/time.Second) {
			return httperr.Invalid("timeout %d is more than a hundred years; leave it out for a sandbox that lives until it is deleted", n)
		}
		spec.Timeout = time.Duration(n) * time.Second
	}
	if spec.Timeout == 0 {
		spec.Timeout = s.cfg.MaxTimeout // 0: no limit
	}
	if s.cfg.MaxTimeout > 0 && spec.OneShot { // a lease: whoever holds it renews it
		spec.Timeout = min(spec.Timeout, s.cfg.MaxTimeout)
	}
	if s.cfg.MaxTimeout > 0 && spec.Timeout > s.cfg.MaxTimeout {
		return httperr.Invalid("timeout of %s is longer than this host allows; the longest is %s", spec.Timeout, s.cfg.MaxTimeout)
	}
	if spec.Timeout > 100*365*24*time.Hour {
		return httperr.Invalid("a timeout of %s is more than a hundred years; leave it out for a sandbox that lives until it is deleted", spec.Timeout)
	}
	return nil
}

// applyPolicy takes OpenSandbox's networkPolicy. An absent default is deny, so
// {} denies all; null is as good as absent.
func (s *Server) applyPolicy(spec *record.Spec, raw json.RawMessage) error {
	spec.Network.Mode = s.cfg.Network
	if !given(raw) {
		return nil
	}
	n, err := s.parsePolicy(raw)
	if err != nil {
		return err
	}
	var kept bytes.Buffer
	if err := json.Compact(&kept, raw); err != nil || kept.Len() > maxPolicy {
		return httperr.Invalid("networkPolicy has %d bytes; at most %d are kept", kept.Len(), maxPolicy)
	}
	spec.Network, spec.NetworkPolicy = n, kept.Bytes()
	return nil
}

func given(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

// applyExtensions reads what is ours of extensions, and checks what we know.
func (s *Server) applyExtensions(spec *record.Spec, req *wire.CreateRequest) error {
	if len(req.Extensions) > maxExts {
		return httperr.Invalid("extensions has %d entries; at most %d are kept", len(req.Extensions), maxExts)
	}
	total := 0
	for k, v := range req.Extensions {
		total += len(k) + len(v)
	}
	if total > maxExtBytes {
		return httperr.Invalid("extensions is larger than %d KiB in all, %s included; at most that is kept", maxExtBytes>>10, wire.ExtAllow)
	}
	for _, k := range slices.Sorted(maps.Keys(req.Extensions)) {
		v := req.Extensions[k]
		var err error
		switch k {
		case wire.ExtName:
			spec.Name, err = v, checkName(v)
		case wire.ExtRuntime:
			spec.Runtime = v
			if !slices.Contains(s.cfg.Runtimes, v) {
				err = httperr.Invalid("extension %s %q is not a runtime of this host; there are: %s", k, httperr.Clip(v, 40), strings.Join(s.cfg.Runtimes, ", "))
			}
		case wire.ExtOneShot:
			spec.OneShot, err = extBool(k, v)
		case wire.ExtIdle:
			_, err = extBool(k, v)
		case wire.ExtReadOnly:
			spec.ReadOnly, err = extBool(k, v)
		case wire.ExtTmpfs:
			spec.Tmpfs, err = parseTmpfs(v, spec.MemoryBytes)
		case wire.ExtPublish:
			spec.Publish, err = parsePublish(v)
		case wire.ExtPrestart:
			spec.Prestart, err = parsePrestart(v)
		case wire.ExtRestart:
			spec.Restart, err = parseRestart(v)
		case wire.ExtReadyCmd, wire.ExtReadyPort, wire.ExtReadyInterval, wire.ExtReadyTimeout, wire.ExtReadyRetries, wire.ExtReadyStartPeriod: // all at once
		case wire.ExtRenew:
			_, err = renewSeconds(v)
		case wire.ExtNetwork, wire.ExtAllow, wire.ExtTimeout, wire.ExtPool: // below and elsewhere
		default:
			if strings.HasPrefix(k, "sandboxd.") {
				err = httperr.Invalid("extension %q is unknown; ours are name, runtime, network, allow, timeout, oneshot, idle, readonly, tmpfs, prestart, publish, restart, ready.cmd, ready.port, ready.interval, ready.timeout, ready.retries and ready.start-period, each after \"sandboxd.\"", httperr.Clip(k, 60))
			} else if len(k)+len(v) > 4096 {
				err = httperr.Invalid("extension %q is longer than 4096 bytes", httperr.Clip(k, 60))
			}
		}
		if err != nil {
			return err
		}
	}
	if spec.SecureAccess && len(spec.Publish) > 0 {
		return httperr.Invalid("secureAccess and extension %s are both given: who connects to a published port sends no token; leave one out", wire.ExtPublish)
	}
	if err := applyHealth(spec, req.Extensions); err != nil {
		return err
	}
	return s.applyNetworkExtensions(spec, req)
}

func (s *Server) applyNetworkExtensions(spec *record.Spec, req *wire.CreateRequest) error {
	mode, hasMode := req.Extensions[wire.ExtNetwork]
	allow, hasAllow := req.Extensions[wire.ExtAllow]
	if !hasMode && !hasAllow {
		return nil
	}
	if given(req.NetworkPolicy) {
		return httperr.Invalid("networkPolicy and the extensions %s or %s are both given; say it in one place", wire.ExtNetwork, wire.ExtAllow)
	}
	if hasMode {
		switch m := record.NetworkMode(mode); m {
		case record.NetworkNone, record.NetworkRules, record.NetworkOpen:
			spec.Network.Mode = m
		default:
			return httperr.Invalid("extension %s %q: want none, rules or open", wire.ExtNetwork, httperr.Clip(mode, 20))
		}
	} else if spec.Network.Mode == record.NetworkNone {
		spec.Network.Mode = record.NetworkRules // asking for a rule asks for the mode that has rules
	}
	if !hasAllow || strings.TrimSpace(allow) == "" {
		return nil
	}
	if spec.Network.Mode == record.NetworkNone {
		return httperr.Invalid("extension %s has rules, but %s is none, which allows nothing; use rules", wire.ExtAllow, wire.ExtNetwork)
	}
	for text := range strings.SplitSeq(allow, ",") {
		if len(spec.Network.Rules) == maxAllow {
			return httperr.Invalid("extension %s has more than %d rules; join ranges into one CIDR, or send a networkPolicy", wire.ExtAllow, maxAllow)
		}
		rule, err := s.cfg.ParseRule(strings.TrimSpace(text))
		if err != nil {
			return errs.Wrap(err, errs.Invalid, "extension %s: rule %q: %s", wire.ExtAllow, httperr.Clip(text, 80), httperr.Clip(err.Error(), 300))
		}
		rule.Allow = true
		spec.Network.Rules = append(spec.Network.Rules, rule)
	}
	return nil
}

// parsePrestart reads languages of code contexts.
func parsePrestart(v string) (languages []string, err error) {
	for name := range strings.SplitSeq(v, ",") {
		name = strings.TrimSpace(name)
		if !slices.Contains(agent.CodeLanguages, name) {
			return nil, httperr.Invalid("extension %s names %q; contexts can be made of %s", wire.ExtPrestart, httperr.Clip(name, 40), strings.Join(agent.CodeLanguages, ", "))
		}
		if !slices.Contains(languages, name) {
			languages = append(languages, name)
		}
	}
	return languages, nil
}

func extBool(k, v string) (bool, error) {
	switch v {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, httperr.Invalid("extension %s %q: want true or false", k, httperr.Clip(v, 20))
}

// renewSeconds reads access.renew.extend.seconds.
func renewSeconds(v string) (time.Duration, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < 300 || n > 86400 || strings.HasPrefix(v, "+") {
		return 0, httperr.Invalid("extension %s %q: want whole seconds from 300 to 86400", wire.ExtRenew, httperr.Clip(v, 20))
	}
	return time.Duration(n) * time.Second, nil
}

// detached is ctx for what goes on when the request has ended.
func detached(r *http.Request, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), d)
}
