package api

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

const killed = `{"type":"error","timestamp":2,"error":{"ename":"CommandExecError","evalue":"-1","traceback":["signal: killed"]}}` + "\n\n"

// TestOOMIsTold: a kill that the host counted is explained, once, in the last
// event; exit code and name stay, and every other byte.
func TestOOMIsTold(t *testing.T) {
	const output = `{"type":"stdout","text":"{\"type\":\"error\"","timestamp":1}` + "\n\n"
	for name, c := range map[string]struct {
		kills int64
		end   string
		told  bool
	}{
		"killed for memory": {1, killed, true},
		"killed otherwise":  {0, killed, false},
		"timed out":         {1, strings.Replace(killed, `killed"`, `killed","command timed out after 1s"`, 1), false},
		"exit code":         {1, strings.Replace(killed, `"-1"`, `"3"`, 1), false},
		"no JSON":           {1, `{"type":"error",,` + "\n\n", false},
		"not the end":       {1, killed + output, false},
		"endless line":      {1, `{"type":"error"` + strings.Repeat("x", 16<<10) + "\n\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.agent = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Type", "text/event-stream")
				io.WriteString(rw, output) //nolint:errcheck // a recorder
				w.ooms.Add(c.kills)
				io.WriteString(rw, c.end) //nolint:errcheck // a recorder
			})
			got := string(w.do("POST", "/v1/sandboxes/"+w.create().ID+"/proxy/44772/command", `{"command":"x"}`).body)
			want := output + c.end
			if c.told {
				want = strings.Replace(want, `killed"]`, `killed","oom: command was killed: out of memory (sandbox limit 2048 MiB)"]`, 1)
			}
			if got != want {
				t.Errorf("got  %.400s\nwant %.400s", got, want)
			}
		})
	}
}

// TestOOMOfCode: the error of a context that died says so in its value, which is
// what SDKs show.
func TestOOMOfCode(t *testing.T) {
	w := newWorld(t)
	const died = `{"type":"error","timestamp":2,"error":{"ename":"ContextDied","evalue":"context x died","traceback":["signal: killed"]}}` +
		"\n\n"
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		w.ooms.Add(1)
		io.WriteString(rw, died) //nolint:errcheck // a recorder
	})
	got := string(w.do("POST", "/v1/sandboxes/"+w.create().ID+"/proxy/44772/code", `{"code":"x"}`).body)
	const why = "oom: the context was killed and its state is lost: out of memory (sandbox limit 2048 MiB)"
	if want := strings.Replace(strings.Replace(died, "context x died", why, 1), `killed"]`, `killed","`+why+`"]`, 1); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestOOMOfBackground: the agent hears from the daemon, and from no client, how many
// kills there were, with requests that start a command or ask for its end; a client
// hears it from the daemon, and from no agent.
func TestOOMOfBackground(t *testing.T) {
	w := newWorld(t)
	var told []string
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		told = append(told, r.URL.Path+" "+strings.Join(r.Header.Values(agent.OOMKillsHeader), ","))
		rw.Header().Set(agent.OOMKillsHeader, "98")
	})
	w.ooms.Store(7)
	at := "/v1/sandboxes/" + w.create().ID + "/proxy/44772"
	var heard []string
	for _, r := range [][3]string{
		{"POST", "/command", `{"command":"x","background":true}`},
		{"GET", "/command/status/x", ""},
		{"GET", "/files/info", ""},
	} {
		a := w.do(r[0], at+r[1], r[2], agent.OOMKillsHeader, "99")
		heard = append(heard, strings.Join(a.Header.Values(agent.OOMKillsHeader), ","))
	}
	if want := []string{"7", "7", ""}; !slices.Equal(heard, want) {
		t.Errorf("the client was told %q, want %q", heard, want)
	}
	if got, want := strings.Join(told, "; "), "/command 7; /command/status/x 7; /files/info "; got != want {
		t.Errorf("the agent was told %q, want %q", got, want)
	}
}
