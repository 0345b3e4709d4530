package spec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"net"
	"net/url"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// FuzzCreate: a body either becomes a spec within the limits or an error of
// the request; nothing panics.
func FuzzCreate(f *testing.F) {
	f.Add([]byte(`{"image":{"uri":"python"},"entrypoint":["tail","-f","/dev/null"],"timeout":600,"env":{},` +
		`"resourceLimits":{"cpu":"1","memory":"2Gi"},"metadata":{"team":"t1"},"extensions":{},"secureAccess":false}`))
	f.Add([]byte(`{"image":{"uri":"python"},"networkPolicy":{"egress":[{"action":"allow","target":"::ffff:1.2.3.4"}]},` +
		`"extensions":{"sandboxd.idle":"true","sandboxd.allow":"10.0.0.0/8,"}}`))
	f.Add([]byte(`{"image":{"uri":"python"},"resourceLimits":{"cpu":"0.0000001","memory":"9223372036854775807","pids":"+5"}}`))
	f.Add([]byte(`{"image":{"uri":"python"},"networkPolicy":{"egress":[{"action":"allow","target":"a.example","http":{"paths":["/v1/*"]}}]},` +
		`"extensions":{"sandboxd.idle":"true"},"credentialProxy":{"enabled":false}}`))
	f.Add([]byte(`{"image":{"uri":"python"},"extensions":{"sandboxd.idle":"true","sandboxd.rules":"deny=GET a.example/x"}}`))
	o := &Offer{ParseRule: policy.ParseRule, ParsePolicy: policy.FromJSON, NormalName: policy.NormalName, NoVolumes: true}
	o.Complete()
	f.Fuzz(func(t *testing.T, body []byte) {
		var req wire.CreateRequest
		err := Decode(body, &req)
		if err == nil {
			spec, serr := o.Spec(&req)
			err = serr
			if err == nil {
				if spec.MemoryBytes < minMemory || spec.CPUMillis < minMillis || spec.Pids < minPids || len(spec.Labels) > maxLabels ||
					len(spec.Env) > maxEnv || spec.Timeout < 0 || checkStored(&spec, maxSpec) != nil {
					t.Fatalf("out of bounds: %+v", spec)
				}
				asked := req.CredentialProxy != nil && req.CredentialProxy.Enabled
				if spec.Inspect != (asked || spec.Network.AboutRequests()) {
					t.Fatalf("%s: inspected is %v", body, spec.Inspect)
				}
				kept(t, spec)
				return
			}
		}
		if c := errs.CodeOf(err); c != errs.Invalid && c != errs.Unsupported {
			t.Fatalf("%s: %v", c, err)
		}
		if len(err.Error()) > 2000 {
			t.Fatalf("the error echoes %d bytes", len(err.Error()))
		}
	})
}

// kept fails if the store would give back another specification than it gets.
func kept(t *testing.T, spec record.Spec) {
	t.Helper()
	b, err := json.Marshal(spec)
	if err != nil {
		t.Fatalf("%+v cannot be stored: %v", spec, err)
	}
	var back record.Spec
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatalf("%s cannot be read: %v", b, err)
	}
	if again, err := json.Marshal(back); err != nil || !bytes.Equal(again, b) {
		t.Fatalf("%s comes back as %s, %v", b, again, err)
	}
}

func FuzzLabelFilter(f *testing.F) {
	f.Add("a=b&c=d%26e")
	f.Add("%zz")
	f.Add("page=2&pageSize=200&state=Running&name=x")
	f.Fuzz(func(t *testing.T, q string) {
		m, err := parseLabelFilter(q, nil)
		if err == nil && len(m) > maxLabels {
			t.Fatalf("%d pairs", len(m))
		}
		if err == nil { // what it has read can be written, and read again
			v := url.Values{}
			for k, l := range m {
				v.Set(k, l)
			}
			if again, err := parseLabelFilter(v.Encode(), nil); err != nil || !maps.Equal(again, m) {
				t.Fatalf("%q is %q, which comes back as %q, %v", q, m, again, err)
			}
		}
		for _, raw := range []string{q, "metadata=" + q} {
			fl, err := ParseFilter(raw)
			if err != nil {
				if errs.CodeOf(err) != errs.Invalid || len(err.Error()) > 500 {
					t.Fatal(err)
				}
				continue
			}
			for _, total := range []int{0, 1, 201, 100_000} {
				from, to, p := fl.Paginate(total)
				if from < 0 || to < from || to > total || to-from > 200 || p.HasNextPage && to == total {
					t.Fatalf("%q of %d: %d to %d, %+v", raw, total, from, to, p)
				}
			}
		}
	})
}

