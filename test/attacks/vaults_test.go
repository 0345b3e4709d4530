package attacks_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	openapi "github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/oci/trust"
	"github.com/sandboxd/sandboxd/test/internet"
)

// A vaulted is a sandbox with credentials, and what its rows are told.
type vaulted struct {
	id    string
	mark  string   // all its values have it
	value string   // of the credential token
	words []string // as strings.NewReplacer takes them
}

// guestKey is what a guest sends in the place of the credential key.
const guestKey = "KEY-OF-THE-GUEST"

// withRequests gives a sandbox a vault, and rules about names and requests.
func withRequests(r *wire.CreateRequest) {
	r.CredentialProxy = &wire.CredentialProxy{Enabled: true}
	p := wire.NetworkPolicy{DefaultAction: "deny", Egress: []wire.NetworkRule{
		{Action: "deny", Target: internet.BoundHost, HTTP: &wire.HTTPRequests{Paths: []string{"/admin*"}}},
		{Action: "allow", Target: internet.WatchedHost, HTTP: &wire.HTTPRequests{Methods: []string{"GET", "POST"}}},
	}}
	for _, name := range []string{internet.BoundHost, internet.RepeatHost, internet.MovedHost, internet.ThiefHost} {
		p.Egress = append(p.Egress, wire.NetworkRule{Action: "allow", Target: name})
	}
	r.NetworkPolicy, _ = json.Marshal(p) //nolint:errchkjson // of strings
}

// vaulted makes a sandbox with credentials, and a neighbour with its own.
func (f *field) vaulted(t *testing.T, runtime string) *vaulted {
	t.Helper()
	v := &vaulted{mark: "m4rk-" + rand.Text()}
	v.value = "token-" + v.mark
	f.net.Mark(v.mark)
	sb, other := f.create(t, runtime, withRequests), f.create(t, runtime, withRequests)
	v.id = sb.ID
	own, theirs := f.keep(t, sb.ID, v.mark), f.keep(t, other.ID, "of-another-"+v.mark)
	f.copy(t, other.ID, trust.CertPath, sb.ID, "/neighbour.pem")
	half := len(own["token"]) / 2
	v.words = []string{
		"KEYHOLDER", own["key"], "STRANGER", theirs["token"], "HOLDER", own["token"], "HALFONE", own["token"][:half],
		"HALFTWO", own["token"][half:], "BASIC", base64.StdEncoding.EncodeToString([]byte("x:" + own["token"])),
		"VALUE", v.value, "HEX", hex.EncodeToString([]byte(v.value)), "THIEF", internet.Thief.String(),
		"MARKONE", v.mark[:len(v.mark)/2], "MARKTWO", v.mark[len(v.mark)/2:], "AUTHORITY", trust.CertPath,
		"DAEMON", strconv.Itoa(f.Pid()),
	}
	// What is attacked works: so it is the wall that holds.
	for _, url := range []string{"https://" + internet.BoundHost + "/v1/x", "https://" + internet.BoundHost + "/v1/x?key=" + guestKey} {
		if g := f.exec(t, v.id, 0, []string{"/attack", "fetch", url, "with a value"}); g.word != "ok" {
			t.Fatalf("a request to %s gets no credential: %s", url, g)
		}
	}
	own443 := internet.Shared.String() + ":443"
	if g := f.exec(t, v.id, 0, []string{"/attack", "trusts", own443, internet.BoundHost, trust.CertPath}); g.word != "ok" {
		t.Fatalf("the sandbox does not trust its own authority: %s", g)
	}
	if leaks := f.net.Leaks(); len(leaks) > 0 {
		t.Fatalf("what is allowed is taken for an attack: %q", leaks)
	}
	return v
}

