package e2e_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// poolDo runs "sandboxd pool" on the host of a daemon.
func (h host) poolDo(t *testing.T, args ...string) (string, error) {
	t.Helper()
	args = append([]string{"pool", "--config", h.Config}, args...)
	out, err := exec.CommandContext(t.Context(), daemontest.Bin("sandboxd"), args...).CombinedOutput()
	return string(out), err
}

// TestPoolGrowsAndMoves: a pool grows while a guest of each runtime writes to it, and the guests see the new
// space. It is checked, moved to another directory while they are stopped, and has their files there.
func TestPoolGrowsAndMoves(t *testing.T) {
	dir := t.TempDir()
	state, away := filepath.Join(dir, "state"), filepath.Join(dir, "away")
	if err := os.Mkdir(away, 0o700); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, daemontest.Options{
		Instance: daemontest.Other, StateDir: state, Pool: pool.BtrfsLoop, PoolSize: "256Mi", Storage: []string{`reserve = "16Mi"`},
	})
	t.Cleanup(func() {
		h.Stop()
		if err := unix.Unmount(filepath.Join(state, "pool"), 0); err != nil {
			t.Error(err)
		}
	})
	ok := func(words string, args ...string) {
		t.Helper()
		if out, err := h.poolDo(t, args...); err != nil || !strings.Contains(out, words) {
			t.Errorf("pool %v: %v\n%s", args, err, out)
		}
	}
	size := func(id string) (kib int) {
		t.Helper()
		out, err := h.exec(t.Context(), id, "sh", "-c", "df -k / | awk 'END { print $2 }'")
		if _, serr := fmt.Sscan(out, &kib); err != nil || serr != nil {
			t.Errorf("df: %q, %v", out, err)
		}
		return kib
	}
	const writes = "i=0; while [ ! -e /root/enough ]; do i=$((i+1)); head -c 400000 /dev/zero | tr '\\0' $((i%10)) >/root/f &&" +
		" sync /root/f && touch /root/begun || exit 1; done; tr -d $((i%10)) </root/f | wc -c; wc -c </root/f"
	type ended struct {
		out string
		err error
	}
	all, results := []wire.Sandbox{}, map[string]chan ended{}
	for _, runtime := range runtimes {
		sb := h.create(t, spec(runtime))
		done := make(chan ended, 1)
		all, results[sb.ID] = append(all, sb), done
		go func() {
			out, err := h.exec(t.Context(), sb.ID, "sh", "-c", writes)
			done <- ended{out, err}
		}()
		if _, err := h.exec(t.Context(), sb.ID, "sh", "-c", "until [ -e /root/begun ]; do :; done"); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := h.poolDo(t, "grow", "128Mi"); err == nil || !strings.Contains(out, "cannot become smaller") {
		t.Errorf("made smaller: %v\n%s", err, out)
	}
	if out, err := h.poolDo(t, "move", away); err == nil || !strings.Contains(out, "stop it first") {
		t.Errorf("moved while the daemon runs: %v\n%s", err, out)
	}
	ok("the pool has 384 MiB", "grow", "+128Mi")
	ok("set it to 512Mi", "grow", "512Mi")
	for _, sb := range all {
		if kib := size(sb.ID); kib != 512<<10 {
			t.Errorf("inside, the file system has %d KiB", kib)
		}
		if _, err := h.exec(t.Context(), sb.ID, "touch", "/root/enough"); err != nil {
			t.Error(err)
		}
		if e := <-results[sb.ID]; e.err != nil || e.out != "0\n400000\n" {
			t.Errorf("the writer: %q, %v", e.out, e.err)
		}
	}
	ok("no errors found", "check")

	h.Stop()
	if out, err := h.poolDo(t, "move", away); err == nil || !strings.Contains(out, "sandboxctl stop") {
		t.Errorf("moved while sandboxes run: %v\n%s", err, out)
	}
	h.Start()
	for _, sb := range all {
		if err := h.api.Stop(t.Context(), sb.ID, 0); err != nil {
			t.Fatal(err)
		}
	}
	h.Stop()
	ok(pool.MovedImage, "move", away)
	h.Start()
	ok(pool.MovedImage, "show")
	for _, sb := range all {
		if _, err := h.api.Restart(t.Context(), sb.ID, true); err != nil {
			t.Fatal(err)
		}
		if out, err := h.exec(t.Context(), sb.ID, "wc", "-c", "/root/f"); err != nil || out != "400000 /root/f\n" {
			t.Errorf("after the move: %q, %v", out, err)
		}
	}
	h.deleteAll(t)
}
