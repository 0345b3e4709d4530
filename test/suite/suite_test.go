package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestMain lets this program become a job, as suite does.
func TestMain(m *testing.M) {
	if len(os.Args) > 3 && os.Args[1] == jobCommand {
		fmt.Fprintln(os.Stderr, becomeJob(os.Args[2], os.Args[3:]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// Each test of the repository is in a job: under the race detector or in a job of its
// own. A test that needs root is in a job that has root.
func TestEveryTestIsInThePlan(t *testing.T) {
	const tags = "seccomp,vm,all"
	packages, err := list("../..", tags)
	if err != nil || len(packages) < 40 {
		t.Fatalf("%d packages, %v", len(packages), err)
	}
	jobs, programs, err := arrange("../..", tags, allStories, packages)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, j := range jobs {
		if names[j.name] {
			t.Errorf("two jobs are called %s, and would write one log", j.name)
		}
		names[j.name] = true
	}
	// runs reports whether a job that has root runs a test, or a part of it.
	runs := func(p pkg, test string) bool {
		return slices.ContainsFunc(jobs, func(j *job) bool {
			if j.pkg != p.ImportPath || !slices.Contains(j.env, "SANDBOXD_TEST=root") {
				return false
			}
			i := slices.IndexFunc(j.argv, func(a string) bool { return strings.HasPrefix(a, "-test.run=") })
			pattern, _, _ := strings.Cut(strings.TrimPrefix(j.argv[i], "-test.run="), "/")
			return regexp.MustCompile(pattern).MatchString(test)
		})
	}
	for _, p := range packages {
		root, others, err := rootTests(p)
		if err != nil {
			t.Fatal(err)
		}
		if len(root) > 0 && !slices.Contains(programs, p.ImportPath) {
			t.Errorf("the test program of %s is not compiled", p.ImportPath)
		}
		for _, test := range root {
			if !runs(p, test) {
				t.Errorf("no job runs %s of %s", test, p.ImportPath)
			}
		}
		_, own := apart[p.name()]
		for _, test := range others {
			if own && !runs(p, test) || !own && !slices.Contains(jobs[0].argv, p.ImportPath) {
				t.Errorf("no job runs %s of %s", test, p.ImportPath)
			}
		}
	}
	for _, named := range []map[string]bool{onHost, alone} {
		for name := range named {
			if !names[name] {
				t.Errorf("%s is in a table, and there is no such job", name)
			}
		}
	}
	for name := range costs {
		if !names[name] {
			t.Errorf("%s has a cost, and there is no such job", name)
		}
	}
}

// TestParts: the parts of `make test-all` together are the whole, no job is in two of them, and none has more than its
// share or, with the longest job, more than that.
func TestParts(t *testing.T) {
	const tags = "seccomp,vm,all"
	packages, err := list("../..", tags)
	if err != nil {
		t.Fatal(err)
	}
	jobs, _, err := arrange("../..", tags, allStories, packages)
	if err != nil {
		t.Fatal(err)
	}
	const n = 5
	in, total, longest := map[string]int{}, 0, 0
	for _, j := range jobs {
		total, longest = total+max(j.cost, usualCost), max(longest, j.cost)
	}
	for k := range n {
		part, err := partOf(jobs, fmt.Sprintf("%d/%d", k+1, n))
		if err != nil {
			t.Fatal(err)
		}
		length := 0
		for _, j := range part {
			in[j.name]++
			if j.name != fixtures {
				length += max(j.cost, usualCost)
			}
		}
		if length > max(longest, total/n+longest/2) {
			t.Errorf("part %d takes %d s of %d s", k+1, length, total)
		}
		t.Logf("part %d: %d jobs, %d s", k+1, len(part), length)
	}
	for _, j := range jobs {
		want := 1
		if j.name == fixtures {
			want = n
		}
		if in[j.name] != want {
			t.Errorf("%s is in %d parts", j.name, in[j.name])
		}
	}
	for _, bad := range []string{"0/5", "6/5", "1", "1/0", "1/5x", "01/5", "-1/5"} {
		if _, err := partOf(jobs, bad); err == nil {
			t.Errorf("part %q is taken", bad)
		}
	}
}

// rootTests follows functions, methods and variables.
func TestRootTests(t *testing.T) {
	dir := t.TempDir()
	const source = `package x

func TestPlain(t *testing.T)     {}
func TestDirect(t *testing.T)    { hosttest.Root(t) }
func TestPrivate(t *testing.T)   { if !hosttest.Private(t, nil) { return } }
func TestKit(t *testing.T)       { e := snapshottest.New(t); _ = e }
func TestHelper(t *testing.T)    { helper(t) }
func TestMethod(t *testing.T)    { var e env; e.open() }
func TestTable(t *testing.T)     { for _, c := range cases { c(t) } }
func TestVariable(t *testing.T)  { t.Setenv("SANDBOXD_TEST", "") }
func TestRace(t *testing.T)      { if raceEnabled { return } }
func TestCircle(t *testing.T)    { a(t) }
func TestFreePort(t *testing.T)  { hosttest.FreePort(t) }

var cases = []func(t *testing.T){helper}

type env struct{}

func (env) open() { helper(nil) }

func helper(t *testing.T) { daemontest.New(t) }
func a(t *testing.T)      { b(t) }
func b(t *testing.T)      { a(t); helper(t) }
`
	if err := os.WriteFile(filepath.Join(dir, "x_test.go"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	root, others, err := rootTests(pkg{Dir: dir, TestGoFiles: []string{"x_test.go"}})
	want := []string{
		"TestCircle", "TestDirect", "TestHelper", "TestKit", "TestMethod", "TestPrivate", "TestRace", "TestTable",
		"TestVariable",
	}
	if err != nil || !slices.Equal(root, want) || !slices.Equal(others, []string{"TestFreePort", "TestPlain"}) {
		t.Errorf("root %v, others %v, %v", root, others, err)
	}
}

// A job waits for the job in its field after; a job that runs alone waits for all. The log
// of a script has its output and its result.
func TestCarryOut(t *testing.T) {
	dir := t.TempDir()
	diary := filepath.Join(dir, "diary")
	note := func(name string, j job) *job {
		j.name, j.dir, j.script = name, dir, true
		j.argv = []string{
			"sh", "-c", `echo "+$1" >>"$2"; sleep 0.1; echo "said by $1"; echo "-$1" >>"$2"; [ "$1" != bad ]`, "sh", name,
			diary,
		}
		return &j
	}
	jobs := []*job{
		note("last", job{alone: true, cost: 9}), note("second", job{after: "first", cost: 8}), note("first", job{}), note("bad", job{}),
	}
	if err := carryOut(jobs, 4, dir); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(diary)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	at := func(line string) int { return slices.Index(lines, line) }
	if len(lines) != 8 || at("-first") > at("+second") || at("+last") != 6 {
		t.Errorf("they ran as %q", lines)
	}
	for name, want := range map[string]string{"bad": `"Action":"fail"`, "first": `"Action":"pass"`} {
		log, err := os.ReadFile(filepath.Join(dir, name+".json"))
		if err != nil || !strings.Contains(string(log), want) || !strings.Contains(string(log), "said by "+name) {
			t.Errorf("the log of %s: %s, %v", name, log, err)
		}
	}
	if err := carryOut([]*job{{name: "none", argv: []string{filepath.Join(dir, "no such program")}, dir: dir}}, 1, dir); err == nil ||
		!strings.Contains(err.Error(), "none: ") {
		t.Errorf("a job that cannot be started: %v", err)
	}
}

// A lane does first what needs an image that it has imported, and last what needs an image
// of another lane.
func TestChoose(t *testing.T) {
	q := &queue{owner: map[string]int{}}
	for _, j := range []job{{name: "a", image: "big"}, {name: "b", image: "big"}, {name: "c"}, {name: "d"}, {name: "e", image: "big"}} {
		q.waiting = append(q.waiting, &j)
	}
	var got []string
	for _, lane := range []int{0, 1, 0, 1, 1} {
		got = append(got, q.next(lane).name)
	}
	if want := []string{"a", "c", "b", "d", "e"}; !slices.Equal(got, want) || q.next(0) != nil {
		t.Errorf("they were taken as %q, want %q", got, want)
	}
}

// A lane has a network of its own with a default route, and a job starts with no signal
// ignored.
func TestLane(t *testing.T) {
	hosttest.Root(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	here, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for where, lane := range map[string]bool{inLane: true, onThisHost: false} {
		look := "grep SigIgn /proc/self/status; readlink /proc/self/ns/net; ip route get 198.51.100.1; true"
		j := &job{name: where, dir: dir, script: true, argv: []string{
			"sh", "-c", `trap '' INT HUP; exec "$0" "$@"`, self, jobCommand,
			where, "/bin/sh", "-c", look,
		}}
		if err := j.run("yz", dir); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, where+".json"))
		log := string(b)
		if err != nil || !strings.Contains(log, `"Action":"pass"`) ||
			!regexp.MustCompile(`SigIgn:\\t\d+[0-9a-f][048c]\\n`).MatchString(log) {
			t.Errorf("%s: %v: %s", where, err, log)
		}
		// The test itself may be in a lane.
		if strings.Contains(log, here) == lane || lane && !strings.Contains(log, "via 192.0.2.1 dev lane") {
			t.Errorf("%s, and the test in %s: %s", where, here, log)
		}
	}
}
