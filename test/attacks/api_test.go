package attacks_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	openapi "github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// apiAttacks ask for what the one who asks may not have.
var apiAttacks = []attack{
	// roles, walked over the table of routes
	walking("none", "401", weak.Keys),
	walking("wrong", "401", weak.Keys),
	walking("removed", "401", weak.Keys),
	walking("viewer", "403", weak.Roles),
	walking("operator", "403", weak.Roles),
	{
		name: "no key, by another spelling of a path", wall: "the raw path is split once, and cleaned by nobody",
		ask: askOddly, held: words{"refused"}, daemon: without(weak.Keys),
	},
	{
		name: "a key in odd places", wall: "a key is a header", held: words{"401"}, daemon: without(weak.Keys), got: words{"200"},
		ask: func(t *testing.T, w *target) string {
			k := w.keys["admin"]
			for _, path := range []string{"/v1/sandboxes?api_key=" + k, "/v1/sandboxes?OPEN-SANDBOX-API-KEY=" + k} {
				if a := w.ask(t, "GET", path, "", nil, "Cookie", "OPEN-SANDBOX-API-KEY="+k); a.status != 401 {
					return a.word()
				}
			}
			return "401"
		},
	},
	{
		name: "drain the host from elsewhere", wall: "the Unix socket alone may", held: words{"403"},
		daemon: unproven("pkg/api tests both ways in"),
		ask:    func(t *testing.T, w *target) string { return w.asAdmin(t, "PUT", "/v1/system/drain", "") },
	},

	// tokens
	{
		name: "a port without its token", wall: "tokens of ports", held: words{"401"}, got: words{"200"}, daemon: without(weak.Tokens),
		ask: func(t *testing.T, w *target) string { return w.ask(t, "GET", port(w.a, 8000, "echo"), "", nil).word() },
	},
	{
		name: "the token of A on B", wall: "a token is of one port of one sandbox", held: words{"401"}, got: words{"200"},
		daemon: without(weak.Tokens),
		ask: func(t *testing.T, w *target) string {
			return w.ask(t, "GET", port(w.b, 8000, "echo"), "", nil, w.tokens(t, w.a, 8000)...).word()
		},
	},
	{
		name: "the page of A, with its visitor's cookie of B", wall: "no cookie opens a port whose host others have",
		held: words{"401"}, got: words{"200"}, daemon: without(weak.Cookies),
		ask: func(t *testing.T, w *target) string {
			token := w.tokens(t, w.b, 8000)[1] // the only header
			return w.ask(t, "GET", port(w.b, 8000, "echo"), "", nil, "Cookie", "sandboxd_token_8000="+token,
				"Sec-Fetch-Site", "same-origin", "Sec-Fetch-Mode", "cors").word()
		},
	},
	{
		name: "the agent's token of A on B", wall: "each agent has a token of its own", held: words{"401"}, got: words{"200"},
		daemon: without(weak.Tokens),
		ask: func(t *testing.T, w *target) string {
			return w.ask(t, "GET", port(w.b, 44772, "ping"), "", nil, w.tokens(t, w.a, wire.AgentPort)...).word()
		},
	},
	{
		name: "a port's token on the agent", wall: "the agent's port takes its own token alone", held: words{"401"}, got: words{"200"},
		daemon: without(weak.Tokens),
		ask: func(t *testing.T, w *target) string {
			return w.ask(t, "GET", port(w.a, 44772, "ping"), "", nil, w.tokens(t, w.a, 8000)...).word()
		},
	},
	{
		name: "a viewer's key on a port", wall: "roles", held: words{"401", "403"}, got: words{"200"}, daemon: without(weak.Roles),
		ask: func(t *testing.T, w *target) string {
			return w.ask(t, "GET", port(w.a, 8000, "echo"), w.keys["viewer"], nil).word()
		},
	},

	// what a guest learns of its clients
	{
		name: "an API key, read by a guest", wall: "keys are taken out of what is passed on", held: words{"hidden"},
		daemon: without(weak.Headers), ask: func(t *testing.T, w *target) string { return echoed(t, w, w.keys["admin"]) },
	},
	{
		name: "a foreign address of the client", wall: "only trusted proxies name the client", held: words{"hidden"},
		daemon: without(weak.Headers),
		ask: func(t *testing.T, w *target) string {
			return echoed(t, w, "198.51.100.66", "X-Real-Ip", "198.51.100.66")
		},
	},
	{
		name: "a guest's cookie for a domain", wall: "an answer speaks for its port alone", held: words{"own"},
		daemon: without(weak.Answers),
		ask: func(t *testing.T, w *target) string {
			h := w.ask(t, "GET", port(w.a, 8000, "cookie"), w.keys["admin"], nil).header
			if strings.Contains(h.Get("Set-Cookie"), "Domain") || h.Get("Clear-Site-Data") != "" {
				return "ok"
			}
			return "own"
		},
	},

	// paths
	{
		name: "an id that leads elsewhere", wall: "an id is looked up before it names a file", held: words{"refused"},
		daemon: unproven("no code joins what a client wrote to a path"),
		ask: func(t *testing.T, w *target) string {
			for _, id := range []string{
				"..%2f..%2fetc", "%2e%2e", "..", "taaaaaaaaaa%00", "taaaaaaaaaaa%2f..", strings.Repeat("a", 5000), "%ff%fe",
			} {
				for _, path := range []string{"/v1/sandboxes/%s", "/v1/snapshots/%s", "/v1/volumes/%s", "/v1/sandboxes/%s/logs"} {
					if a := w.ask(t, "GET", fmt.Sprintf(path, id), daemontest.Key, nil); a.status < 400 || a.status >= 500 {
						return fmt.Sprintf("%s of %s", a.word(), fmt.Sprintf(path, id))
					}
				}
			}
			return "refused"
		},
	},
	{
		name: "a file of the host by the agent", wall: "the agent walks, inside", held: words{"404", "400"}, got: words{"200"},
		daemon: without(weak.Descriptors),
		ask: func(t *testing.T, w *target) string {
			for _, path := range []string{w.marker, "/../../../.." + w.marker, "/proc/1/root" + w.marker, "/proc/1/fd/3" + w.marker} {
				a := w.ask(t, "GET", port(w.a, 44772, "files/download?path="+path), daemontest.Key, nil)
				if strings.Contains(a.body, secret) || a.status < 400 {
					return a.word()
				}
			}
			return "404"
		},
	},
	{
		name: "an upload to the host", wall: "the agent walks, inside", held: words{"unchanged"},
		daemon: unproven("the daemon opens no path of an upload"),
		ask: func(t *testing.T, w *target) string {
			err := w.api.Files(w.a.ID).Put(t.Context(), []client.Upload{uploadOf("/../../../.." + w.marker)})
			return unchanged(t, w, fmt.Sprint(err))
		},
	},
	{
		name: "names that are paths", wall: "names have a form", held: words{"400"}, daemon: unproven("names are looked up in the store"),
		ask: func(t *testing.T, w *target) string {
			for _, r := range [][3]string{
				{"POST", "/v1/sandboxes", creation(`"extensions":{"sandboxd.name":"../../x"}`)},
				{"POST", "/v1/volumes", `{"name":"../../x"}`},
				{"POST", "/v1/keys", `{"name":"../../x"}`},
				{"POST", "/v1/sandboxes/" + w.a.ID + "/rename", `{"name":"a/../../x"}`},
				{"POST", "/v1/sandboxes/" + w.a.ID + "/commit", `{"name":"../../x"}`},
			} {
				if word := w.asAdmin(t, r[0], r[1], r[2]); word != "400" {
					return word + " of " + r[1]
				}
			}
			return "400"
		},
	},

	// directories of the host
	{
		name: "a directory of the host", wall: "storage.allowed_host_paths", held: words{"400"}, daemon: without(weak.HostPaths),
		ask: func(t *testing.T, w *target) string { return mounted(t, w, w.dir, "/mnt/marker") },
	},
	{
		name: "a directory of the host through a link", wall: "no link is followed below an allowed directory", held: words{"400"},
		daemon: without(weak.HostLinks), ask: func(t *testing.T, w *target) string { return mounted(t, w, w.lent+"/up", "/mnt/marker") },
	},
	{
		name: "directories of the kernel and of sandboxd", wall: "storage.allowed_host_paths, their kinds", held: words{"400"},
		daemon: unproven("they stand behind the list; pkg/snapshot tests them alone"),
		ask: func(t *testing.T, w *target) string {
			for _, dir := range []string{"/proc", "/sys", "/dev", "/", w.StateDir, w.Instance.RunDir(), "/run", w.lent + "/../.."} {
				if word := mounted(t, w, dir, "/mnt/x"); word != "400" {
					return word + " of " + dir
				}
			}
			return "400"
		},
	},
	{
		name: "a volume over the kernel's files of a guest", wall: "paths of mounts are checked", held: words{"400"},
		daemon: unproven("the check is one of pkg/api/spec, tested there"),
		ask: func(t *testing.T, w *target) string {
			for _, at := range []string{"/", "/proc", "/proc/sys", "/sys", "/dev", "/opt/opensandbox", "/.sandboxd", "/mnt/../proc"} {
				body := creation(fmt.Sprintf(`"volumes":[{"name":"v","host":{"path":%q},"mountPath":%q}]`, w.lent, at))
				if word := w.asAdmin(t, "POST", "/v1/sandboxes", body); word != "400" {
					return word + " at " + at
				}
			}
			return "400"
		},
	},

	// rights that no request can give
	{
		name: "a privileged sandbox", wall: "no field of a request reaches the rights", held: words{"400"},
		daemon: unproven("there is no field"),
		ask: func(t *testing.T, w *target) string {
			for _, ext := range []string{"sandboxd.privileged", "sandboxd.capabilities", "sandboxd.seccomp", "sandboxd.annotations"} {
				if word := w.asAdmin(t, "POST", "/v1/sandboxes", creation(fmt.Sprintf(`"extensions":{%q:"true"}`, ext))); word != "400" {
					return word + " of " + ext
				}
			}
			return "400"
		},
	},
	{
		name: "a variable with a second one in it", wall: "names of variables are checked", held: words{"400"},
		daemon: unproven("the check is one of pkg/api/spec, tested there"),
		ask: func(t *testing.T, w *target) string {
			for _, env := range []string{`"A\nLD_PRELOAD":"x"`, `"A=B":"x"`, `"":"x"`, `"A\u0000B":"x"`, `"OPENSANDBOX_LIFECYCLE":"x"`} {
				if word := w.asAdmin(t, "POST", "/v1/sandboxes", creation(`"env":{`+env+`}`)); word != "400" {
					return word + " of " + env
				}
			}
			return "400"
		},
	},
	{
		name: "more than the host has", wall: "limits are checked", held: words{"400"}, daemon: unproven("pkg/api tests the bounds"),
		ask: func(t *testing.T, w *target) string {
			for _, limit := range []string{`"memory":"9Ti"`, `"memory":"-1"`, `"pids":"99999999999"`, `"cpu":"1000000"`, `"disk":"9999999Ti"`} {
				body := fmt.Sprintf(`{"image":{"uri":"base"},"entrypoint":["true"],"resourceLimits":{%s}}`, limit)
				if word := w.asAdmin(t, "POST", "/v1/sandboxes", body); word != "400" {
					return word + " of " + limit
				}
			}
			return "400"
		},
	},
}

