package server

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// adoption is of a sandbox that answers to token.
func (e *env) adoption(token string) agent.Adoption {
	return agent.Adoption{Bootstrap: agent.Bootstrap{
		Protocol: agent.Protocol, Token: token, User: itoa(os.Getuid()) + ":" + itoa(os.Getgid()), Workdir: e.dir,
		Env: map[string]string{"WHO": token},
	}}
}

// adoptCopy is an adoption of a copy.
func (e *env) adoptCopy(token string) agent.Adoption {
	a := e.adoption(token)
	a.Copy = &agent.Copy{
		Generation: "0123456789abcdef", MachineID: strings.Repeat("0aB1", 8),
		Seed: []byte(strings.Repeat("seed", 8)),
	}
	return a
}

// as sends a request with a token.
func (e *env) as(token, method, path, body string) (status int, reply string) {
	e.Helper()
	r := e.request(method, path, strings.NewReader(body))
	r.Header.Set(agent.TokenHeader, token)
	resp, reply := e.send(r)
	return resp.StatusCode, reply
}

func asJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// TestAdoptRefused: after a refusal everything is as it was.
func TestAdoptRefused(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Env: map[string]string{"WHO": "first"}, Limits: agent.Limits{MemoryBytes: 1 << 30}})
	e.s.root = t.TempDir()
	same := func(what string) {
		t.Helper()
		e.call(200, "GET", "/ping", nil)
		if got := e.events(agent.CommandRequest{Command: "echo $WHO"}); got != "stdout \"first\"\ncomplete" {
			t.Errorf("after %s: %s", what, got)
		}
		if left, err := os.ReadDir(e.s.root); err != nil || len(left) > 0 {
			t.Errorf("after %s: files %v, %v", what, left, err)
		}
		if n := e.s.limits.Load().MemoryBytes; n != 1<<30 {
			t.Errorf("after %s: a limit of %d", what, n)
		}
	}
	good := e.adoptCopy("second")
	with := func(change func(*agent.Adoption)) string {
		a := good
		c := *good.Copy
		a.Copy = &c
		change(&a)
		return asJSON(a)
	}
	for what, c := range map[string]struct {
		token, body string
		status      int
	}{
		"no token":       {"", asJSON(good), 401},
		"another token":  {"second", asJSON(good), 401},
		"nothing":        {"tok", "", 400},
		"no JSON":        {"tok", "token", 400},
		"half of it":     {"tok", asJSON(good)[:100], 400},
		"more than one":  {"tok", asJSON(good) + asJSON(good), 400},
		"no new token":   {"tok", with(func(a *agent.Adoption) { a.Token = "" }), 400},
		"no protocol":    {"tok", with(func(a *agent.Adoption) { a.Protocol = 0 }), 400},
		"a later one":    {"tok", with(func(a *agent.Adoption) { a.Protocol = agent.Protocol + 1 }), 400},
		"workdir":        {"tok", with(func(a *agent.Adoption) { a.Workdir = "rel" }), 400},
		"user":           {"tok", with(func(a *agent.Adoption) { a.User = "nosuchuser-x" }), 400},
		"no generation":  {"tok", with(func(a *agent.Adoption) { a.Copy.Generation = "" }), 400},
		"its form":       {"tok", with(func(a *agent.Adoption) { a.Copy.Generation = "../x" }), 400},
		"its size":       {"tok", with(func(a *agent.Adoption) { a.Copy.Generation = strings.Repeat("ab", 100) }), 400},
		"machine id":     {"tok", with(func(a *agent.Adoption) { a.Copy.MachineID = "12" }), 400},
		"a short seed":   {"tok", with(func(a *agent.Adoption) { a.Copy.Seed = []byte("x") }), 400},
		"a long seed":    {"tok", with(func(a *agent.Adoption) { a.Copy.Seed = make([]byte, 1<<16) }), 400},
		"an empty copy":  {"tok", with(func(a *agent.Adoption) { a.Copy = &agent.Copy{} }), 400},
		"too large":      {"tok", with(func(a *agent.Adoption) { a.Env["X"] = strings.Repeat("x", agent.MaxAdoption) }), 413},
		"too large, odd": {"tok", strings.Repeat("[", agent.MaxAdoption+1), 413},
	} {
		delete(good.Env, "X")
		if status, reply := e.as(c.token, "POST", "/adopt", c.body); status != c.status || strings.Contains(reply, "second") {
			t.Errorf("%s: %d %s, want %d", what, status, reply, c.status)
		}
		same(what)
	}
	e.call(405, "GET", "/adopt", nil)
	e.call(405, "PUT", "/adopt", good)
	e.call(404, "POST", "/adopt/", good)
	if status, reply := e.as("tok", "POST", "/proxy/"+strconv.Itoa(agent.Port)+"/adopt", asJSON(good)); status != 400 {
		t.Errorf("by the agent's own proxy: %d %s", status, reply)
	}

	// A body that ends in the middle, with and without a length.
	for name, head := range map[string]string{
		"length":  "Content-Length: " + itoa(len(asJSON(good))) + "\r\n\r\n" + asJSON(good)[:100],
		"chunked": "Transfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x\r\n%s", len(asJSON(good)), asJSON(good)[:100]),
	} {
		conn, err := net.Dial("tcp", e.http.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST /adopt HTTP/1.1\r\nHost: x\r\n%s: tok\r\n%s", agent.TokenHeader, head)
		conn.(*net.TCPConn).CloseWrite() //nolint:errcheck // the answer says it
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || resp.StatusCode != 400 {
			t.Errorf("%s: %v %v", name, resp, err)
		}
		same("half a body, " + name)
	}

	// Not an adoption of what is in use.
	st := start{guest: e.s.guest(), argv: []string{"sleep", "1000"}}
	if code, err := e.s.startEntrypoint(&st); err != nil {
		t.Fatal(code, err)
	}
	defer st.command.Process.KillTree()
	status, said := e.as("tok", "POST", "/adopt", asJSON(e.adoption("second")))
	if status != 409 || !strings.Contains(said, "entrypoint") {
		t.Errorf("with an entrypoint: %d %s", status, said)
	}
	same("one with an entrypoint")
	if !st.command.Alive() {
		t.Error("the entrypoint was killed")
	}
	e.s.stopping.Store(true)
	if status, reply := e.as("tok", "POST", "/adopt", asJSON(good)); status != 503 {
		t.Errorf("as it ends: %d %s", status, reply)
	}
}

