// Package judge decides on the decrypted requests of one sandbox, in its child
// (pkg/egress/terminate).
//
//	daemon: Config.Encode ── terminate.Config ──▶ child: Make ──▶ Judge
//
//	request ─▶ rules: policy.DecideRequest ─▶ vault: inject.Live.Apply ─▶ server
//	             │ denied: 403, an Event        │ denied: 4xx or 502, an Event
//	guest  ◀─────┴──────────────────────────────┘
//	       ◀────────── inject.Use.Mask: a value is an Event ◀── answer ── server
//
// The daemon decides on the name before, and on each socket to the server: what no rule by
// name allows does not come here.
//
// What surprises: the rules see a request as the guest has sent it, with its placeholders. A
// value that comes into the path is one segment there, or part of one. Whoever writes the vault
// writes the rules too, and a guest does not choose values.
package judge

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/egress/vault/inject"
)

// A judge is the Judge of a Config.
type judge struct {
	source netip.Addr
	rules  *policy.Policy
	vault  *inject.Live // nil: none
	last   *inject.Live // vault, or the last one that there was
	daemon terminate.Daemon
}

// Make is a terminate.JudgeMaker for the bytes of Config.Encode. What the Judges before have
// sent is searched for in answers as long as the vault has a credential of that name.
func Make(config []byte, d terminate.Daemon, old terminate.Judge) (terminate.Judge, error) {
	c, err := decode(config)
	if err != nil {
		return nil, err
	}
	j := &judge{source: c.Source, daemon: d}
	if j.rules, err = policy.Compile(c.Host, c.Network); err != nil {
		return nil, err
	}
	if before, ok := old.(*judge); ok {
		j.last = before.last
	}
	if len(c.Vault) == 0 {
		return j, nil
	}
	v, err := vault.Decode(c.Vault)
	if err != nil {
		return nil, err
	}
	j.vault = inject.New(v, inject.Options{Source: j.value, Report: j.report, Replaced: d.Replaced, Mask: c.Mask}, j.last)
	j.last = j.vault
	return j, nil
}

// Request decides on a request, and puts credentials into it.
func (j *judge) Request(r *http.Request, to terminate.Destination) (terminate.Answerer, error) {
	if err := j.allowed(r, to); err != nil {
		return nil, err
	}
	if j.vault == nil {
		return nil, nil
	}
	use, err := j.vault.Apply(r, to.Scheme, to.Name, to.Port)
	switch d, denied := errors.AsType[*inject.Denied](err); {
	case denied:
		return nil, &terminate.Refusal{Status: d.Status, Code: d.Code, Text: d.Text}
	case err != nil:
		return nil, fmt.Errorf("apply the vault: %w", err)
	case use == nil:
		return nil, nil
	}
	return answers{use}, nil
}

// answers are those to a request to a bound host.
type answers struct{ *inject.Use }

// Response looks for values in an answer.
func (a answers) Response(r *http.Response) error { return a.Mask(r) }

// value asks the daemon for the value of a credential.
func (j *judge) value(ctx context.Context, c *vault.Credential) (vault.Secret, error) {
	b, err := j.daemon.Value(ctx, c.Name)
	return vault.NewSecret(string(b)), err
}

// kinds are the kinds of events of the vault.
var kinds = map[inject.Kind]terminate.EventKind{
	inject.Foreign: terminate.Foreign, inject.WrongHost: terminate.WrongHost, inject.WrongPlace: terminate.WrongPlace,
	inject.Malformed: terminate.Malformed, inject.Unavailable: terminate.Unavailable, inject.Echo: terminate.Echo,
}

// report tells the daemon of an event of the vault.
func (j *judge) report(e inject.Event) {
	j.daemon.Event(terminate.Event{
		Kind: kinds[e.Kind], Host: e.Host, Binding: e.Binding, Credential: e.Credential, Place: e.Place, Text: e.Text,
	})
}

// allowed refuses what the rules deny.
func (j *judge) allowed(r *http.Request, to terminate.Destination) error {
	if weak.Off(weak.Judge) {
		return nil
	}
	flow := policy.Flow{Src: j.source, Dst: to.Addr, Proto: unix.IPPROTO_TCP, Port: to.Port}
	path := r.URL.EscapedPath() // as net/http sends it
	if path == "" {
		path = "/" // likewise
	}
	allow, why := j.rules.DecideRequest(flow, to.Name, policy.Request{Method: r.Method, Path: path})
	if allow {
		return nil
	}
	j.daemon.Event(terminate.Event{Kind: terminate.RuleDenied, Host: to.Name, Method: r.Method, Text: why.Text})
	return &terminate.Refusal{
		Status: http.StatusForbidden, Code: "SANDBOX::FORBIDDEN",
		Text: fmt.Sprintf("sandboxd does not send this request, %s %s to %s: %s. %s", short(r.Method, maxWord), short(path, maxText),
			to.Name, because(why), j.instead(flow, to.Name)),
	}
}

const (
	maxWord   = 32  // bytes of a method in a text
	maxText   = 240 // bytes of a path or a rule in a text
	maxPermit = 4   // rules in a text
)

// because says in words why a request is denied.
func because(why policy.Reason) string {
	switch why.Cause {
	case policy.ByRule:
		return fmt.Sprintf("the rule %q of its network policy denies it", short(why.Text, maxText))
	case policy.ByMode:
		return "no rule of its network policy allows it"
	case policy.ByRange:
		return "the address is in a private range, which no rule of its network policy names"
	}
	return short(why.Text, maxText)
}

// instead says what a program may do, or its programmer must ask for.
func (j *judge) instead(f policy.Flow, name string) string {
	permits := j.rules.Permits(f, name, maxPermit+1)
	more := ""
	if len(permits) > maxPermit {
		permits, more = permits[:maxPermit], "\nand others"
	}
	for i := range permits {
		permits[i] = "\n" + short(permits[i], maxText)
	}
	switch {
	case len(permits) > 0:
		return "These rules allow requests to this host, the first that matches decides:" + strings.Join(permits, "") + more
	case j.rules.Open():
		return "Requests to this host that no rule denies are allowed."
	}
	return "No rule allows requests to this host; whoever made the sandbox can change its network policy."
}

// short is the beginning of a text that is longer than most bytes.
func short(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most] + "…"
}