var (
	sizeSyntax = regexp.MustCompile(`^([0-9]*)(\.[0-9]*)?([a-zA-Z]*)$`)
	cpuSyntax  = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?)(m?)$`)
)

// FuzzValues: an amount is what another reader makes of it, in exact numbers, or is
// refused; and so is a time.
func FuzzValues(f *testing.F) {
	for _, s := range []string{
		"512Mi", "1", "0.5", "500m", "NaN", "1e9", "-1", "", "9223372036854775807Ti", "1.5Gi", ".5Gi", "5.Gi", "0x1.8p40", "1.5e9", "1.5E",
		"2030-01-02T15:04:05Z", "2030-01-02T15:04:05.123456789+24:00", "2030-01-02T15:04:05,5",
	} {
		f.Add(s)
	}
	exact := func(t *testing.T, s, number string, unit int64, n int64) {
		want, ok := new(big.Rat).SetString(number)
		if !ok {
			t.Fatalf("%q is taken for %d", s, n)
		}
		want.Mul(want, big.NewRat(unit, 1))
		off := new(big.Rat).Sub(want, new(big.Rat).SetInt64(n))
		most := new(big.Rat).Mul(want, big.NewRat(1, 1<<50)) // of a float64
		if most.Add(most, big.NewRat(1, 1)); off.Abs(off).Cmp(most) > 0 {
			t.Fatalf("%q is taken for %d, want %s", s, n, want.FloatString(3))
		}
	}
	f.Fuzz(func(t *testing.T, s string) {
		checkRenewal(t, s)
		if len(s) > maxAmount {
			return // refused before
		}
		for _, parse := range []func(string) (int64, error){parseSize, parseStorage} {
			n, err := parse(s)
			if err != nil {
				if errs.CodeOf(err) != errs.Invalid || len(err.Error()) > 500 {
					t.Fatalf("%q: %v", s, err)
				}
				continue
			}
			m := sizeSyntax.FindStringSubmatch(s)
			if m == nil || n < 0 {
				t.Fatalf("size %q is %d", s, n)
			}
			exact(t, s, "0"+m[1]+strings.TrimSuffix(m[2], "."), units[strings.ToLower(m[3])], n)
		}
		if n, err := parseCPU(s); err == nil {
			m := cpuSyntax.FindStringSubmatch(s)
			if m == nil || n < 0 || n > 1e12 {
				t.Fatalf("cpu %q is %d", s, n)
			}
			unit := int64(1000)
			if m[2] == "m" {
				unit = 1
			}
			exact(t, s, m[1], unit, n)
		}
		if n, err := parseCount(s); err == nil && strings.TrimLeft(s, "0-") != strings.TrimLeft(strconv.FormatInt(n, 10), "0-") {
			t.Fatalf("count %q is %d", s, n)
		}
		if n, err := ParsePort(s); err == nil && strconv.Itoa(int(n)) != s {
			t.Fatalf("port %q is %d", s, n)
		}
	})
}

// extensions are those whose values have a syntax of their own.
var extensions = []string{
	wire.ExtName, wire.ExtHostname, wire.ExtTmpfs, wire.ExtPublish, wire.ExtPrestart, wire.ExtRestart, wire.ExtReadyCmd, wire.ExtReadyPort,
	wire.ExtReadyInterval, wire.ExtReadyTimeout, wire.ExtReadyRetries, wire.ExtReadyStartPeriod, wire.ExtRenew, wire.ExtNetwork,
	wire.ExtAllow, wire.ExtTimeout, wire.ExtOneShot, wire.ExtRuntime, wire.ExtStopSignal,
}

// FuzzExtensions: the value of an extension is refused, or what it says is within its
// bounds, can be stored, and is shown as it was sent.
func FuzzExtensions(f *testing.F) {
	for i, v := range []string{
		"lab", "lab.local", "/tmp:size=64m,mode=1777;/run:exec", "8080:80,0.0.0.0:443:443/tcp,[::1]:1:2", "python, bash", "on-failure:3",
		"test -e /tmp/ready", "80", "1s", "100ms", "3", "0", "3600", "rules", "203.0.113.0/24:443/tcp, 1.1.1.1", "90s", "true", "runc",
		"SIGRTMIN+3",
	} {
		f.Add(uint8(i), v)
	}
	o := &Offer{ParseRule: policy.ParseRule, ParsePolicy: policy.FromJSON, NormalName: policy.NormalName}
	o.Complete()
	f.Fuzz(func(t *testing.T, which uint8, v string) {
		key := extensions[int(which)%len(extensions)]
		v = strings.ToValidUTF8(v, "?") // as JSON has it
		req := wire.CreateRequest{
			Image: &wire.Image{URI: "python"}, Entrypoint: []string{"true"}, Extensions: map[string]string{key: v},
		}
		if strings.HasPrefix(key, "sandboxd.ready.") && key != wire.ExtReadyCmd && key != wire.ExtReadyPort {
			req.Extensions[wire.ExtReadyPort] = "80"
		}
		s, err := o.Spec(&req)
		if err != nil {
			if c := errs.CodeOf(err); c != errs.Invalid && c != errs.Unsupported || len(err.Error()) > 2000 {
				t.Fatalf("%s %q: %s: %v", key, v, c, err)
			}
			return
		}
		kept(t, s)
		if n := s.StopWith(); n < 1 || n > 64 || key == wire.ExtStopSignal && s.StopSignal != v {
			t.Fatalf("%q is stopped with %d", v, n)
		}
		for _, m := range s.Tmpfs {
			if !path.IsAbs(m.Path) || path.Clean(m.Path) != m.Path || m.Bytes > s.MemoryBytes || m.Bytes < minTmpfs || m.Mode > 0o1777 {
				t.Fatalf("%q mounts %+v", v, m)
			}
		}
		var shown []string
		for _, p := range showPublish(s.Publish) {
			shown = append(shown, fmt.Sprintf("%s:%d", net.JoinHostPort(p.HostIP, strconv.Itoa(int(p.HostPort))), p.Port))
		}
		if again, err := parsePublish(strings.Join(shown, ",")); len(shown) > 0 && (err != nil || !slices.Equal(again, s.Publish)) {
			t.Fatalf("%q publishes %q, which is read as %v, %v", v, shown, again, err)
		}
		if r := s.Restart; r.Max < 0 || r.Max > maxRestarts || s.Timeout < 0 || s.Ready.Timeout < 0 || s.Ready.Interval < 0 ||
			s.Name != "" && (!IsName(s.Name) || record.IsID(s.Name)) {
			t.Fatalf("%q is %+v", v, s)
		}
	})
}

// FuzzMounts: what is mounted has clean paths without "..", at a place that is not the
// runtime's, and is shown as it was sent.
func FuzzMounts(f *testing.F) {
	f.Add("/data", "a/b", "/srv/x", "", "10Gi")
	f.Add("/data/./x//", "", "", "cache", "1.5Gi")
	f.Add("/proc/../etc", "../x", "relative", "prune", "-1")
	o := &Offer{}
	o.Complete()
	f.Fuzz(func(t *testing.T, at, sub, host, claim, size string) {
		v := wire.VolumeMount{Name: "v", MountPath: at, SubPath: sub}
		if host != "" {
			v.Host = &wire.HostPath{Path: host}
		} else {
			v.PVC = &wire.PVC{ClaimName: claim, Storage: &size}
		}
		m, err := o.toMount(&v, "volumes[0]")
		if err != nil {
			if c := errs.CodeOf(err); c != errs.Invalid || len(err.Error()) > 4*maxSourcePath {
				t.Fatalf("%+v: %s: %v", v, c, err)
			}
			return
		}
		for _, p := range []string{m.Path, m.Sub, m.Source} {
			if p != "" && path.Clean(p) != p || hasDotDot(p) || strings.ContainsRune(p, 0) || len(p) > maxSourcePath {
				t.Fatalf("%+v has the path %q", v, p)
			}
		}
		if record.IsPrivate(m.Path) || !path.IsAbs(m.Path) || path.IsAbs(m.Sub) || m.Source != "" && !path.IsAbs(m.Source) ||
			(m.Source == "") == (m.Claim == "") || m.Bytes < 0 || m.Bytes > maxVolume {
			t.Fatalf("%+v is %+v", v, m)
		}
		shown := toWireMount(m)
		if shown.PVC != nil {
			shown.PVC.Storage = &size
		}
		if again, err := o.toMount(&shown, "volumes[0]"); err != nil || again != m {
			t.Fatalf("%+v is shown as %+v, which is read as %+v, %v", m, shown, again, err)
		}
	})
}

// FuzzPolicies: the policy that is kept and shown is the one that is enforced; merging
// rules in or removing targets twice changes no more than once.
func FuzzPolicies(f *testing.F) {
	f.Add([]byte(`{"defaultAction":"deny","egress":[{"action":"allow","target":"203.0.113.0/24","ports":[443,"8000-8100"],` +
		`"protocol":"tcp"}]}`))
	f.Add([]byte(`{"egress":[{"action":"allow","target":"1.1.1.1","ports":[1]}],"Egress":[{"action":"deny","target":"2.2.2.2"}]}`))
	f.Add([]byte(`[{"action":"allow","target":"1.1.1.1"},{"action":"deny","target":"1.1.1.1/32","ports":["1-2"]}]`))
	f.Add([]byte(`["203.0.113.7"," 203.0.113.7/32"]`))
	f.Add([]byte(`{"egress":[{"action":"allow","target":"a.example","http":{"methods":["GET"]},"HTTP":{"paths":["/v1/*"]}}]}`))
	f.Add([]byte(`[{"action":"deny","target":"api.example","http":{"methods":["PUT","GET"]}},{"action":"allow","target":"API.example",` +
		`"http":{"methods":["GET","PUT"]}},{"action":"allow","target":"api.example","ports":[443],"http":{"paths":["/"]}}]`))
	o := &Offer{ParseRule: policy.ParseRule, ParsePolicy: policy.FromJSON, NormalName: policy.NormalName}
	o.Complete()
	was := wire.NetworkPolicy{DefaultAction: "deny", Egress: []wire.NetworkRule{
		{Action: "allow", Target: "203.0.113.7"},
		{Action: "deny", Target: "203.0.113.0/24", Ports: []any{"1-1023"}},
		{Action: "allow", Target: "api.example", HTTP: &wire.HTTPRequests{Methods: []string{"GET"}}},
	}}
	refused := func(t *testing.T, b []byte, err error) {
		if c := errs.CodeOf(err); c != errs.Invalid && c != errs.Unsupported || len(err.Error()) > 2000 {
			t.Fatalf("%q: %s: %v", b, c, err)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var terms record.Terms
		if edit, err := o.ReplacePolicy(b); err != nil {
			refused(t, b, err)
		} else if err := o.SetPolicy(&terms, edit(was)); err != nil {
			t.Fatalf("%q is a policy, but cannot be set: %v", b, err)
		} else if sent := bytes.TrimSpace(b); len(sent) > 0 && string(sent) != "null" {
			if want, err := policy.FromJSON(sent); err != nil || !reflect.DeepEqual(want, terms.Network) {
				t.Fatalf("%q is %v, and %v is enforced (%v)", b, want, terms.Network, err)
			}
		} else if terms.Network.Mode != record.NetworkRules || len(terms.Network.Rules) > 0 {
			t.Fatalf("%q allows %v", b, terms.Network)
		}
		// The rules alone, as of a policy of the configuration, are shown as they are enforced.
		if shown, err := json.Marshal(PolicyOf(record.Terms{Network: terms.Network}).Policy); err != nil {
			t.Fatal(err)
		} else if back, err := policy.FromJSON(shown); terms.Network.Mode != "" && (err != nil || !sameRules(back, terms.Network)) {
			t.Fatalf("%q is shown as %s, which is %v, %v", b, shown, back, err)
		}
		twice := func(edit Edit) {
			once := edit(was)
			if again := edit(once); !reflect.DeepEqual(again, once) {
				t.Fatalf("%q makes %v, then %v", b, once, again)
			}
			if err := o.SetPolicy(&terms, once); err != nil {
				t.Fatalf("%q makes %v, which cannot be set: %v", b, once, err)
			}
		}
		if edit, err := o.MergeRules(b); err != nil {
			refused(t, b, err)
		} else {
			twice(edit)
		}
		if edit, err := o.RemoveTargets(b); err != nil {
			refused(t, b, err)
		} else {
			twice(edit)
		}
	})
}

// sameRules compares rules, of which none are nil or not.
func sameRules(a, b record.Network) bool {
	return a.Mode == b.Mode && (len(a.Rules)+len(b.Rules) == 0 || reflect.DeepEqual(a.Rules, b.Rules))
}

// checkRenewal fails unless a time that is accepted lies ahead, and can be stored and shown.
func checkRenewal(t *testing.T, text string) {
	t.Helper()
	now := time.Date(2029, 1, 1, 0, 0, 0, 0, time.UTC)
	at, err := Renewal(text, &record.Record{ID: "tabcdefghijk", Expires: now.Add(time.Hour)}, now)
	if err != nil {
		if errs.CodeOf(err) != errs.Invalid || len(err.Error()) > 500 {
			t.Fatalf("%q: %v", text, err)
		}
		return
	}
	b, err := json.Marshal(Micros(at))
	if err != nil || !at.After(now) || at.After(now.AddDate(100, 0, 0)) {
		t.Fatalf("%q is %v, %s, %v", text, at, b, err)
	}
	if again, err := ParseTime(strings.Trim(string(b), `"`)); err != nil || again.Sub(at).Abs() >= time.Microsecond {
		t.Fatalf("%q is %v, which is shown as %s and read as %v, %v", text, at, b, again, err)
	}
}

