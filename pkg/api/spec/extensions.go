package spec

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Limits of what a creation asks for as an extension.
const (
	maxAllow    = 1024     // rules of sandboxd.allow and sandboxd.rules
	maxExts     = 64       // extensions
	maxExtBytes = 64 << 10 // of all of them, sandboxd.allow among them
)

// applyExtensions reads the extensions whose names we know. It refuses unknown names
// that begin with "sandboxd.", and keeps all others as they are.
func (o *Offer) applyExtensions(spec *record.Spec, req *wire.CreateRequest) error {
	if err := checkSize(req.Extensions); err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(req.Extensions)) {
		v := req.Extensions[k]
		var err error
		switch k {
		case wire.ExtName:
			spec.Name, err = v, checkName(v)
		case wire.ExtRuntime:
			spec.Runtime = v
			if !slices.Contains(o.Runtimes, v) {
				err = httperr.Invalid("extension %s %q is not a runtime of this host; its runtimes are %s", k, httperr.Clip(v, 40),
					strings.Join(o.Runtimes, ", "))
			}
		case wire.ExtSecurity:
			spec.Security, err = o.security(v)
		case wire.ExtOneShot:
			spec.OneShot, err = extBool(k, v)
		case wire.ExtIdle:
			_, err = extBool(k, v)
		case wire.ExtMemory:
			spec.Memory, err = extBool(k, v)
		case wire.ExtLiteral:
			spec.Literal, err = extBool(k, v)
		case wire.ExtImageCommand:
			spec.ImageCommand, err = extBool(k, v)
		case wire.ExtHostname:
			spec.Hostname, err = v, checkHostname(v)
		case wire.ExtStopSignal:
			spec.StopSignal = v
			if record.Signal(v) == 0 {
				err = httperr.Invalid("extension %s %q: want a signal: a name, such as SIGQUIT, QUIT or RTMIN+3, or a number from 1 to 64",
					k, httperr.Clip(v, 40))
			}
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
		// all at once
		case wire.ExtReadyCmd, wire.ExtReadyPort, wire.ExtReadyInterval, wire.ExtReadyTimeout, wire.ExtReadyRetries,
			wire.ExtReadyStartPeriod, wire.ExtIdleAfter, wire.ExtIdleAction:
		case wire.ExtRenew:
			_, err = ParseRenew(v)
		case wire.ExtNetwork, wire.ExtAllow, wire.ExtRules, wire.ExtPolicy, wire.ExtTimeout, wire.ExtPool: // below and elsewhere
		default:
			if strings.HasPrefix(k, "sandboxd.") {
				err = httperr.Invalid(
					"extension %q is unknown; the extensions of sandboxd are name, hostname, stop-signal, runtime, security, "+
						"network, allow, rules, policy, timeout, oneshot, idle, memory, image-command, literal, readonly, tmpfs, "+
						"prestart, publish, restart, ready.cmd, ready.port, ready.interval, ready.timeout, ready.retries, "+
						"ready.start-period, idle.after and idle.action, each after \"sandboxd.\"",
					httperr.Clip(k, 60))
			} else if len(k)+len(v) > 4096 {
				err = httperr.Invalid("extension %q is longer than 4096 bytes", httperr.Clip(k, 60))
			}
		}
		if err != nil {
			return err
		}
	}
	if spec.SecureAccess && len(spec.Publish) > 0 {
		return httperr.Invalid(
			"secureAccess and extension %s are both given: clients of a published port send no token; leave one out", wire.ExtPublish)
	}
	if err := applyHealth(spec, req.Extensions); err != nil {
		return err
	}
	if err := applyIdle(spec, req.Extensions); err != nil {
		return err
	}
	if err := o.applyNamed(spec, req); err != nil {
		return err
	}
	return o.applyNetworkExtensions(spec, req)
}

// checkSize refuses more extensions than anybody needs.
func checkSize(extensions map[string]string) error {
	if len(extensions) > maxExts {
		return httperr.Invalid("extensions has %d entries; at most %d are allowed", len(extensions), maxExts)
	}
	total := 0
	for k, v := range extensions {
		total += len(k) + len(v)
	}
	if total > maxExtBytes {
		return httperr.Invalid("extensions is larger than the maximum of %d KiB in total, %s included", maxExtBytes>>10, wire.ExtAllow)
	}
	return nil
}