// keep gives a sandbox its credentials, and returns their placeholders.
func (f *field) keep(t *testing.T, id, mark string) map[string]string {
	t.Helper()
	inline := func(name string) wire.NewCredential {
		return wire.NewCredential{Name: name, Source: wire.CredentialSource{Type: "inline", Value: name + "-" + mark}}
	}
	state, err := f.api.Vault(id).Create(t.Context(), wire.CredentialVaultRequest{
		Credentials: []wire.NewCredential{inline("token"), inline("key")},
		Bindings: []wire.NewBinding{
			{
				Name: "api", Match: wire.CredentialMatch{Hosts: []string{internet.BoundHost, internet.MovedHost}, Paths: []string{"/v1/*"}},
				Auth: wire.CredentialAuth{
					Type: "bearer", Credential: "token",
					Substitutions: []wire.CredentialSubstitution{{Credential: "key", Placeholder: guestKey, In: []string{"query"}}},
				},
			},
			{
				Name: "echo", Match: wire.CredentialMatch{Hosts: []string{internet.RepeatHost}},
				Auth: wire.CredentialAuth{Type: "bearer", Credential: "token"},
			},
		},
	})
	must(t, err)
	placeholders := map[string]string{}
	for _, c := range state.Credentials {
		placeholders[c.Name] = c.Placeholder
	}
	return placeholders
}

// copy copies a file from one sandbox to another.
func (f *field) copy(t *testing.T, from, path, to, as string) {
	t.Helper()
	g := f.exec(t, from, 0, []string{"sh", "-c", "base64 -w0 " + path})
	if f.exec(t, to, 0, []string{"sh", "-c", "echo " + g.word + g.more + " | base64 -d >" + as + " && echo ok"}).word != "ok" {
		t.Fatalf("copy %s: %s", path, g)
	}
}

// endings are the ends of lines of requests, as the program guest reads them.
var endings = strings.NewReplacer("\n", `\r\n`, "\v", "\n")

// move runs an attack in a sandbox with credentials.
func (f *field) move(t *testing.T, a attack, v *vaulted, values []string) gain {
	t.Helper()
	argv := []string{"/attack"}
	if a.run[0] == "sh" {
		argv = nil
	}
	// In one go: what is random may have a word in it. The base64 of a placeholder had "PID".
	replacer := strings.NewReplacer(slices.Concat(v.words, values)...)
	for _, arg := range a.run {
		argv = append(argv, replacer.Replace(endings.Replace(arg)))
	}
	f.net.Leaks()
	g := f.exec(t, v.id, a.uid, argv)
	if leaks := f.net.Leaks(); len(leaks) > 0 {
		return gain{word: "leaked", more: leaks[0]}
	}
	return g
}

// roots makes a file with the authority of the servers, which the daemon is to trust.
func (f *field) roots(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "roots.pem")
	must(t, os.WriteFile(path, f.net.CA, 0o644))
	return path
}

// vaultDoors look for a value of a credential from outside.
var vaultDoors = []attack{
	asking("viewer"), asking("operator"), asking("configured"),
	{
		name: "a credential in the state file, in files of the daemon and in its log", held: words{"none"},
		wall:   "it is sealed with a key of another file; nothing prints it",
		daemon: without(weak.Sealing), ask: func(t *testing.T, w *target) string {
			v := w.used(t)
			for _, text := range v.forms() {
				if strings.Contains(w.Log(), text) {
					return "in-the-log"
				}
			}
			found := "none"
			for _, root := range []string{w.StateDir, w.Instance.RunDir()} {
				must(t, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
					if err != nil && e != nil && e.IsDir() {
						return fs.SkipDir
					}
					if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() || info.Size() > 64<<20 {
						return nil // the pool has files of guests
					}
					b, err := os.ReadFile(path)
					if err == nil && slices.ContainsFunc(v.forms(), func(s string) bool { return bytes.Contains(b, []byte(s)) }) {
						t.Logf("it is in %s", path)
						found = "ok"
					}
					return nil
				}))
			}
			return found
		},
	},
	{
		name: "an echo of a credential that nobody hears of", wall: "a value in an answer is an event", held: words{"told"},
		got: words{"silent"}, daemon: without(weak.Echoes), ask: func(t *testing.T, w *target) string {
			v := w.used(t)
			limit := time.Now().Add(hosttest.Patient(30 * time.Second))
			for {
				a := w.ask(t, "GET", "/v1/sandboxes/"+v.id+"/diagnostics/events", daemontest.Key, nil)
				switch {
				case a.status != http.StatusOK:
					return a.word()
				case strings.Contains(a.body, "value of token"):
					return "told"
				case strings.Contains(a.body, "placeholder of token"): // the refusal, which came after the echo
					return "silent"
				case time.Now().After(limit):
					return "no event of the refusal"
				}
				time.Sleep(10 * time.Millisecond) // nobody tells
			}
		},
	},
}

