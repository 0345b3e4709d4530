package cgroups

import (
	"bytes"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// hog is a script that holds n MiB of memory and says so.
func hog(n int) string {
	return fmt.Sprintf(`x=$(head -c %d /dev/zero | tr '\0' x) && echo held ${#x}`, n<<20)
}

func (e *env) output(id, script string) string {
	e.t.Helper()
	var out bytes.Buffer
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Stdout, cmd.Stderr = &out, &out
	e.must(e.Start(id, cmd))
	_ = cmd.Wait() // killed, perhaps
	return out.String()
}

func testMemory(t *testing.T, e *env) {
	const limit = 24 << 20
	id := e.create(Limits{MemoryBytes: limit})
	if out := e.output(id, hog(2)); !strings.Contains(out, "held 2097152") {
		t.Fatalf("below the limit: %s", out)
	}
	if n, err := e.OOMKills(id); n != 0 || err != nil {
		t.Fatal("oom kills before:", n, err)
	}
	if hit, err := MemoryLimitHit(e.Tree, id); hit || err != nil {
		t.Fatal("limit hit before:", hit, err)
	}
	if out := e.output(id, hog(64)); strings.Contains(out, "held") {
		t.Fatalf("above the limit: %s", out)
	}
	u := e.usage(id)
	n, err := e.OOMKills(id)
	e.must(err)
	if n == 0 || u.OOMKills != n {
		t.Errorf("oom kills %d, in usage %d", n, u.OOMKills)
	}
	if hit, err := MemoryLimitHit(e.Tree, id); !hit || err != nil {
		t.Error("limit hit:", hit, err)
	}
	if u.MemoryPeakBytes < limit/2 || u.MemoryPeakBytes > limit {
		t.Errorf("peak %d of %d", u.MemoryPeakBytes, limit)
	}
}

func testHeadroom(t *testing.T, e *env) {
	id := e.create(Limits{MemoryBytes: 24 << 20, HeadroomBytes: 104 << 20})
	if out := e.output(id, hog(24)); !strings.Contains(out, "held") {
		t.Errorf("within the head-room: %s", out)
	}
	if out := e.output(id, hog(160)); strings.Contains(out, "held") {
		t.Errorf("above the head-room: %s", out)
	}
}

// testOOMGroup: on v2 one OOM ends all; v1 has nothing of the kind, and the
// rest lives on.
func testOOMGroup(t *testing.T, e *env) {
	id := e.create(Limits{MemoryBytes: 24 << 20, HeadroomBytes: 8 << 20, OOMGroup: true})
	e.sh(id, "exec sleep 1000")
	gone, err := e.Watch(e.ctx, id)
	e.must(err)
	if out := e.output(id, hog(64)); strings.Contains(out, "held") {
		t.Fatalf("above the limit: %s", out)
	}
	if e.flavours["memory"].v2 {
		<-gone
	} else if yes, err := e.Populated(id); !yes || err != nil {
		t.Error("populated:", yes, err)
	}
	if n, err := e.OOMKills(id); n == 0 || err != nil {
		t.Error("oom kills:", n, err)
	}
}

func testCPU(t *testing.T, e *env) {
	id := e.create(Limits{})
	// So little that on a busy host, too, it comes to that: then the group gets what one
	// task beside it gets.
	for _, millis := range []int64{1000, 100, 400, 100} { // down and up again
		e.must(e.LimitCPU(e.ctx, id, millis))
	}
	for range 4 {
		e.sh(id, "while :; do :; done")
	}
	e.until("loops that use CPU", func() bool { return e.usage(id).CPUMicros > 20_000 })
	outer := time.Now()
	a := e.usage(id)
	inner := time.Now()
	time.Sleep(time.Second) // what a second of wall clock may cost
	within := time.Since(inner)
	b := e.usage(id)
	used := float64(b.CPUMicros - a.CPUMicros)
	least, most := used/float64(time.Since(outer).Microseconds()), used/float64(within.Microseconds())
	if least > 0.15 || most < 0.025 {
		t.Errorf("4 spinners used %.3f to %.3f CPUs, limit 0.1", least, most)
	}
	e.until("the limit to throttle them", func() bool { return e.usage(id).ThrottledMicros > 0 }) // others may leave them less
}

func testPids(t *testing.T, e *env) {
	id := e.create(Limits{Pids: 10})
	out := e.output(id, "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 1000 >/dev/null 2>&1 & done")
	if !strings.Contains(out, "fork") {
		t.Errorf("15 forks with 10 pids: %q", out)
	}
	if u := e.usage(id); u.Pids > 10 {
		t.Errorf("%d pids", u.Pids)
	}
	if n, err := e.InitTasks(id); n != 0 || err != nil {
		t.Errorf("where nobody is PID 1, PID 1 has %d tasks: %v", n, err)
	}
	id = e.create(Limits{Pids: 20})
	e.output(id, "unshare --pid --fork sh -c 'sleep 1000 & sleep 1000 & exec sleep 1000' >/dev/null 2>&1 &")
	e.until("all of a pid namespace run", func() bool { return e.usage(id).Pids == 4 })
	if n, err := e.InitTasks(id); n != 1 || err != nil {
		t.Errorf("PID 1 has %d tasks: %v", n, err)
	}
}

// testFiles: the kernel has taken what was written, at both levels.
func testFiles(t *testing.T, e *env) {
	for _, l := range []Limits{
		{},
		{MemoryBytes: 128 << 20, HeadroomBytes: 32 << 20, Pids: 30},
		{MemoryBytes: 32 << 20, Pids: 5, OOMGroup: true},
	} {
		id := e.create(l)
		for _, c := range needed {
			h := e.layout.of[c]
			w := l.writes(c, e.flavours[c])
			if c == "cpu" {
				e.must(e.LimitCPU(e.ctx, id, 100*l.Pids))
				w = []write{cpuQuota(100*l.Pids, h.v2)}
			}
			for _, dir := range []string{e.dir(h, id), e.leafIn(h, id)} {
				for _, w := range w {
					got, err := readFile(dir + "/" + w.file)
					e.must(err)
					got = strings.TrimSpace(got)
					if unlimited := w.value == "-1" && len(got) >= 19; got != w.value && !unlimited {
						t.Errorf("%s/%s is %s, want %s", dir, w.file, got, w.value)
					}
				}
			}
		}
	}
}
