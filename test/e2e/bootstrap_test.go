package e2e_test

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// logs is what the entrypoint of a sandbox has written.
func (h host) logs(t *testing.T, id string) string {
	t.Helper()
	r, err := h.api.Logs(t.Context(), id, client.AllLines, client.LogTimes{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func contains(s, part string) error {
	if !strings.Contains(s, part) {
		return fmt.Errorf("%q does not hold %q", s, part)
	}
	return nil
}

func values(m map[string]string) map[string]*string {
	out := map[string]*string{}
	for k, v := range m {
		out[k] = &v
	}
	return out
}

// TestPreScript: the file that EXECD_BOOTSTRAP_PRE_SCRIPT names is read before the
// entrypoint and makes the environment of all that runs; a missing one is a warning, a
// failing one the end.
func TestPreScript(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			r := spec(runtime, "sh", "-c", `echo "entry $FROM_PRE"; exec sleep 1000`)
			r.Env = values(map[string]string{"EXECD_BOOTSTRAP_PRE_SCRIPT": "/root/it's pre.sh", "GONE": "yes", "STAYS": "a\nb"})
			id := h.create(t, r).ID
			eventually(t, 10*time.Second, func() error { return contains(h.logs(t, id), "not found or not readable\nentry \n") })
			const show = `echo "[$FROM_PRE] [${GONE-}] [$STAYS] $PATH"; env | grep -c -e ^SHLVL= -e ^OLDPWD=; cat /root/order`
			again := func(script string) {
				t.Helper()
				if _, err := h.exec(t.Context(), id, "sh", "-c", `cat > "/root/it's pre.sh" <<'EOF'`+"\n"+script+"EOF"); err != nil {
					t.Fatal(err)
				}
				if err := h.api.Stop(t.Context(), id, 0); err != nil {
					t.Fatal(err)
				}
			}
			// What it leaves behind in the background keeps nobody waiting; what it takes time for does.
			again("export FROM_PRE='a b' PATH=/opt/x:$PATH\nunset GONE\nsleep 500 &\necho from-pre\nsleep 1\necho read > /root/order\n")
			if sb, err := h.api.Restart(t.Context(), id, true); err != nil || sb.Status.State != wire.Running {
				t.Fatal(sb.Status, err)
			}
			eventually(t, 10*time.Second, func() error { return contains(h.logs(t, id), "from-pre\nentry a b\n") })
			got := h.inside(t, id, "env", "sh", "-c", show)
			if !strings.HasPrefix(got, "[a b] [] [a\nb] /opt/x:") || !strings.HasSuffix(got, "\n0\nread\n") {
				t.Errorf("%q", got)
			}
			// A shell counts itself: what it was given is the same.
			if got := h.stdout(t, id, "echo $FROM_PRE"); got != "a b" {
				t.Errorf("%q", got)
			}
			again("echo before it breaks\nfalse\necho unreached\n")
			sb, err := h.api.Restart(t.Context(), id, true)
			if err == nil && sb.Status.State == wire.Running {
				sb, err = h.awaitState(t, id, wire.Failed, patience), nil
			}
			status := sb.Status.Message
			if err != nil {
				status = err.Error()
			}
			if !strings.Contains(status, "before it breaks") || strings.Contains(status, "unreached") {
				t.Errorf("%s: %+v, %v", status, sb.Status, err)
			}
			h.deleteAll(t)
		})
	}
}

// TestShellText: BOOTSTRAP_CMD and "-c" are text for a shell.
func TestShellText(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			for want, c := range map[string]struct {
				env        map[string]string
				entrypoint []string
			}{
				"one two\n":    {map[string]string{"BOOTSTRAP_CMD": `X=one; echo $X two && exec sleep 1000`}, []string{"/nonexistent"}},
				"three four\n": {nil, []string{"-c", "X=three;", "echo $X four && exec sleep 1000"}},
				"by /bin/dash\n": {
					map[string]string{"BOOTSTRAP_CMD": `echo by $0; exec sleep 1000`, "BOOTSTRAP_SHELL": "/bin/dash"},
					[]string{"x"},
				},
			} {
				r := spec(runtime, c.entrypoint...)
				r.Env = values(c.env)
				id := h.create(t, r).ID
				eventually(t, 10*time.Second, func() error { return contains(h.logs(t, id), want) })
			}
			h.deleteAll(t)
		})
	}
}