// used is a sandbox whose credential was used, echoed, and refused.
func (w *target) used(t *testing.T) *vaulted {
	t.Helper()
	v := w.vaulted(t, "runc")
	for _, url := range []string{"https://" + internet.RepeatHost + "/v1/x", "https://" + internet.BoundHost + "/v1/HOLDER"} {
		w.exec(t, v.id, 0, []string{"/attack", "fetch", strings.NewReplacer(v.words...).Replace(url), "x"})
	}
	return v
}

// forms are those in which the values would be seen.
func (v *vaulted) forms() []string {
	all := []string{v.mark, hex.EncodeToString([]byte(v.mark))}
	for before := range 3 { // within a longer text
		coded := base64.StdEncoding.EncodeToString(append(make([]byte, before), v.mark...))
		all = append(all, coded[4:len(coded)-4])
	}
	return all
}

// asking asks by each route for what the API tells of a sandbox with credentials, and makes
// changes that are refused.
func asking(who string) attack {
	role := map[string]string{"configured": "admin"}[who]
	if role == "" {
		role = who
	}
	return attack{
		name: "a credential by the API, as " + role, wall: "no answer, event or error has a value", held: words{"none"},
		daemon: unproven("values are not in what answers are made of; pkg/egress/vault FuzzParse holds that"),
		ask: func(t *testing.T, w *target) string {
			v := w.used(t)
			var document struct {
				Paths map[string]map[string]json.RawMessage `json:"paths"`
			}
			fromJSON(t, openapi.JSON, &document)
			names := strings.NewReplacer("{sandboxId}", v.id, "{name}", "token", "{kind}", "events", "{port}", "44772")
			asked := 0
			tells := func(a answer) bool {
				asked++
				return slices.ContainsFunc(v.forms(), func(s string) bool { return strings.Contains(a.body, s) })
			}
			for _, path := range slices.Sorted(maps.Keys(document.Paths)) {
				at := names.Replace(path)
				need, served := api.RoleOf("GET", at)
				if _, get := document.Paths[path]["get"]; !get || !served || need == "tokens" || strings.HasSuffix(path, "/backup") {
					continue
				}
				if !strings.HasPrefix(at, "/v1") {
					at = "/v1" + at
				}
				ask := func() answer { return w.ask(t, "GET", at, w.keys[who], nil) }
				if strings.HasSuffix(path, "/events") || strings.HasSuffix(path, "/logs") {
					ask = func() answer { return w.begun(t, at, w.keys[who]) }
				}
				if tells(ask()) {
					return "ok by " + at
				}
			}
			if asked < 20 {
				t.Errorf("only %d routes were asked", asked)
			}
			vault := "/v1/sandboxes/" + v.id + "/credential-vault"
			value, stale := v.value, `{"expectedRevision":99,"credentials":{"add":[{"name":"more","source":{"value":"`+v.value+`"}}]}}`
			for _, r := range [][3]string{
				{"POST", vault, `{"credentials":[{"name":"token","source":{"type":"inline","value":"` + value + `"}}]}`},
				{"POST", vault, `{"credentials":[{"name":"` + value + `"`},
				{"PATCH", vault, stale},
				{"PATCH", vault, `{"bindings":{"add":[{"name":"x","match":{"hosts":["` + internet.BoundHost + `"]},"auth":{"type":"bearer"}}]}}`},
				{"GET", vault + "/credentials/token", ""},
				{"GET", vault + "/bindings/api", ""},
				{"GET", vault + "/credentials/token/value", ""},
				{"GET", vault + "?reveal=true", ""},
			} {
				// The client that sends a value has it: an error may quote neither it nor another one.
				if a := w.ask(t, r[0], r[1], w.keys[who], strings.NewReader(r[2]), "Content-Type", "application/json"); tells(a) {
					return "ok by " + r[0] + " " + r[1]
				}
			}
			return "none"
		},
	}
}

// begun is the beginning of an answer that does not end.
func (w *target) begun(t *testing.T, path, key string) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond) // what was kept comes at once
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "GET", "http://"+w.TCP+path, nil)
	must(t, err)
	r.Header.Set(wire.HeaderAPIKey, key)
	resp, err := straight.Do(r)
	if err != nil {
		return answer{body: err.Error()}
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body) //nolint:errcheck // it ends with the time
	return answer{status: resp.StatusCode, body: string(b)}
}
