// Package failpoint lets tests stop the daemon at a named step.
//
// A failpoint is armed by the environment of the process, once, at start:
// SANDBOXD_FAILPOINT=NAME[:N]=kill|error. The N-th pass (1 unless given) of
// NAME kills the process with SIGKILL or returns an error. Unarmed, a pass
// costs one comparison.
package failpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// Env is the variable that arms a failpoint.
const Env = "SANDBOXD_FAILPOINT"

var (
	name, action string
	left         atomic.Int64
)

func init() { arm(os.Getenv(Env)) }

func arm(s string) {
	point, act, _ := strings.Cut(s, "=")
	n := int64(1)
	if i := strings.LastIndexByte(point, ':'); i >= 0 {
		if v, err := strconv.ParseInt(point[i+1:], 10, 64); err == nil {
			point, n = point[:i], v
		}
	}
	name, action = point, act
	left.Store(n)
}

// Pass is called at the step named point. It returns an error, or does not
// return at all, if a test armed that point.
func Pass(point string) error {
	if name == "" || name != point || left.Add(-1) != 0 {
		return nil
	}
	switch action {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	default:
		return fmt.Errorf("failpoint %s", point)
	}
}