// TestAdoptOnce: of adoptions at the same time one is taken, and only its token is then.
func TestAdoptOnce(t *testing.T) {
	e := newEnv(t)
	e.s.root = t.TempDir()
	const n = 8
	var took [n]int
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { took[i], _ = e.as("tok", "POST", "/adopt", asJSON(e.adoptCopy("new"+itoa(i)))) })
	}
	all.Wait()
	won := slices.Index(took[:], 200)
	for i, status := range took {
		if i != won && status != 409 && status != 401 {
			t.Errorf("%v", took)
		}
		ping, _ := e.as("new"+itoa(i), "GET", "/ping", "")
		if want := map[bool]int{true: 200, false: 401}[i == won]; ping != want {
			t.Errorf("number %d of %v: a ping is answered with %d", i, took, ping)
		}
	}
	if ping, _ := e.as("tok", "GET", "/ping", ""); ping != 401 {
		t.Errorf("the old token is answered with %d", ping)
	}
	if _, reply := e.as("new"+itoa(won), "POST", "/command", `{"command":"echo $WHO"}`); !strings.Contains(reply, "new"+itoa(won)) {
		t.Errorf("%d won: %s", won, reply)
	}
}

// TestAdoptAtOnce: no request meets half of either sandbox.
func TestAdoptAtOnce(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Env: map[string]string{"WHO": "tok"}, ShellAhead: true})
	t.Cleanup(e.s.ahead.Close)
	e.waits()
	var all sync.WaitGroup
	begun, over := make(chan struct{}, 64), make(chan struct{})
	for i := range 6 {
		token := []string{"tok", "new"}[i%2]
		all.Go(func() {
			for last := false; ; {
				status, reply := e.as(token, "POST", "/command", `{"command":"echo -$WHO-; :"}`)
				// One that was let in with the old token may start after the adoption.
				if status != 401 && (status != 200 || token == "new" && !strings.Contains(reply, "-new-")) {
					t.Errorf("%s: %d %s", token, status, reply)
				}
				select {
				case begun <- struct{}{}:
				default:
				}
				if last && (status == 200) != (token == "new") {
					t.Errorf("%s: %d at the end", token, status)
				}
				if last {
					return
				}
				select {
				case <-over:
					last = true
				default:
				}
			}
		})
	}
	for range 12 {
		<-begun
	}
	a := e.adoption("new")
	a.ShellAhead = true
	if status, reply := e.as("tok", "POST", "/adopt", asJSON(a)); status != 200 {
		t.Errorf("%d %s", status, reply)
	}
	close(over)
	all.Wait()
}