// checkPatch fails if a patch of labels is accepted that makes labels which a creation would
// refuse.
func checkPatch(t *testing.T, b []byte) {
	t.Helper()
	var patch map[string]*string
	if Decode(b, &patch) != nil {
		return
	}
	labels := map[string]string{"old": "1", "kept": "2"}
	if err := CheckLabelPatch(labels, patch); err != nil {
		if errs.CodeOf(err) != errs.Invalid || len(err.Error()) > 1000 {
			t.Fatalf("%q: %v", b, err)
		}
		return
	}
	for k, v := range patch {
		if delete(labels, k); v != nil {
			labels[k] = *v
		}
	}
	if err := checkLabels(labels); err != nil {
		t.Fatalf("%q makes %q: %v", b, labels, err)
	}
}

// FuzzDecode: a body is refused as by encoding/json, and what nests too deep before that. If
// it is a patch of labels, these are valid afterwards.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"a":["\\\"[",{"b":1e999}]}`))
	f.Add(bytes.Repeat([]byte("["), maxDepth+1))
	f.Add([]byte(`{"team":"a","old":null,"example.com/x":""}`))
	f.Add([]byte(`{"opensandbox.io/x":null,"-":"-"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		checkPatch(t, b)
		var got, want any
		err, werr := Decode(b, &got), json.Unmarshal(b, &want)
		if err == nil && (werr != nil || !reflect.DeepEqual(got, want)) || err != nil && werr == nil && new(Shape).Add(b) == nil {
			t.Fatalf("%q: %v, %v; encoding/json: %v, %v", b, got, err, want, werr)
		}
		if err != nil && (errs.CodeOf(err) != errs.Invalid || len(err.Error()) > 500) {
			t.Fatalf("%q: %v", b, err)
		}
		if werr == nil && depthOf(want) > maxDepth && err == nil {
			t.Fatalf("a depth of %d is accepted", depthOf(want))
		}
	})
}

func depthOf(v any) (deep int) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			deep = max(deep, depthOf(e))
		}
	case map[string]any:
		for _, e := range v {
			deep = max(deep, depthOf(e))
		}
	default:
		return 0
	}
	return deep + 1
}
