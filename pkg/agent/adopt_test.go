package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestAdoptKeeps: after the adoption of an agent that idled the client goes on with the new token and
// the same connection.
func TestAdoptKeeps(t *testing.T) {
	var tokens []string
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		tokens = append(tokens, r.Header.Get(TokenHeader))
	}))
	defer srv.Close()
	for range 10 { // net/http does not keep a connection whose writer the host delays by 50 ms
		tokens = nil
		var dials atomic.Int32
		c := New(dialer(srv.Listener.Addr().String(), &dials), "old")
		err := c.Adopt(t.Context(), Adoption{Bootstrap: Bootstrap{Token: "new"}})
		if err == nil {
			err = c.Tell(t.Context(), Limits{})
		}
		c.Close()
		if err != nil || !slices.Equal(tokens, []string{"old", "new"}) {
			t.Fatalf("%q, %v", tokens, err)
		}
		if dials.Load() == 1 {
			return
		}
	}
	t.Error("it dials anew each time")
}

// TestAdopt: what the client sends, and what it makes of each answer.
func TestAdopt(t *testing.T) {
	var status atomic.Int32
	var answer atomic.Value
	answer.Store("")
	var sent Adoption
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != "POST" || r.URL.Path != "/adopt" || r.Header.Get(TokenHeader) != "old" {
			t.Errorf("%s %s with the token %q", r.Method, r.URL, r.Header.Get(TokenHeader))
		}
		b, err := io.ReadAll(r.Body)
		if err != nil || json.Unmarshal(b, &sent) != nil {
			t.Errorf("%q, %v", b, err)
		}
		w.WriteHeader(int(status.Load()))
		io.WriteString(w, answer.Load().(string)) //nolint:errcheck // its client is the test
	}))
	defer srv.Close()
	var dials atomic.Int32
	c := New(dialer(srv.Listener.Addr().String(), &dials), "old")
	defer c.Close()
	a := Adoption{
		Bootstrap: Bootstrap{Token: "new", Hostname: "lab", Env: map[string]string{"A": "1"}},
		Copy:      &Copy{Generation: "ab", MachineID: strings.Repeat("0f", 16), Seed: make([]byte, MinSeed)},
	}
	for _, x := range []struct {
		status int
		body   string
		code   errs.Code
		says   string
	}{
		{200, "", "", ""},
		{401, `{"code":"UNAUTHORIZED","message":"x"}`, errs.Denied, "another sandbox"},
		{404, `{"code":"NOT_SUPPORTED","message":"this agent has no /adopt"}`, errs.Unsupported, "older release"},
		{409, `{"code":"x","message":"in use\n\u001b[31m"}`, errs.WrongState, "in use  [31m"},
		{501, `{"code":"x","message":"its host name"}`, errs.Unsupported, "its host name"},
		{503, `{"code":"x","message":"ends"}`, errs.Internal, "503: ends"},
		{500, strings.Repeat("<", 1<<20), errs.Internal, "status 500"},
		{409, fmt.Sprintf(`{"message":%q}`, strings.Repeat("x", 3<<10)), errs.WrongState, "xxx"},
	} {
		status.Store(int32(x.status))
		answer.Store(x.body)
		sent = Adoption{}
		err := c.Adopt(t.Context(), a)
		if (err == nil) != (x.status == 200) || err != nil && (errs.CodeOf(err) != x.code || !strings.Contains(err.Error(), x.says) ||
			len(err.Error()) > 2*maxError) {
			t.Errorf("%d %.50s: %s %v", x.status, x.body, errs.CodeOf(err), err)
		}
		if sent.Protocol != Protocol || sent.Token != "new" || sent.Hostname != "lab" || sent.Env["A"] != "1" || sent.Copy == nil ||
			sent.Copy.Generation != "ab" || len(sent.Copy.Seed) != MinSeed {
			t.Errorf("sent %+v", sent)
		}
	}
	// What no agent can take is not sent.
	sent = Adoption{}
	large := a
	large.Env = map[string]string{"A": strings.Repeat("x", MaxAdoption)}
	bad := a
	bad.Copy = &Copy{Generation: "ab", MachineID: "x", Seed: make([]byte, MinSeed)}
	none := a
	none.Token = ""
	for _, a := range []Adoption{large, bad, none} {
		if err := c.Adopt(t.Context(), a); err == nil || sent.Token != "" {
			t.Errorf("%v, %+v", err, sent)
		}
	}
}
