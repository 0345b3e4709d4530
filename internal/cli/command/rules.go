package command

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// RuleForm is how a rule of a network policy is written.
const RuleForm = "TARGET[:port[-port]][/proto]"

// RequestForm is how a rule about requests is written.
const RequestForm = "METHOD NAME[:port[-port]][/path]"

// Rules are the network rules of a command line, in the order in which they stand there:
// the flags --allow, --deny and --rule share one list.
type Rules []wire.NetworkRule

// Flags adds --allow and --deny.
func (r *Rules) Flags(f *pflag.FlagSet) {
	f.Var(&ruleFlag{"allow", r}, "allow", "allow flows to "+RuleForm+", such as pypi.org:443, *.npmjs.org or 203.0.113.0/24:443; "+
		"of --allow and --deny the first that matches decides; or requests, '"+RequestForm+"', such as 'GET api.example.com/v1/*', where "+
		"METHOD may be *")
	f.Var(&ruleFlag{"deny", r}, "deny", "deny flows to "+RuleForm+", or requests")
}

// RuleFlag adds --rule.
func (r *Rules) RuleFlag(f *pflag.FlagSet) {
	f.Var(&ruleFlag{"", r}, "rule", "either of them, allow=TARGET… or deny=TARGET…, as for OpenSandbox's osb")
}

// Extension returns the extension of a create request that has these rules. The first form
// is also one for daemons of older releases.
func (r Rules) Extension() (key, value string) {
	var targets, all []string
	for _, rule := range r {
		targets, all = append(targets, ruleText(rule)), append(all, rule.Action+"="+ruleText(rule))
		if rule.Action != "allow" {
			key = wire.ExtRules
		}
	}
	if key == "" {
		return wire.ExtAllow, strings.Join(targets, ",")
	}
	return key, strings.Join(all, ",")
}

// ruleFlag is a flag that adds to a list which several have in common.
type ruleFlag struct {
	action string // "": the value begins with it
	rules  *Rules
}

func (f *ruleFlag) Type() string   { return "string" }
func (f *ruleFlag) String() string { return "" }

func (f *ruleFlag) Set(s string) error {
	action, target := f.action, s
	if action == "" {
		ok := false
		if action, target, ok = strings.Cut(s, "="); !ok || action != "allow" && action != "deny" {
			return fmt.Errorf("want allow=TARGET or deny=TARGET, such as allow=pypi.org:443")
		}
	}
	if r, ok := requestRule(action, strings.TrimSpace(target)); ok {
		*f.rules = append(*f.rules, r)
		return nil
	}
	for part := range strings.SplitSeq(target, ",") {
		if part = strings.TrimSpace(part); part == "" {
			return fmt.Errorf("want %s, such as pypi.org:443", RuleForm)
		}
		*f.rules = append(*f.rules, ruleOf(action, part))
	}
	return nil
}

// requestRule splits METHOD NAME[:PORT[-PORT]][/PATH]. It is false for what does not begin with
// a method.
func requestRule(action, s string) (r wire.NetworkRule, ok bool) {
	method, rest, ok := strings.Cut(s, " ")
	if !ok || method != "*" && strings.Trim(method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") != "" {
		return r, false
	}
	name, path, hasPath := strings.Cut(strings.TrimSpace(rest), "/")
	r = ruleOf(action, name)
	r.HTTP = &wire.HTTPRequests{}
	if method != "*" {
		r.HTTP.Methods = []string{method}
	}
	if hasPath {
		r.HTTP.Paths = []string{"/" + path}
	}
	return r, true
}

// Requests is what a rule says of requests, for people; "" if it is about everything.
func Requests(q *wire.HTTPRequests) string {
	if q == nil {
		return ""
	}
	return strings.TrimSpace(strings.Join(q.Methods, ",") + " " + strings.Join(q.Paths, ","))
}

// ruleOf splits TARGET[:PORT[-PORT]][/PROTO]. The daemon says whether the parts make sense,
// and why not.
func ruleOf(action, s string) wire.NetworkRule {
	r := wire.NetworkRule{Action: action, Target: s}
	// What follows the last slash is a protocol unless it begins as a number.
	if i := strings.LastIndexByte(s, '/'); i >= 0 && i+1 < len(s) && (s[i+1] < '0' || s[i+1] > '9') {
		r.Target, r.Protocol = s[:i], s[i+1:]
	}
	if strings.Count(r.Target, ":") != 1 { // IPv6 has more
		return r
	}
	target, ports, _ := strings.Cut(r.Target, ":")
	r.Target, r.Ports = target, []any{ports}
	if n, err := strconv.Atoi(ports); err == nil {
		r.Ports[0] = n
	}
	return r
}

// ruleText is what ruleOf or requestRule has split. It has no comma, which separates rules.
func ruleText(r wire.NetworkRule) string {
	s := r.Target
	if len(r.Ports) > 0 {
		s += ":" + fmt.Sprint(r.Ports[0])
	}
	if q := r.HTTP; q != nil {
		return cmp.Or(strings.Join(q.Methods, ""), "*") + " " + s + strings.ReplaceAll(strings.Join(q.Paths, ""), ",", "%2C")
	}
	if r.Protocol != "" {
		s += "/" + r.Protocol
	}
	return s
}

// maxPolicyFile is more than the daemon takes.
const maxPolicyFile = 2 << 20

// IsPolicyFile reports whether the value of --policy is a file, and not the name of a
// policy: it has a slash, ends in .json or is "-", standard input.
func IsPolicyFile(value string) bool {
	return value == "-" || strings.ContainsRune(value, filepath.Separator) || strings.HasSuffix(value, ".json")
}

// ReadPolicy reads a network policy, {defaultAction, egress}, and puts rules before its
// own. The daemon checks what it says, unknown fields included.
func ReadPolicy(file string, rules Rules) (json.RawMessage, error) {
	in := io.Reader(os.Stdin)
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, errs.Wrap(err, errs.Invalid, "--policy: %s", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxPolicyFile+1))
	if err != nil {
		return nil, errs.Wrap(err, errs.Invalid, "--policy %s: %s", text.Clip(file, 80), err)
	}
	if len(b) > maxPolicyFile {
		return nil, errs.New(errs.Invalid, "--policy %s: larger than %s", text.Clip(file, 80), text.Bytes(maxPolicyFile))
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil || fields == nil {
		return nil, errs.New(errs.Invalid, "--policy %s: want a JSON object such as "+
			`{"defaultAction":"deny","egress":[{"action":"allow","target":"pypi.org"}]}`, text.Clip(file, 80))
	}
	if len(rules) == 0 {
		return b, nil
	}
	var own []json.RawMessage
	if raw, ok := fields["egress"]; ok {
		if err := json.Unmarshal(raw, &own); err != nil {
			return nil, errs.New(errs.Invalid, "--policy %s: egress is not a list of rules", text.Clip(file, 80))
		}
	}
	all := make([]any, 0, len(rules)+len(own))
	for _, r := range rules {
		all = append(all, r)
	}
	for _, r := range own {
		all = append(all, r)
	}
	if fields["egress"], err = json.Marshal(all); err != nil {
		return nil, err
	}
	return json.Marshal(fields)
}