func (o *Offer) applyNetworkExtensions(spec *record.Spec, req *wire.CreateRequest) error {
	mode, hasMode := req.Extensions[wire.ExtNetwork]
	allow, hasAllow := req.Extensions[wire.ExtAllow]
	rules, hasRules := req.Extensions[wire.ExtRules]
	if !hasMode && !hasAllow && !hasRules {
		return nil
	}
	if given(req.NetworkPolicy) {
		return httperr.Invalid("networkPolicy and the extensions %s, %s or %s are both given; use one of them", wire.ExtNetwork,
			wire.ExtAllow, wire.ExtRules)
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
	if err := o.addRules(spec, wire.ExtRules, rules); err != nil {
		return err
	}
	return o.addRules(spec, wire.ExtAllow, allow)
}

// addRules adds the rules of an extension to those of a sandbox. Without its action, as in
// ExtAllow, a rule allows.
func (o *Offer) addRules(spec *record.Spec, ext, list string) error {
	if strings.TrimSpace(list) == "" {
		return nil
	}
	if spec.Network.Mode == record.NetworkNone {
		return httperr.Invalid("extension %s has rules, but %s is none, which allows nothing; set it to rules", ext, wire.ExtNetwork)
	}
	for text := range strings.SplitSeq(list, ",") {
		if len(spec.Network.Rules) == maxAllow {
			return httperr.Invalid("extension %s has more than %d rules; join ranges into one CIDR, or send a networkPolicy", ext, maxAllow)
		}
		rule, err := o.parseRule(ext, strings.TrimSpace(text))
		if err != nil {
			return errs.Wrap(err, errs.Invalid, "extension %s: rule %q: %s", ext, httperr.Clip(text, 80), httperr.Clip(err.Error(), 300))
		}
		spec.Network.Rules = append(spec.Network.Rules, rule)
	}
	return nil
}

// parseRule reads a rule of an extension.
func (o *Offer) parseRule(ext, text string) (record.Rule, error) {
	action, target := "allow", text
	if ext == wire.ExtRules {
		ok := false
		if action, target, ok = strings.Cut(text, "="); !ok || action != "allow" && action != "deny" {
			return record.Rule{}, errs.New(errs.Invalid, "want allow=TARGET or deny=TARGET, such as allow=pypi.org:443")
		}
	}
	rule, err := o.ParseRule(target)
	if err != nil {
		return rule, err
	}
	rule.Allow = action == "allow"
	return rule, o.reachable(rule)
}

// parsePrestart reads the languages whose code contexts are to be made at the start.
func parsePrestart(v string) (languages []string, err error) {
	for name := range strings.SplitSeq(v, ",") {
		name = strings.TrimSpace(name)
		if !slices.Contains(agent.CodeLanguages, name) {
			return nil, httperr.Invalid("extension %s: %q is not a language of code contexts; the languages are %s", wire.ExtPrestart,
				httperr.Clip(name, 40), strings.Join(agent.CodeLanguages, ", "))
		}
		if !slices.Contains(languages, name) {
			languages = append(languages, name)
		}
	}
	return languages, nil
}

// security reads the level of security that a creation asks for.
func (o *Offer) security(v string) (record.Security, error) {
	if level := record.Security(v); slices.Contains(o.SecurityLevels, level) {
		return level, nil
	}
	var levels []string
	for _, l := range o.SecurityLevels {
		levels = append(levels, string(l))
	}
	return "", httperr.Invalid("extension %s %q is not a level of this host; its levels are %s (the daemon's configuration lists them: "+
		"security.levels)", wire.ExtSecurity, httperr.Clip(v, 40), strings.Join(levels, ", "))
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

// ParseRenew reads access.renew.extend.seconds: how long an access keeps a sandbox alive.
func ParseRenew(v string) (time.Duration, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < 300 || n > 86400 || strings.HasPrefix(v, "+") {
		return 0, httperr.Invalid("extension %s %q: want whole seconds from 300 to 86400", wire.ExtRenew, httperr.Clip(v, 20))
	}
	return time.Duration(n) * time.Second, nil
}