// TestAdoptInFlight: what runs for a client of before ends as it began.
func TestAdoptInFlight(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Env: map[string]string{"WHO": "first"}})
	fifo := filepath.Join(e.dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	_, rest := e.open(t.Context(), agent.CommandRequest{Command: "read -r go <" + fifo + "; echo $WHO $go"}, false)
	e.call(200, "POST", "/adopt", e.adoption("tok"))
	e.write(fifo, "goes on\n")
	if b, err := io.ReadAll(rest); err != nil || !strings.Contains(string(b), "first goes on") {
		t.Errorf("%s, %v", b, err)
	}
}

// TestAdoptContexts: of the contexts that were made before, those that are wanted and have run
// nothing stay, with the environment that they would have.
func TestAdoptContexts(t *testing.T) {
	const show = "import os, json, resource\nprint(json.dumps([dict(os.environ), os.getcwd(), resource.getrlimit(resource.RLIMIT_DATA)], " +
		"sort_keys=True))"
	e, booted := newCodeEnv(t), newCodeEnv(t)
	home := e.s.guest().env["HOME"]
	adopt := func(change func(*agent.Adoption), prestart ...string) {
		t.Helper()
		a := e.adoption("tok")
		a.Env = map[string]string{
			"PATH": os.Getenv("PATH"), "LC_ALL": "C", "HOME": home, "NODE_PATH": os.Getenv("NODE_PATH"), "NEW": "1 ü\n",
		}
		a.Limits.MemoryBytes, a.Prestart = 4<<30, prestart
		change(&a)
		e.call(200, "POST", "/adopt", a)
	}
	as := func(*agent.Adoption) {}
	run := func(language, code string) string {
		t.Helper()
		return e.cell(agent.CodeContext{Language: language}, code)
	}
	standing := func(language string) string {
		for _, c := range e.s.code.contexts.List(language) {
			return c.ID
		}
		return ""
	}

	e.s.prestart([]string{"python", "javascript", "bash"}, e.s.opens.Load())
	python, node, bash := standing("python"), standing("javascript"), standing("bash")
	adopt(func(a *agent.Adoption) { a.Limits.MemoryBytes = 0 }, "python", "javascript", "bash")
	if got := standing("python"); got != python {
		t.Errorf("python: %q, was %q", got, python)
	}
	if got := standing("javascript"); got != node {
		t.Errorf("node: %q, was %q", got, node)
	}
	if got := standing("bash"); got == bash {
		t.Error("a bash with the old environment stays")
	}
	booted.s.guest().env = e.s.guest().env
	booted.s.guest().workdir = e.dir
	want := booted.cell(agent.CodeContext{Language: "python"}, show)
	if got := run("python", show); got != want || !strings.Contains(got, "NEW") {
		t.Errorf("python says %s\nwant %s", got, want)
	}
	const showNode = "console.log(JSON.stringify([Object.entries(process.env).sort(), process.cwd()]))"
	want = booted.cell(agent.CodeContext{Language: "javascript"}, showNode)
	if got := run("javascript", showNode); got != want || !strings.Contains(got, "NEW") {
		t.Errorf("node says %s\nwant %s", got, want)
	}
	if got := run("bash", `echo "$NEW"`); got != "stdout \"1 ü\\n\\n\"\ncomplete" {
		t.Errorf("bash says %s", got)
	}

	// One that has run something is another; one that is not wanted is gone.
	adopt(as, "python")
	e.s.prestart([]string{"python"}, e.s.opens.Load())
	if got := standing("python"); got == python || standing("javascript") != "" || standing("bash") != "" {
		t.Errorf("%q, %q, %q", got, standing("javascript"), standing("bash"))
	}
	// With another limit of memory, as booted.
	python = standing("python")
	limit := func(size int64) string {
		return "import resource; resource.getrlimit(resource.RLIMIT_DATA)[0] == " + itoa(int(size-size/8))
	}
	adopt(func(a *agent.Adoption) { a.Limits.MemoryBytes = 2 << 30 }, "python")
	if got := run("python", limit(2<<30)); got != "result \"True\"\ncomplete" || standing("python") != python {
		t.Errorf("%s in %s, was %s", got, standing("python"), python)
	}
	// What python reads as it starts needs another.
	adopt(as, "python")
	e.s.prestart([]string{"python"}, e.s.opens.Load())
	python = standing("python")
	adopt(func(a *agent.Adoption) { a.Env["PYTHONHASHSEED"] = "0" }, "python")
	if got := run("python", "import sys; sys.flags.hash_randomization"); got != "result \"0\"\ncomplete" || standing("python") == python {
		t.Errorf("%s in %s, was %s", got, standing("python"), python)
	}
}

