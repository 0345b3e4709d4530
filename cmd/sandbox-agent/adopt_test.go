package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

const newToken = "another-token"

// adopt makes x the agent of another sandbox.
func (x *box) adopt(a agent.Adoption) error {
	x.Helper()
	a.Token = newToken
	if a.User == "" {
		a.User = fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid())
	}
	ctx, cancel := context.WithTimeout(x.Context(), 30*time.Second)
	defer cancel()
	err := x.Adopt(ctx, a)
	if err == nil {
		x.talk(newToken)
	}
	return err
}

func (x *box) get(path string) string {
	x.Helper()
	r, _ := http.NewRequestWithContext(x.Context(), "GET", "http://sandbox"+path, nil)
	resp, err := x.RoundTripper().RoundTrip(r)
	if err != nil {
		x.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		x.Fatal(err)
	}
	return string(b)
}

// settles polls for what no event tells.
func (x *box) settles(what string, f func() bool) {
	x.Helper()
	for deadline := time.Now().Add(30 * time.Second); !f(); {
		if time.Now().After(deadline) {
			x.Fatal(what)
		}
		time.Sleep(5 * time.Millisecond) // it is polled
	}
}

// speaks waits for the first words of the entrypoint.
func (x *box) speaks() {
	x.Helper()
	x.settles("the entrypoint says nothing", func() bool { return strings.HasSuffix(x.get("/command/entrypoint/logs"), "\n") })
}

var varies = regexp.MustCompile(`"(id|started_at|timestamp|cpu_used_pct|mem_used_mib)":("[0-9a-f]{32}"|"20[^"]*"|[0-9.e-]+)`)

// printed is the output in a stream of events.
func printed(stream string) string {
	var b strings.Builder
	for line := range strings.Lines(stream) {
		var ev agent.Event
		if json.Unmarshal([]byte(line), &ev) == nil && ev.Type != "init" && ev.Type != "ping" {
			b.WriteString(ev.Text)
		}
	}
	return b.String()
}

// describe is all that can be seen of a sandbox from inside and by its routes.
func (x *box) describe() string {
	x.Helper()
	const show = "id; pwd; umask; uname -n; ulimit -a | grep -v 'max memory size'; " +
		"grep -E '^(Sig(Blk|Ign|Cgt)|Cap|NoNew)' /proc/self/status; " +
		"ls /proc/self/fd | wc -l; readlink /proc/self/fd/0; env | grep -v ^_= | sort"
	var b strings.Builder
	say := func(what, text string) { fmt.Fprintf(&b, "%s:\n%s\n", what, varies.ReplaceAllString(text, `"$1":-`)) }
	x.speaks()
	known := x.get("/command")
	out, _ := x.run(show)
	say("command", out)
	out, _ = x.run(show) // by the shell ahead, perhaps
	say("command again", out)
	say("session", printed(x.session(show)))
	const python = "import os; print(sorted(os.environ.items()), os.getcwd(), os.getuid())"
	say("python", printed(x.code("python", python)))
	say("commands before", known)
	say("entrypoint", x.get("/command/status/entrypoint")+x.get("/command/entrypoint/logs"))
	say("metrics", x.get("/metrics"))
	say("contexts", x.get("/code/contexts"))
	return b.String()
}

