package e2e_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// egressAPI asks the egress API of a sandbox as SDKs do: by its endpoint and the
// headers of that, without the key.
func (l *lab) egressAPI(method, id, body string) answer {
	l.Helper()
	e, err := l.api.Endpoint(l.Context(), id, 18080)
	if err != nil {
		l.Fatal(err)
	}
	_, path, _ := strings.Cut(e.Endpoint, "/")
	header := []string{"OPEN-SANDBOX-API-KEY", ""}
	for k, v := range e.Headers {
		header = append(header, k, v)
	}
	return l.request(method, "/"+path+"/policy", strings.NewReader(body), header...)
}

func (l *lab) wantPolicy(a answer, mode string) {
	l.Helper()
	var st struct{ Status, Mode string }
	if a.status != 200 || json.Unmarshal([]byte(a.body), &st) != nil || st.Status != "ok" || st.Mode != mode {
		l.Errorf("%d %s; want mode %s", a.status, a.body, mode)
	}
}

// keepsOpen opens a flow, and says hello on it once more when /tmp/go is there.
const keepsOpen = `
import os, socket, sys, time
c = socket.create_connection((sys.argv[1], int(sys.argv[2])), 8)
print("open", flush=True)
while not os.path.exists("/tmp/go"): time.sleep(0.01)
try:
    c.sendall(b"hello")
    print("ok" if c.recv(5) == b"hello" else "no echo", flush=True)
except OSError as e:
    print(type(e).__name__, flush=True)
`

// tellNetworkChange: what a sandbox may reach changes under it, for open flows as well,
// whoever asks for it and also while it is paused.
func tellNetworkChange(t *testing.T, l *lab) {
	id := l.make("python")
	flow := "tcp " + outsideAddr + " 443"
	reaches := func(want string) {
		t.Helper()
		l.wantFlows(l.dial(id, flow), map[string]string{flow: want})
	}
	reaches(refusedFlow)
	l.wantPolicy(l.egressAPI("PATCH", id, fmt.Sprintf(`[{"action":"allow","target":%q}]`, outsideAddr)), "enforcing")
	reaches("ok")

	cmd := strings.TrimSpace(l.ok("exec", "-d", id, "--", "python3", "-c", keepsOpen, outsideAddr, "443"))
	said := func(want string) {
		t.Helper()
		eventually(t, patience, func() error {
			if out := l.ok("command", "logs", id, cmd); out != want {
				return fmt.Errorf("it said %q, not %q", out, want)
			}
			return nil
		})
	}
	said("open\n")
	l.wantPolicy(l.egressAPI("DELETE", id, fmt.Sprintf(`[%q]`, outsideAddr+"/32")), "deny_all")
	reaches(refusedFlow)
	l.ok("exec", id, "--", "touch", "/tmp/go")
	said("open\nConnectionResetError\n") // what was open and is denied now has ended

	at := "/v1/sandboxes/" + id + "/networkpolicy"
	l.wantPolicy(l.request("PUT", at, strings.NewReader(`{"defaultAction":"allow","egress":[{"action":"deny","target":"203.0.113.0/24","ports":[443],"protocol":"tcp"}]}`)), "enforcing")
	l.wantFlows(l.dial(id, flow, "tcp "+outsideAddr+" 80", "tcp "+outsideHost+" 443", "tcp 169.254.169.254 80"), map[string]string{
		flow: refusedFlow, "tcp " + outsideAddr + " 80": "ok", "tcp " + outsideHost + " 443": refusedFlow,
		"tcp 169.254.169.254 80": refusedFlow,
	})
	l.ok("pause", id)
	l.wantPolicy(l.request("PATCH", at, strings.NewReader(fmt.Sprintf(`[{"action":"allow","target":%q,"ports":[443]}]`, outsideAddr))),
		"enforcing")
	l.ok("resume", id)
	reaches("ok")
	if rules := l.inspect(id).Rules; len(rules) != 2 || rules[0] != "allow "+outsideAddr+"/32:443" {
		t.Errorf("inspect shows %q", rules)
	}
	if rules := l.ok("egress", "rm", id, outsideAddr) + l.ok("egress", "get", "-o", "name", id); rules != outsideAddr+"\n203.0.113.0/24\n" {
		t.Errorf("egress rm and get printed %q", rules)
	}
	reaches(refusedFlow)
	l.ok("egress", "patch", "--allow", outsideAddr+":443/tcp", id)
	reaches("ok")
	if a := l.egressAPI("PATCH", id, `[{"action":"allow","target":"2001:db8::1"}]`); a.status != 400 || !strings.Contains(a.body, "IPv6") ||
		!strings.HasPrefix(a.header.Get("Content-Type"), "text/plain") {
		t.Errorf("IPv6: %d %s", a.status, a.body)
	}
	before := l.flowLog(id)
	l.ok("stop", id)
	if a := l.request("PATCH", at, strings.NewReader(`[{"action":"allow","target":"1.2.3.4"}]`)); a.status != 409 {
		t.Errorf("of one that was stopped: %d %s", a.status, a.body)
	}
	ended := l.flowLog(id)
	l.ok("start", id)
	reaches("ok") // its next life has the policy of its last
	l.wantFlowLog(before, ended, l.flowLog(id))
}