// walking asks for every route with the key of somebody who may not have it. The paths
// name nothing that exists.
func walking(who, held string, wall weak.Wall) attack {
	return attack{
		name: "every route as " + who, wall: "the table of routes", held: words{held}, daemon: without(wall),
		ask: func(t *testing.T, w *target) string { return w.walk(t, who, held) },
	}
}

// walk is "ok" and the route if a route lets somebody in. Without the wall it asks only
// what changes nothing.
func (w *target) walk(t *testing.T, who, want string) string {
	t.Helper()
	var document struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	fromJSON(t, openapi.JSON, &document)
	names := strings.NewReplacer("{sandboxId}", "taaaaaaaaaaa", "{snapshotId}", "snap-x", "{port}", "8000", "{ref}", "nope",
		"{name}", "nope", "{kind}", "logs")
	asked := 0
	for _, path := range slices.Sorted(maps.Keys(document.Paths)) {
		for method := range document.Paths[path] {
			method, path := strings.ToUpper(method), names.Replace(path)
			need, served := api.RoleOf(method, path)
			if !served || need == "anyone" || need == "tokens" || record.Role(who).Covers(need) {
				continue
			}
			if w.weak != "" && (method != "GET" || strings.HasSuffix(path, "/events") || strings.HasSuffix(path, "/backup")) {
				continue
			}
			asked++
			for _, below := range []string{"", "/v1"} {
				if a := w.ask(t, method, below+strings.TrimPrefix(path, "/v1"), w.keys[who], strings.NewReader("{}")); a.word() != want {
					t.Logf("%s %s as %s: %d %.200s", method, path, who, a.status, a.body)
					return "ok"
				}
			}
		}
	}
	if asked < 3 {
		t.Errorf("%s was refused %d routes only: is the document complete?", who, asked)
	}
	return want
}