// TestReseed: contexts of a copy draw other numbers than those that the state of before gives, and
// what runs as the copy is made is not disturbed.
func TestReseed(t *testing.T) {
	e := newCodeEnv(t)
	e.s.root = t.TempDir()
	copied := func() {
		t.Helper()
		a := e.adoptCopy("tok")
		a.Env = e.s.guest().env
		e.call(200, "POST", "/adopt", a)
	}
	run := func(language, code string) string {
		t.Helper()
		return e.cell(agent.CodeContext{Language: language}, code)
	}
	const (
		seed = "import random, uuid, ssl\nrandom.seed(1)\nuuid._node = 7\n"
		draw = "print(random.random(), uuid.getnode())"
	)
	first := run("python", seed+draw)
	run("python", seed)
	if again := run("python", draw); again != first {
		t.Fatalf("%s after %s: the test shows nothing", again, first)
	}
	run("python", seed)
	copied()
	second := run("python", draw)
	run("python", seed)
	copied()
	if third := run("python", draw); second == first || third == first || third == second || strings.Contains(second, "error") {
		t.Errorf("python draws %s, then %s, then %s", first, second, third)
	}
	const ids = "uuid.uuid1().node >> 40 & 1, len({uuid.uuid1().clock_seq for _ in range(99)}) > 9, len({uuid.uuid1() for _ in range(999)})"
	if got := run("python", ids); got != "result \"(1, True, 999)\"\ncomplete" {
		t.Errorf("uuid1: %s", got)
	}

	// While code runs, and waits for its display to be delivered.
	fifo := filepath.Join(e.dir, "fifo")
	run("python", "import os; os.mkfifo("+strconv.Quote(fifo)+")")
	waits := "print('up')\nopen(" + strconv.Quote(fifo) + ").read()\ndisplay(1)\n"
	rest := e.started(agent.CodeContext{Language: "python"}, seed+waits+draw)
	copied()
	e.write(fifo, "")
	if got, number := rest(), strings.Fields(strings.Split(first, `"`)[1])[0]; !strings.Contains(got, number) {
		t.Errorf("code that ran drew %s, want %s", got, number)
	}
	if got := run("python", draw); got == first || strings.Contains(got, ` 7\n`) { // a random number may begin with 7
		t.Errorf("the call after it draws %s", got)
	}

	// Bash, and a RANDOM that is none any more.
	first = run("bash", "RANDOM=1; echo $RANDOM $RANDOM $RANDOM")
	run("bash", "RANDOM=1")
	copied()
	if second = run("bash", "echo $RANDOM $RANDOM $RANDOM"); second == first || !strings.HasSuffix(second, "complete") {
		t.Errorf("bash draws %s, then %s", first, second)
	}
	run("bash", "unset RANDOM; RANDOM=mine")
	copied()
	if got := run("bash", "echo $RANDOM"); got != "stdout \"mine\\n\"\ncomplete" {
		t.Errorf("bash: %s", got)
	}
}