// TestClaimedIsAsBooted: an agent that idled and one that boots with the same bootstrap cannot be
// told apart, from inside, by its routes, or by how they end.
func TestClaimedIsAsBooted(t *testing.T) {
	dir, err := os.MkdirTemp("", "claimed")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	script := filepath.Join(dir, "pre.sh")
	if err := os.WriteFile(script, []byte("export FROM_SCRIPT=yes\n"), 0o644); err != nil || os.Chmod(dir, 0o755) != nil {
		t.Fatal(err)
	}
	b := agent.Bootstrap{
		Env:        map[string]string{"WHO": "late", "HOME": "/tmp", "PATH": "/usr/bin:/bin", "EXECD_BOOTSTRAP_PRE_SCRIPT": script},
		Variables:  map[string]string{"KEY": "placeholder"},
		Entrypoint: []string{"sh", "-c", `trap 'kill $! 2>/dev/null; echo over; exit 7' TERM; echo "$WHO $KEY $FROM_SCRIPT in $PWD as $(id -u)"; sleep 1000 & wait`},
		Workdir:    "/usr", Limits: agent.Limits{MemoryBytes: 3 << 30, CPUMillis: 1500, DiskBytes: 1 << 30, Pids: 500},
		Prestart: []string{"python"}, ShellAhead: true,
	}
	if os.Getuid() == 0 {
		b.User = "daemon" // only root can become somebody else
	}
	booted := start(t, b, "")
	claimed := start(t, agent.Bootstrap{
		Env:      map[string]string{"WHO": "member", "GONE": "1", "HOME": t.TempDir(), "PATH": "/usr/bin:/bin"},
		Prestart: []string{"python", "bash"}, ShellAhead: true, Limits: agent.Limits{MemoryBytes: 1 << 30},
	}, "")
	booted.ready()
	claimed.ready()
	claimed.run("echo warm; :") // a command that is known, and a shell that waits after it
	claimed.run("echo warm; :")
	if err := claimed.adopt(agent.Adoption{Bootstrap: b}); err != nil {
		t.Fatal(err)
	}
	want, got := booted.describe(), claimed.describe()
	if got != want {
		t.Errorf("a claimed sandbox is\n%s\nand a booted one\n%s", got, want)
	}
	if !strings.Contains(got, "late placeholder yes in /usr") || strings.Contains(got, "GONE") {
		t.Errorf("it is %s", got)
	}
	for _, x := range []*box{booted, claimed} {
		x.post("/command/entrypoint/signal?signal=SIGTERM", struct{}{})
		if o, last := x.ended(7); o.ExitCode != 7 || !strings.HasSuffix(last, "over\n") {
			t.Errorf("%+v %q", o, last)
		}
	}
}

// settleLimit is how long the answer to an adoption waits for an entrypoint that computes, as in
// pkg/agent/server. On a busy host sh may take longer to end.
const settleLimit = 250 * time.Millisecond

// TestClaimThatFails: an entrypoint that cannot start, or ends at once, ends the agent as at a boot.
func TestClaimThatFails(t *testing.T) {
	for _, c := range []struct {
		argv []string
		code int
		says string
	}{
		{[]string{"nosuchprogram-x"}, 127, `entrypoint "nosuchprogram-x": no such file in the image's PATH`},
		{[]string{"sh", "-c", "echo bye; exit 3"}, 3, ""},
	} {
		x := start(t, agent.Bootstrap{Prestart: []string{"bash"}}, "")
		x.ready()
		began := time.Now()
		err := x.adopt(agent.Adoption{Bootstrap: agent.Bootstrap{Entrypoint: c.argv}})
		if took := time.Since(began); err == nil && (c.code == 127 || took < settleLimit) {
			t.Errorf("%q was taken after %v", c.argv, took)
		}
		o, last := x.ended(c.code)
		if o.ExitCode != c.code || !strings.Contains(o.Message, c.says) || c.says == "" && last != "bye\n" {
			t.Errorf("%q: %+v %q", c.argv, o, last)
		}
	}
}