// askOddly asks for a route that needs a key as if it were one that needs none.
func askOddly(t *testing.T, w *target) string {
	for _, path := range []string{
		"/health/../v1/keys", "/docs/../keys", "/openapi.json/../v1/keys", "//v1/keys", "/v1//keys", "/v1/keys/", "/v1/./keys",
		"/v1/%6beys", "/V1/KEYS", "/v1/keys;x", "/v1/keys?x=/health", "/v1/keys%3f", "/health%2f..%2fkeys", "/v1/v1/keys", "/keys",
		"/v1/sandboxes/x/proxy/../../../keys", "/v1/sandboxes/x/proxy/8000/../../../../keys", `\v1\keys`, "/v1/keys%00", "*",
	} {
		for _, header := range [][2]string{
			{"X-Original-Url", "/v1/keys"},
			{"X-Rewrite-Url", "/v1/keys"},
			{"X-Forwarded-For", "127.0.0.1"},
			{"X-Http-Method-Override", "GET"},
		} {
			if a := w.ask(t, "GET", path, "", nil, header[0], header[1]); a.status >= 200 && a.status < 300 {
				t.Logf("%s with %s: %d %.200s", path, header[0], a.status, a.body)
				return "ok"
			}
		}
	}
	return "refused"
}

// echoed is "ok" if a guest reads a text in a request of an admin.
func echoed(t *testing.T, w *target, text string, header ...string) string {
	t.Helper()
	a := w.ask(t, "GET", port(w.a, 8000, "echo"), w.keys["admin"], nil, header...)
	switch {
	case a.status != http.StatusOK:
		return a.word()
	case strings.Contains(a.body, text):
		return "ok"
	}
	return "hidden"
}

// creation is the body of a request for a sandbox.
func creation(more string) string {
	return `{"image":{"uri":"base"},"entrypoint":["true"],"resourceLimits":{"cpu":"1","memory":"128Mi"},` + more + `}`
}

// mounted asks for a directory of the host as a volume: "ok" if a guest reads the marker.
func mounted(t *testing.T, w *target, dir, marker string) string {
	t.Helper()
	sb, err := w.api.Create(t.Context(), wire.CreateRequest{
		Image:          &wire.Image{URI: "base"},
		ResourceLimits: map[string]string{"memory": "128Mi", "cpu": "1"},
		Extensions:     map[string]string{wire.ExtRuntime: "runc", wire.ExtIdle: "true"},
		Volumes:        []wire.VolumeMount{{Name: "v", Host: &wire.HostPath{Path: dir}, MountPath: "/mnt", ReadOnly: true}},
	}, true)
	if err != nil {
		return statusOf(t, err)
	}
	defer w.api.Delete(t.Context(), sb.ID) //nolint:errcheck // deleteAll finds it
	if g := w.exec(t, sb.ID, 0, []string{"cat", marker}); strings.Contains(g.String(), secret) {
		return "ok"
	}
	return "mounted"
}
