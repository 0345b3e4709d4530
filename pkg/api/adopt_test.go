package api

import (
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestAdoptIsForTheDaemon: no client makes a sandbox's agent that of another, whatever key or
// token it has and however it writes the path.
func TestAdoptIsForTheDaemon(t *testing.T) {
	w := newWorld(t)
	var asked []string
	w.agent = http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked = append(asked, r.URL.Path) })
	at := "/v1/sandboxes/" + w.create().ID + "/proxy/44772"
	for _, path := range []string{
		"/adopt", "/adopt?x=1", "/%61dopt", "/adop%74", "//adopt", "/./adopt", "/x/../adopt", "/adopt/",
		"/adopt%2f", "/%2fadopt", "/.%2fadopt",
	} {
		for who, header := range map[string][]string{"operator": nil, "the agent's token": {wire.HeaderAgentToken, "agent-token"}} {
			for _, method := range []string{"POST", "GET", "PUT"} {
				if a := w.do(method, at+path, `{"protocol":1,"token":"mine"}`, header...); a.StatusCode/100 != 4 {
					t.Errorf("%s, %s %s: %d %s", who, method, path, a.StatusCode, a.body)
				}
			}
		}
	}
	if len(asked) > 0 {
		t.Errorf("the agent was asked for %s", strings.Join(asked, ", "))
	}
	if a := w.do("GET", at+"/adopted", ""); a.StatusCode != 200 || len(asked) != 1 {
		t.Errorf("another path: %d, %v", a.StatusCode, asked)
	}
}
