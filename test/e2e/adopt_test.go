package e2e_test

import (
	"context"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// adopted talks to the agent of a sandbox with a token, past the daemon.
func adopted(t *testing.T, id, token string) *agent.Client {
	t.Helper()
	route, err := exec.Command("ip", "-4", "route", "show", "dev", "sb-"+id).Output()
	if err != nil || len(strings.Fields(string(route))) == 0 {
		t.Fatalf("where is %s? %q, %v", id, route, err)
	}
	addr := net.JoinHostPort(strings.Fields(string(route))[0], strconv.Itoa(agent.Port))
	c := agent.New(func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp4", addr) }, token)
	t.Cleanup(c.Close)
	return c
}

// TestAdopt: behind the walls of each runtime, an idle agent becomes that of a sandbox with an
// entrypoint, and then that of a copy of it, as the daemon's claims and forks have it. No client
// can ask for that.
func TestAdopt(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			ctx := t.Context()
			sb := h.create(t, spec(runtime))
			const made = "echo 00000000000000000000000000000000 >/etc/machine-id; chmod 444 /etc/machine-id"
			if _, err := h.exec(ctx, sb.ID, "sh", "-c", made); err != nil {
				t.Fatal(err)
			}
			e, err := h.api.Endpoint(ctx, sb.ID, agent.Port)
			if err != nil {
				t.Fatal(err)
			}
			says := func(token, command, want string) {
				t.Helper()
				if got, err := adopted(t, sb.ID, token).Probe(ctx, command, time.Minute); err != nil || strings.TrimSpace(got) != want {
					t.Errorf("%s says %q, %v; want %q", command, got, err, want)
				}
			}
			old := e.Headers[wire.HeaderAgentToken]
			a := agent.Adoption{Bootstrap: agent.Bootstrap{
				Token: "claimed", Hostname: "another", Env: map[string]string{"WHO": "claimed"},
				Entrypoint: []string{"sh", "-c", "trap 'exit 9' TERM; : >/dev/shm/up; while :; do sleep 0.05; done"},
			}}
			err = adopted(t, sb.ID, old).Adopt(ctx, a)
			if errs.CodeOf(err) != errs.Unsupported || !strings.Contains(err.Error(), sb.ID) {
				t.Errorf("another host name: %v", err)
			}
			h.answers(t, sb.ID)
			a.Hostname = sb.ID
			if err := adopted(t, sb.ID, old).Adopt(ctx, a); err != nil {
				t.Fatal(err)
			}
			says("claimed", "echo $WHO $(hostname) $(cat /etc/machine-id) $(ls /run/sandboxd 2>/dev/null)",
				"claimed "+sb.ID+" 00000000000000000000000000000000")
			if err := adopted(t, sb.ID, old).Ready(ctx); errs.CodeOf(err) != errs.Denied {
				t.Errorf("with the token of before: %v", err)
			}
			a.Token, a.Env = "copied", map[string]string{"WHO": "copied"}
			if err := adopted(t, sb.ID, "claimed").Adopt(ctx, a); errs.CodeOf(err) != errs.WrongState {
				t.Errorf("a claim of one that is in use: %v", err)
			}
			a.Copy = &agent.Copy{Generation: "0a", MachineID: strings.Repeat("12", 16), Seed: make([]byte, agent.MinSeed)}
			if err := adopted(t, sb.ID, "claimed").Adopt(ctx, a); err != nil {
				t.Fatal(err)
			}
			says("copied", "echo $WHO $(hostname) $(cat /etc/machine-id /run/sandboxd/generation) $(stat -c %a /etc/machine-id)",
				"copied "+sb.ID+" "+strings.Repeat("12", 16)+" 0a 444")
			says("copied", "until [ -e /dev/shm/up ]; do sleep 0.01; done", "")
			adopted(t, sb.ID, "copied").Probe(ctx, "kill $(pgrep -o -f 'trap .exit')", time.Minute) //nolint:errcheck // the agent ends, too
			if sb := h.awaitState(t, sb.ID, wire.Failed, time.Minute); !strings.Contains(sb.Status.Message, "9") {
				t.Errorf("it ended as %+v", sb.Status)
			}
			h.deletes(t, sb.ID)
		})
	}
}
