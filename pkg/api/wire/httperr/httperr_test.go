package httperr

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

// TestBodyOfInternal: of what failed in sandboxd, a client reads what the host lacks and nothing else.
func TestBodyOfInternal(t *testing.T) {
	const unknown = "sandboxd failed to do this; the reason is in its log, under request r-1"
	const full = "a disk of the host is full: free space on it (more in the log of sandboxd, request r-1)"
	const quota = "a quota of a disk is used up: delete files that it counts, or raise it (more in the log of sandboxd, request r-1)"
	for err, want := range map[error]string{
		errors.New("/var/lib/secret is odd"):                    unknown,
		fmt.Errorf("open /proc/meminfo: %w", syscall.EMFILE):    "sandboxd has reached its limit of open files: run fewer",
		fmt.Errorf("write /var/lib/x/pool: %w", syscall.ENOSPC): full,
		fmt.Errorf("write /var/lib/x/y: %w", syscall.EDQUOT):    quota,
	} {
		status, body := Body(err, "r-1")
		if status != http.StatusInternalServerError || !strings.HasPrefix(body.Message, want) || strings.Contains(body.Message, "/") {
			t.Errorf("%v: %d %q", err, status, body.Message)
		}
	}
}