// flowLog is what a sandbox has sent, received and connected to, as sandboxctl shows it.
type flowLog struct {
	flows wire.NetworkFlows
	stats wire.NetworkStats
}

func (l *lab) flowLog(id string) (f flowLog) {
	l.Helper()
	var stats []wire.NetworkStats
	for args, v := range map[string]any{"flows": &f.flows, "stats --no-stream": &stats} {
		out := l.ok(append(append([]string{"network"}, strings.Fields(args)...), "-o", "json", id)...)
		if err := json.Unmarshal([]byte(out), v); err != nil {
			l.Fatalf("network %s: %v: %s", args, err, out)
		}
	}
	f.stats = stats[0]
	return f
}

// wantFlowLog holds that tellNetworkChange was counted, and that nothing of it was lost when
// the sandbox was stopped, and started with another link.
func (l *lab) wantFlowLog(before, ended, now flowLog) {
	l.Helper()
	if was, then, is := before.stats, ended.stats, now.stats; then.RxBytes < was.RxBytes || then.TxPackets < was.TxPackets ||
		then.Allowed != was.Allowed || is.RxBytes <= then.RxBytes || is.TxBytes <= then.TxBytes || is.Allowed <= then.Allowed ||
		is.Denied < then.Denied {
		l.Errorf("before the stop %+v, after it %+v, after the start %+v", was, then, is)
	}
	to := func(f flowLog, addr string, port uint16) (c wire.Connections) {
		for _, flow := range f.flows.Flows {
			if flow.Destination == addr && flow.Port == port && flow.Protocol == "tcp" {
				c = flow.Connections
			}
		}
		return c
	}
	if was, is := to(before, outsideAddr, 443), to(now, outsideAddr, 443); was.Allowed < 4 || was.Denied < 4 || is.Allowed <= was.Allowed ||
		!is.FirstSeen.Equal(was.FirstSeen) || !is.LastSeen.After(was.LastSeen) {
		l.Errorf("to %s:443: %+v, later %+v", outsideAddr, was, is)
	}
	if c := to(now, "169.254.169.254", 80); c.Allowed != 0 || c.Denied == 0 {
		l.Errorf("to the metadata service: %+v", c)
	}
}

// TestPolicyRestart kills the daemon right after each change was acknowledged.
func TestPolicyRestart(t *testing.T) {
	out := newOutside(t)
	h := newHost(t, daemontest.Options{})
	daemontest.Image(t, h.Daemon, "python")
	labs := map[string]*lab{}
	for _, runtime := range runtimes {
		l := &lab{host: h, T: t, runtime: runtime, out: out}
		labs[l.make("python")] = l
	}
	flow := "tcp " + outsideAddr + " 443"
	for _, c := range []struct{ body, mode, want string }{
		{`{"egress":[{"action":"allow","target":"` + outsideAddr + `"}]}`, "enforcing", "ok"},
		{``, "deny_all", refusedFlow},
		{`{"defaultAction":"allow"}`, "allow_all", "ok"},
	} {
		for id, l := range labs {
			l.wantPolicy(l.request("PUT", "/v1/sandboxes/"+id+"/networkpolicy", strings.NewReader(c.body)), c.mode)
		}
		h.Kill()
		if err := h.TryStart(); err != nil {
			t.Fatal(err)
		}
		for id, l := range labs {
			l.wantFlows(l.dial(id, flow), map[string]string{flow: c.want})
		}
	}
	h.deleteAll(t)
}