// TestHostnameOfAnAdoption: the kernel's name is the new one, or nothing has changed.
func TestHostnameOfAnAdoption(t *testing.T) {
	if os.Getuid() != 0 {
		return // only root makes namespaces
	}
	named := agent.Adoption{Bootstrap: agent.Bootstrap{Hostname: "lab-7", Env: map[string]string{"WHO": "new"}}}
	const show = `echo $(uname -n) $HOSTNAME $WHO`
	x := startBy(t, []string{"unshare", "--uts"}, nil, agent.Bootstrap{}, "")
	x.ready()
	if err := x.adopt(named); err != nil {
		t.Fatal(err)
	}
	if out, _ := x.run(show); out != "lab-7 lab-7 new\n" {
		t.Errorf("it is called %q", out)
	}
	x = startBy(t, []string{"unshare", "--uts", "setpriv", "--bounding-set=-sys_admin"}, nil, agent.Bootstrap{}, "")
	x.ready()
	was, _ := x.run(show)
	if err := x.adopt(named); errs.CodeOf(err) != errs.Unsupported || !strings.Contains(err.Error(), "lab-7") {
		t.Errorf("%v", err)
	}
	if is, _ := x.run(show); is != was || strings.Contains(is, "new") {
		t.Errorf("it was %q, and is %q", was, is)
	}
	named.Hostname = strings.Fields(was)[0] // as if the host had changed it
	if err := x.adopt(named); err != nil {
		t.Error(err)
	}
}

