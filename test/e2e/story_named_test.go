package e2e_test

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
)

// TestNamedPolicies edits a policy that sandboxes follow, and kills the daemon in the
// middle: the next one finishes. Then the configuration edits one, by a restart. A rule of
// the host stands before all of them. A push has it on one runtime.
func TestNamedPolicies(t *testing.T) {
	out := newOutside(t)
	h := newHost(t, daemontest.Options{Config: []string{
		"[egress]", fmt.Sprintf("always_deny = [%q]", outsideAddr+":80"),
		"[policies.web]", fmt.Sprintf("rules = [%q]", "allow "+outsideAddr),
	}})
	daemontest.Image(t, h.Daemon, "python")
	for _, runtime := range runtimes {
		if !chosen(runtime, "named policies") {
			continue
		}
		t.Run(runtime, func(t *testing.T) { tellNamedPolicies(t, &lab{host: h, T: t, runtime: runtime, out: out}) })
		h.deleteAll(t)
	}
}

func tellNamedPolicies(t *testing.T, l *lab) {
	const https, http = "tcp " + outsideAddr + " 443", "tcp " + outsideAddr + " 80"
	reaches := func(id, want string) {
		t.Helper()
		l.wantFlows(l.dial(id, https, http), map[string]string{https: want, http: refusedFlow})
	}
	same := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	l.ctl("policy", "rm", "build", "other") // of a run that failed
	same("set", l.ok("policy", "set", "build", "--allow", outsideAddr), "build@1\n")
	follower, paused := l.make("--policy", "build", "--name", "follower", "python"), l.make("--policy", "build", "python")
	stopped, pinned := l.make("--policy", "build", "python"), l.make("--policy", "build@1", "python")
	own := l.make("--policy", "build", "python")
	web := l.make("--policy", "web", "python")
	for _, id := range []string{follower, pinned, own, web} {
		reaches(id, "ok") // and not port 80, which the policy allows and the host denies
	}
	l.ok("pause", paused)
	l.ok("stop", "-t", "0", stopped)
	l.ok("egress", "patch", "--allow", outsideAddr+":443", own)

	// The daemon dies when the new version is durable and nobody has moved.
	l.host.Kill()
	if err := l.host.StartArmed("after:store:policy:put:2=kill"); err != nil { // the first one is of the start: see web
		t.Fatal(err)
	}
	l.ok("policy", "set", "other", "--default", "deny") // which passes the step as well
	if r := l.ctl("policy", "set", "build", "--deny", outsideAddr); r.code == 0 {
		t.Errorf("the daemon lives: %+v", r)
	}
	<-l.host.Ended()
	if err := l.host.TryStart(); err != nil {
		t.Fatal(err)
	}
	l.ok("resume", paused)
	l.ok("start", stopped)
	for id, want := range map[string]string{
		follower: refusedFlow, paused: refusedFlow, stopped: refusedFlow, pinned: "ok", own: "ok", web: "ok",
	} {
		reaches(id, want)
	}
	for id, want := range map[string]string{
		follower: "{build 2 false false}", stopped: "{build 2 false false}", pinned: "{build 1 true false}", own: "{build 1 false true}",
	} {
		same("inspect "+id, fmt.Sprint(*l.inspect(id).Sandboxd.Policy), want)
	}

	l.ok("egress", "set", "--policy", "build", own) // it follows again
	reaches(own, refusedFlow)

	// An edit says which it moves, and holds when that is said, also after a kill.
	moved := l.ok("policy", "set", "build", "--allow", outsideAddr+":443")
	if !strings.HasPrefix(moved, "build@3\n") || strings.Count(moved, "moved ") != 4 || !strings.Contains(moved, "moved follower\n") ||
		!strings.Contains(moved, "moved "+paused+"\n") || !strings.Contains(moved, "moved "+stopped+"\n") {
		t.Errorf("the edit said %q", moved)
	}
	reaches(follower, "ok")
	l.host.Kill()
	if err := l.host.TryStart(); err != nil {
		t.Fatal(err)
	}
	reaches(follower, "ok")
	l.wants(l.ctl("policy", "rm", "build"), 125, "in use by", follower)
	l.wants(l.ctl("policy", "set", "web", "--default", "deny"), 125, "configuration")
	same("ls", l.ok("policy", "ls", "-o", "name"), "build\nother\nweb\n")

	// The configuration is edited by a restart.
	edit := func(from, to string) {
		t.Helper()
		l.host.Stop()
		text, err := os.ReadFile(l.host.Config)
		if err == nil {
			err = os.WriteFile(l.host.Config, bytes.Replace(text, []byte(from), []byte(to), 1), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		l.host.Start()
	}
	before := l.inspect(web).Sandboxd.Policy.Version
	edit(`"allow `, `"deny `)
	reaches(web, refusedFlow)
	same("web", fmt.Sprint(*l.inspect(web).Sandboxd.Policy), fmt.Sprintf("{web %d false false}", before+1))
	edit(`"deny `, `"allow `)
	reaches(web, "ok")
	l.host.deleteAll(t)
	same("rm", l.ok("policy", "rm", "build", "other"), "build\nother\n")
}