// tellAliases: the names in OpenSandbox's examples mean images of this host. A name of
// another version says so.
func tellAliases(t *testing.T, l *lab) {
	python := l.versions("python")["python"]
	debian, codename, _ := strings.Cut(l.versions("base")["debian"], " ")
	if python == "" || debian == "" || codename == "" {
		t.Fatalf("the images tell python %q, debian %q %q", python, debian, codename)
	}
	for name, c := range map[string]struct {
		image string
		other bool
	}{
		"ubuntu": {"base:latest", true}, "ubuntu:22.04": {"base:latest", true},
		"debian": {"base:latest", false}, "debian:" + codename + "-slim": {"base:latest", false}, "debian:7": {"base:latest", true},
		"python:3": {"python:latest", false}, "python:" + python + "-slim": {"python:latest", false},
		"python:3.1": {"python:latest", true},
	} {
		r := l.ctl("create", "--runtime", l.runtime, name)
		id := strings.TrimSpace(r.out)
		note := "sandboxctl: note: image " + name + " is not on this host; its alias " + c.image
		if r.code != 0 || strings.HasPrefix(r.errout, note) != c.other || strings.Count(r.errout, "\n") > 1 {
			t.Errorf("create %s: %+v", name, r)
		}
		i := l.inspect(id)
		if i.Image.URI != name || i.Sandboxd.ImageName != c.image || (len(i.Sandboxd.Notes) > 0) != c.other {
			t.Errorf("%s became %s, shown as %s, with %q", name, i.Sandboxd.ImageName, i.Image.URI, i.Sandboxd.Notes)
		}
		l.ok("rm", "-f", id)
	}
	l.wants(l.ctl("run", "--runtime", l.runtime, "--memory", "1Ti", "base", "--", "true"), 0, "the memory limit of 1Ti is more than")
	if ps := l.ok("image", "ls"); !strings.Contains(ps, "ubuntu:*") || !strings.Contains(ps, "python:3*") {
		t.Errorf("image ls: %s", ps)
	}
	l.wants(l.ctl("create", "nginx:latest"), 125, "nginx:latest", "image ls", "images.aliases")
	l.wants(l.ctl("image", "rm", "ubuntu"), 125, "not on this host")
}

// versions are those that an image tells of its programs.
func (l *lab) versions(image string) map[string]string {
	l.Helper()
	i, err := l.api.Images().Inspect(l.Context(), image)
	if err != nil {
		l.Fatal(err)
	}
	of := map[string]string{}
	for label, version := range i.Labels {
		if program, ok := strings.CutPrefix(label, "sandboxd.version."); ok {
			of[program] = version
		}
	}
	return of
}

// TestAliasRestart: another configuration changes what a name means for
// sandboxes to come, and not for those there are.
func TestAliasRestart(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[images.aliases]", `"shop/app:*" = "base"`, `"shop/none:*" = "not-built"`}})
	daemontest.Image(t, h.Daemon, "python")
	l := &lab{host: h, T: t, runtime: "runc"}
	l.wants(l.ctl("create", "shop/none:1"), 125, "is an alias of", "image build not-built")
	old := map[string]string{}
	for _, runtime := range runtimes {
		r := spec(runtime, "tail", "-f", "/dev/null")
		r.Image = &wire.Image{URI: "shop/app:1"}
		sb := h.create(t, r)
		if err := h.api.Stop(t.Context(), sb.ID, 0); err != nil {
			t.Fatal(err)
		}
		old[sb.ID] = sb.Sandboxd.ImageDigest
	}
	h.Stop()
	text, err := os.ReadFile(h.Config)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte(`= "base"`), []byte(`= "python"`), 1)
	if err := os.WriteFile(h.Config, text, 0o600); err != nil {
		t.Fatal(err)
	}
	h.Start()
	for id, digest := range old {
		sb, err := h.api.Restart(t.Context(), id, true)
		if err != nil || sb.Status.State != wire.Running || sb.Image.URI != "shop/app:1" || sb.Sandboxd.ImageName != "base:latest" ||
			sb.Sandboxd.ImageDigest != digest {
			t.Errorf("%+v %+v, %v", sb, sb.Sandboxd, err)
		}
	}
	r := spec("runc")
	r.Image = &wire.Image{URI: "shop/app:2"}
	if sb := h.create(t, r); sb.Sandboxd.ImageName != "python:latest" {
		t.Errorf("a new one is of %s", sb.Sandboxd.ImageName)
	}
	h.Stop()
	text = bytes.Replace(text, []byte("[images.aliases]"), []byte("[images]\nother_versions = \"refuse\"\n[images.aliases]"), 1)
	if err := os.WriteFile(h.Config, text, 0o600); err != nil {
		t.Fatal(err)
	}
	h.Start()
	l.wants(l.ctl("create", "shop/app:2"), 125, "images.other_versions")
	l.wants(l.ctl("create", "ubuntu:22.04"), 125, "images.other_versions")
	l.ok("rm", "-f", l.make("python:3"))
	h.deleteAll(t)
}