// TestCopyGoesOn: in a copy all that ran goes on, the clients of the source are cut off, and the
// machine is another.
func TestCopyGoesOn(t *testing.T) {
	root, dir := t.TempDir(), t.TempDir()
	put := func(name, text string, mode os.FileMode) string {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	machine := put("etc/machine-id", strings.Repeat("0", 32)+"\n", 0o444)
	put("etc/other", "stays", 0o600)
	if err := os.MkdirAll(filepath.Join(root, "var/lib/dbus"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(machine, filepath.Join(root, "var/lib/dbus/machine-id")); err != nil {
		t.Fatal(err)
	}
	keygen, err := exec.LookPath("ssh-keygen")
	if err != nil {
		t.Fatalf("the test needs OpenSSH's client: %v", err)
	}
	program, err := os.ReadFile(keygen)
	if err != nil {
		t.Fatal(err)
	}
	put("usr/bin/ssh-keygen", string(program), 0o755)
	keys := map[string]string{}
	for _, kind := range []string{"ed25519", "ecdsa"} {
		path := put("etc/ssh/ssh_host_"+kind+"_key", "", 0o600)
		os.Remove(path) //nolint:errcheck // ssh-keygen asks then
		if out, err := exec.Command(keygen, "-q", "-t", kind, "-N", "", "-f", path).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for _, name := range []string{path, path + ".pub"} {
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			keys[name] = string(b)
		}
	}

	x := startBy(t, nil, []string{"-root", root}, agent.Bootstrap{
		Entrypoint:         []string{"sh", "-c", `trap 'kill $! 2>/dev/null; exit 9' TERM; echo "up $$"; sleep 1000 & wait`},
		Env:                map[string]string{"WHO": "source", "HOME": dir},
		CommandOutputLimit: 64 << 10, ShellAhead: true,
	}, "")
	x.ready()
	x.speaks()
	// More output than waits for a client that may come back.
	stop := filepath.Join(dir, "stop")
	if err := syscall.Mkfifo(stop, 0o600); err != nil {
		t.Fatal(err)
	}
	command := "echo before; read _ <" + stop + "; seq 1 100000; exit 5"
	body, _ := json.Marshal(agent.CommandRequest{Command: command})
	r, _ := http.NewRequestWithContext(t.Context(), "POST", "http://sandbox/command", strings.NewReader(string(body)))
	r.Header.Set("Accept", agent.FramesType)
	resp, err := x.RoundTripper().RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	stream := agent.NewFrameReader(resp.Body)
	_, first, err := stream.Next()
	var init agent.FrameInit
	if err != nil || json.Unmarshal(first, &init) != nil {
		t.Fatal(err, string(first))
	}
	kind, said, err := stream.Next()
	for ; err == nil && kind == agent.FrameControl; kind, said, err = stream.Next() { // it may take long
	}
	if err != nil || string(said) != "before\n" {
		t.Fatal(err, string(said))
	}
	var pty agent.PtyCreated
	if err := json.NewDecoder(x.post("/pty", agent.PtyRequest{Command: "echo at; exec sleep 1000"}).Body).Decode(&pty); err != nil {
		t.Fatal(err)
	}
	ws, _, err := websocket.Dial(t.Context(), "ws://"+x.addr+"/pty/"+pty.SessionID+"/ws",
		&websocket.DialOptions{HTTPHeader: http.Header{agent.TokenHeader: {"secret-token"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	if _, _, err := ws.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	old := x.Client

	id := strings.Repeat("1f", 16)
	a := agent.Adoption{
		Bootstrap: agent.Bootstrap{Env: map[string]string{"WHO": "copy", "HOME": dir}, Entrypoint: []string{"false"}, ShellAhead: true},
		Copy:      &agent.Copy{Generation: "77aa", MachineID: id, Seed: []byte(strings.Repeat("s", 64))},
	}
	if err := x.adopt(a); err != nil {
		t.Fatal(err)
	}
	for err = nil; err == nil; {
		_, _, err = stream.Next()
	}
	for err = nil; err == nil; {
		_, _, err = ws.Read(t.Context())
	}
	if err := old.Ready(t.Context()); errs.CodeOf(err) != errs.Denied {
		t.Errorf("with the token of the source: %v", err)
	}
	if out, _ := x.run("echo $WHO"); out != "copy\n" {
		t.Errorf("a command says %q", out)
	}
	if err := os.WriteFile(stop, []byte("\n"), 0o600); err != nil { // waits until it is read
		t.Fatal(err)
	}
	x.settles("the command waits for a client that does not come back", func() bool {
		return strings.Contains(x.get("/command/status/"+init.ID), `"exit_code":5`)
	})
	if logs := x.get("/command/" + init.ID + "/logs"); !strings.HasSuffix(logs, "\n100000\n") {
		t.Errorf("its output ends %q", logs[max(0, len(logs)-50):])
	}
	x.settles("the terminal's client is not gone", func() bool {
		s := x.get("/pty/" + pty.SessionID)
		return strings.Contains(s, `"connected":false`) && strings.Contains(s, `"running":true`)
	})

	// Another machine.
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
	if got := read("etc/machine-id"); got != id+"\n" {
		t.Errorf("machine id %q", got)
	}
	if fi, err := os.Stat(machine); err != nil || fi.Mode() != 0o444 {
		t.Errorf("machine id: %v %v", fi.Mode(), err)
	}
	if to, err := os.Readlink(filepath.Join(root, "var/lib/dbus/machine-id")); to != machine {
		t.Errorf("the link leads to %q, %v", to, err)
	}
	if got := read(agent.GenerationFile); got != "77aa\n" {
		t.Errorf("generation %q", got)
	}
	if fi, err := os.Stat(filepath.Join(root, agent.GenerationFile)); err != nil || fi.Mode() != 0o644 {
		t.Errorf("not everybody can read the generation: %v", err)
	}
	if got := read("etc/other"); got != "stays" {
		t.Errorf("another file: %q", got)
	}
	for name, was := range keys {
		x.settles(name+" is not made anew", func() bool {
			b, err := os.ReadFile(name)
			return err == nil && len(b) > 0 && string(b) != was
		})
	}
	for name := range keys {
		if strings.HasSuffix(name, ".pub") {
			continue
		}
		x.settles(name+" is no key", func() bool { return exec.Command(keygen, "-y", "-f", name).Run() == nil })
	}
	if left, _ := filepath.Glob(filepath.Join(root, "*", "*.sandboxd-new")); len(left) > 0 {
		t.Errorf("drafts are left: %v", left)
	}

	// It ends with the entrypoint of the source, and has never run its own.
	x.post("/command/entrypoint/signal?signal=SIGTERM", struct{}{})
	if o, last := x.ended(9); o.ExitCode != 9 || !strings.HasPrefix(last, "up ") {
		t.Errorf("%+v %q", o, last)
	}
}