// TestReseedNode: the functions of a copy do as those of node, and read the kernel's numbers.
func TestReseedNode(t *testing.T) {
	e := newCodeEnv(t)
	e.s.root = t.TempDir()
	c := e.context("javascript")
	check := cellCase{`{
const crypto = require('crypto');
const { promisify } = require('util');
const has = (a) => Array.from(new Uint8Array(a.buffer ?? a, a.byteOffset ?? 0, a.byteLength)).some((n) => n !== 0);
const throws = (f) => { try { f(); return false; } catch (e) { return e.code ?? e.name; } };
const numbers = Array.from({ length: 9999 }, Math.random);
const words = new Uint16Array(64);
crypto.randomFillSync(words, 8, 16);
const late = await promisify(crypto.randomFill)(Buffer.alloc(64), 32);
const ints = Array.from({ length: 999 }, () => crypto.randomInt(3, 6));
const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
console.log(JSON.stringify([
  numbers.every((n) => n >= 0 && n < 1), Math.abs(numbers.reduce((a, b) => a + b) / numbers.length - 0.5) < 0.05, Math.random.length,
  crypto.randomBytes(16).length, has(crypto.randomBytes(16)), has(await promisify(crypto.randomBytes)(99)),
  has(words.subarray(0, 8)), has(words.subarray(8, 24)), has(words.subarray(24)), has(late.subarray(0, 32)), has(late.subarray(32)),
  [...new Set(ints)].sort(), typeof (await promisify(crypto.randomInt)(9)), crypto.randomInt(1),
  uuid.test(crypto.randomUUID()), uuid.test(globalThis.crypto.randomUUID()), crypto.randomUUID() !== crypto.randomUUID(),
  has(crypto.webcrypto.getRandomValues(new Uint8Array(32))), has(globalThis.crypto.getRandomValues(new Uint32Array(9))),
  throws(() => crypto.randomBytes(-1)), throws(() => crypto.randomInt(5, 1)), throws(() => crypto.randomFillSync(words, 99)),
  throws(() => crypto.webcrypto.getRandomValues(new Uint8Array(70000))), has(new Uint8Array(crypto.randomFillSync(new ArrayBuffer(16)))),
]))
}`, ""}
	want := e.cell(c, check.code)
	e.cell(c, "const before = [Math.random, require('crypto').randomUUID, crypto.getRandomValues];"+
		"let named = (await import('crypto')).randomBytes")
	a := e.adoptCopy("tok")
	a.Env = e.s.guest().env
	e.call(200, "POST", "/adopt", a)
	if got := e.cell(c, check.code); got != want || !strings.HasSuffix(got, "complete") {
		t.Errorf("a copy says %s\nwant %s", got, want)
	}
	e.inOrder(c, []cellCase{
		{
			"[before[0] !== Math.random, before[1] !== require('crypto').randomUUID, before[2] !== crypto.getRandomValues, " +
				"named !== (await import('crypto')).randomBytes].join()",
			"result \"'true,true,true,true'\"\ncomplete",
		},
		{"const kept = Math.random", "complete"},
	})
	e.call(200, "POST", "/adopt", a)
	e.inOrder(c, []cellCase{{"kept === Math.random", "result \"true\"\ncomplete"}}) // it has other numbers from now on
}

// TestReseedJava: what draws without a seed of its own draws other numbers.
func TestReseedJava(t *testing.T) {
	e := newCodeEnv(t)
	e.s.root = t.TempDir()
	c := e.context("java")
	const field = `Object at(String of, String name) throws Exception {
  var f = Class.forName(of).getDeclaredField(name);
  f.setAccessible(true);
  return f.get(null);
}
void one() throws Exception {
  ((Random) at("java.lang.Math$RandomNumberGeneratorHolder", "randomNumberGenerator")).setSeed(1);
  ((java.util.concurrent.atomic.AtomicLong) at("java.util.SplittableRandom", "defaultGen")).set(1);
}`
	const draw = `System.out.println(Math.random() + " " + new SplittableRandom().nextLong() + " ")`
	if got := e.cell(c, field); got != "complete" {
		t.Fatal(got)
	}
	e.cell(c, "one()")
	first := e.cell(c, draw)
	e.cell(c, "one()")
	if again := e.cell(c, draw); again != first {
		t.Fatalf("%s after %s: the test shows nothing", again, first)
	}
	e.cell(c, "one()")
	a := e.adoptCopy("tok")
	a.Env = e.s.guest().env
	e.call(200, "POST", "/adopt", a)
	second := e.cell(c, draw)
	was, is := strings.Fields(first), strings.Fields(second)
	if len(was) != len(is) || len(was) < 3 || was[1] == is[1] || was[2] == is[2] {
		t.Errorf("java draws %s, then %s", first, second)
	}
}
