package shell

import (
	"encoding/json"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestNoticesBounds: what would cost PID 1 much is not looked at.
func TestNoticesBounds(t *testing.T) {
	for _, c := range []string{
		strings.Repeat("(", 5000), strings.Repeat("$(", 5000), "echo " + strings.Repeat("x", maxFit),
		strings.Repeat("{ ", 5000), strings.Repeat("`", 5000), strings.Repeat("! ", 5000), strings.Repeat("[[ (", 3000),
	} {
		if notices(c) != nil {
			t.Errorf("%.20s… is fit", c)
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	limit := 200 * time.Millisecond
	if raceEnabled {
		limit *= 20
	}
	for _, c := range []string{
		strings.Repeat("if ", 5000), strings.Repeat("a|", 8000) + "a", strings.Repeat("a&&", 5000) + "a",
		strings.Repeat("while ", 2500), strings.Repeat("time ", 3000), strings.Repeat("a;", 8000),
	} {
		before := threadTime(t)
		notices(c)
		if took := threadTime(t) - before; took > limit {
			t.Errorf("%.20s… takes %v", c, took)
		}
	}
}

// threadTime is what the calling thread has used.
func threadTime(t *testing.T) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// commands are those of testdata, by what the agent makes of them.
func commands(t testing.TB) (seeds map[string][]string) {
	t.Helper()
	b, err := os.ReadFile("testdata/commands.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &seeds); err != nil || len(seeds) != 3 {
		t.Fatal(len(seeds), err)
	}
	return seeds
}
