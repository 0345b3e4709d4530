package judge

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
)

// ways are how guests speak.
var ways = []struct {
	name, scheme string
	h2           bool
}{{"1", "https", false}, {"2", "https", true}, {"plain", "http", false}}

// echo answers with the request as it came.
func echo(rw http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	fmt.Fprintf(rw, "%s %s %s body=%s %v", r.Method, r.RequestURI, r.Host, b, err)
	for k, v := range r.Header {
		fmt.Fprintf(rw, "\n%s=%q", k, v)
	}
}

// TestChildRules: a guest reads which rule denies its request, the daemon hears of it, and the
// server does not.
func TestChildRules(t *testing.T) {
	w := newWorld(t)
	var served atomic.Int32
	w.serves(func(rw http.ResponseWriter, r *http.Request) { served.Add(1); echo(rw, r) })
	c := Config{Source: source, Network: network("rules", "deny "+host+" - /v1/admin*", "allow "+host+" GET,POST /v1/*")}
	if err := w.configure(c); err != nil {
		t.Fatal(err)
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			client := w.client(way.h2)
			for i, path := range []string{"/v1/a?b=%zz", "/v1/%2e%2e/v1/a"} {
				a := w.do(client, request(t, "GET", way.scheme+"://"+host+path, ""))
				want := fmt.Sprintf("200 GET %s %s ", path, host)
				if i == 1 {
					want = `403 {"code":"SANDBOX::FORBIDDEN"`
				}
				if got := fmt.Sprint(a.StatusCode, " ", a.body); !strings.HasPrefix(got, want) {
					t.Errorf("%s: %s", path, got)
				}
				if i == 1 && w.event().Text != readings+"it has a segment . or .." {
					t.Error("another event")
				}
			}
			a := w.do(client, request(t, "POST", way.scheme+"://"+host+"/v1/admin/x", "words"))
			want := `{"code":"SANDBOX::FORBIDDEN","message":"sandboxd does not send this request, POST /v1/admin/x to api.example.com: the rule ` +
				`\"deny api.example.com requests /v1/admin*\" of its network policy denies it. These rules allow requests to this host, the ` +
				`first that matches decides:\nallow api.example.com GET,POST /v1/*"}` + "\n"
			if a.StatusCode != 403 || a.body != want || a.Header.Get("Content-Type") != "application/json" {
				t.Errorf("%d %s\nwant\n%s", a.StatusCode, a.body, want)
			}
			e := terminate.Event{Kind: terminate.RuleDenied, Host: host, Method: "POST", Text: "deny " + host + " requests /v1/admin*"}
			if got := w.event(); got != e {
				t.Errorf("%+v", got)
			}
			if n := served.Swap(0); n != 1 {
				t.Errorf("the server got %d requests", n)
			}
		})
	}
	w.none(c)
}

// TestChildVault: each kind of auth puts its credential into the request, and what comes back of
// it is masked, and told once for each place.
func TestChildVault(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) { testChildVault(t, way.scheme, way.h2) })
	}
}

var basic = base64.StdEncoding.EncodeToString([]byte("user:" + token))

// auths are bindings of each kind of auth.
const auths = `
	{"name":"bearer","match":{"hosts":["bearer.example.com"],"schemes":["https","http"]},"auth":{"type":"bearer","credential":"token"}},
	{"name":"basic","match":{"hosts":["basic.example.com"],"schemes":["https","http"]},"auth":{"type":"basic","credential":"basic"}},
	{"name":"key","match":{"hosts":["*.key.example.com"],"schemes":["https","http"]},
		"auth":{"type":"apiKey","name":"X-Key","credential":"second"}},
	{"name":"two","match":{"hosts":["two.example.com"],"schemes":["https","http"]},"auth":{"type":"customHeaders","headers":[
		{"name":"X-One","credential":"token"},{"name":"X-Two","credential":"second"}]}},
	{"name":"sub","match":{"hosts":["sub.example.com"],"schemes":["https","http"]},"auth":{"type":"passthrough","substitutions":[
		{"credential":"token","placeholder":"{{TOKEN}}","in":["query","header","body"]},
		{"credential":"second","placeholder":"_SECOND_","in":["path"]}]}}`

// show answers with the parts of a request that may have values, in an early header, a header and
// the body.
func show(seen chan<- string) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		head := ""
		for _, name := range []string{"Authorization", "X-Key", "X-One", "X-Two", "X-Sub"} {
			if v := r.Header[name]; v != nil {
				head += fmt.Sprintf("%s=%q ", name, v)
			}
		}
		seen <- fmt.Sprintf("%s %s %s%s %v", r.Method, r.RequestURI, head, b, err)
		rw.Header().Set("X-Echo", head)
		rw.WriteHeader(103)
		fmt.Fprint(rw, r.RequestURI, " ", head, string(b))
	}
}

func testChildVault(t *testing.T, scheme string, h2 bool) {
	w := newWorld(t)
	v := vaultOf(t, inline("token", token)+","+inline("second", second)+","+inline("basic", basic), auths)
	mine := v.Credential("token").Placeholder
	seen := make(chan string, 10)
	w.serves(show(seen))
	c := Config{Source: source, Network: network("open", "deny *.example.com DELETE"), Vault: v.Encode(), Mask: true}
	if err := w.configure(c); err != nil {
		t.Fatal(err)
	}
	client := w.client(h2)
	for _, r := range []struct {
		host, path, head, body string
		want, back             string
		echoes                 []string // credentials and places
	}{
		{
			"bearer.example.com", "/", "Authorization: mine", "words", `POST / Authorization=["Bearer sEcr3T-token"] words <nil>`,
			`/ Authorization=["Bearer ************"] words`,
			[]string{"token body", "token header"},
		},
		{
			"basic.example.com", "/", "", "", `POST / Authorization=["Basic ` + basic + `"]  <nil>`,
			`/ Authorization=["Basic ************************"] `,
			[]string{"basic body", "basic header"},
		},
		{
			"a.key.example.com", "/x", "X_key: mine", "", `POST /x X-Key=["sEcr3T-second"]  <nil>`, `/x X-Key=["*************"] `,
			[]string{"second body", "second header"},
		},
		{
			"two.example.com", "/", "X-Two: " + v.Credential("second").Placeholder, "",
			`POST / X-One=["sEcr3T-token"] X-Two=["sEcr3T-second"]  <nil>`, `/ X-One=["************"] X-Two=["*************"] `,
			[]string{"second body", "second header", "token body", "token header"},
		},
		{
			"sub.example.com", "/a/_SECOND_/b?c=" + mine, "X-Sub: <{{TOKEN}}>", "d={{TOKEN}}",
			`POST /a/sEcr3T-second/b?c=sEcr3T-token X-Sub=["<sEcr3T-token>"] d=sEcr3T-token <nil>`,
			`/a/*************/b?c=************ X-Sub=["<************>"] d=************`,
			[]string{"second body", "token body", "token header"},
		},
		{"none.example.com", "/{{TOKEN}}", "", "{{TOKEN}}", "POST /%7B%7BTOKEN%7D%7D {{TOKEN}} <nil>", "/%7B%7BTOKEN%7D%7D {{TOKEN}}", nil},
	} {
		q := request(t, "POST", scheme+"://"+r.host+r.path, r.body)
		if name, value, ok := strings.Cut(r.head, ": "); ok {
			q.Header[name] = []string{value}
		}
		early := make(chan string, 1)
		q = q.WithContext(httptrace.WithClientTrace(q.Context(), &httptrace.ClientTrace{
			Got1xxResponse: func(_ int, h textproto.MIMEHeader) error { early <- h.Get("X-Echo"); return nil },
		}))
		a := w.do(client, q)
		if got := <-seen; got != r.want || a.StatusCode != 200 {
			t.Errorf("the server got\n%s\nwant\n%s, %d", got, r.want, a.StatusCode)
		}
		if a.body != r.back {
			t.Errorf("the guest got\n%s\nwant\n%s", a.body, r.back)
		}
		if got := a.Header.Get("X-Echo") + <-early; strings.Contains(got, "sEcr3T") || strings.Contains(got, basic) {
			t.Errorf("the headers of the answer have %s", got)
		}
		var echoes []string
		for range r.echoes {
			e := w.event()
			if e.Kind != terminate.Echo || e.Host != r.host {
				t.Errorf("%+v", e)
			}
			echoes = append(echoes, e.Credential+" "+e.Place)
		}
		if slices.Sort(echoes); !slices.Equal(echoes, r.echoes) {
			t.Errorf("echoes %q, want %q", echoes, r.echoes)
		}
	}
	w.none(c)
}

// TestChildVaultDenies: a guest that tries to move a secret is told so, whatever part of the request
// has it, and the server gets no part of the placeholder.
func TestChildVaultDenies(t *testing.T) {
	w := newWorld(t)
	v := some(t)
	mine := v.Credential("token").Placeholder
	w.serves(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body) //nolint:errcheck // the body is cut off
		if strings.Contains(string(b)+fmt.Sprint(r.Trailer), "sbxph") {
			t.Error("the server got a placeholder")
		}
	})
	if err := w.configure(Config{Source: source, Network: open, Vault: v.Encode()}); err != nil {
		t.Fatal(err)
	}
	for _, way := range ways {
		for place, change := range map[string]func(r *http.Request){
			"header":  func(r *http.Request) { r.Header.Set("X-Token", mine) },
			"query":   func(r *http.Request) { r.URL.RawQuery = "a=" + mine },
			"path":    func(r *http.Request) { r.URL.Path = "/" + mine },
			"trailer": func(r *http.Request) { r.ContentLength, r.Trailer = -1, http.Header{"X-Last": {mine}} },
			"body": func(r *http.Request) {
				r.ContentLength = -1
				r.Body = io.NopCloser(strings.NewReader(strings.Repeat("long ", 50_000) + mine))
			},
		} {
			// A connection of its own: HTTP/1.1 ends it when a body is not sent to its end.
			r := request(t, "POST", way.scheme+"://other.example.com/", "words")
			change(r)
			a := w.do(w.client(way.h2), r)
			if a.StatusCode != 403 || !strings.Contains(a.body, `the placeholder of the credential \"token\" in its `+place) {
				t.Errorf("%s, %s: %d %s", way.name, place, a.StatusCode, a.body)
			}
			want := terminate.Event{Kind: terminate.WrongHost, Host: "other.example.com", Credential: "token", Place: place}
			if e := w.event(); e != want {
				t.Errorf("%s: %+v", place, e)
			}
		}
	}
}

// TestChildValues: the daemon is asked for a value when a request needs it. One that fails, or
// hangs, holds up nothing else.
func TestChildValues(t *testing.T) {
	w := newWorld(t)
	w.serves(echo)
	asked, answers := make(chan string, 100), make(chan terminate.Value)
	w.value = func(credential string) terminate.Value {
		asked <- credential
		if credential == "gone" {
			return terminate.Value{Text: "open /y: no such file"}
		}
		return <-answers
	}
	c := Config{Source: source, Network: open, Vault: some(t).Encode()}
	if err := w.configure(c); err != nil {
		t.Fatal(err)
	}
	get := func(r *http.Request) <-chan answer {
		done := make(chan answer, 1)
		client := w.client(true)
		go func() {
			resp, err := client.Do(r)
			if err != nil {
				done <- answer{body: err.Error()}
				return
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			done <- answer{resp, fmt.Sprint(string(b), " ", err)}
		}()
		return done
	}
	file := func() *http.Request { return request(t, "GET", "https://file.example.com/", "") }

	slow := get(file())
	if name := <-asked; name != "file" {
		t.Error(name)
	}
	// Meanwhile others go on.
	if a := <-get(request(t, "GET", "https://"+host+"/v1/a", "")); !strings.Contains(a.body, token) {
		t.Error(a.body)
	}
	if e := w.event(); e.Kind != terminate.Echo || e.Credential != "token" {
		t.Errorf("%+v", e)
	}
	if a := <-get(request(t, "GET", "https://gone.example.com/", "")); a.StatusCode != 502 || !strings.Contains(a.body, `\"gone\" of the binding`) ||
		strings.Contains(a.body, "no such file") {
		t.Error(a.body)
	}
	if name := <-asked; name != "gone" {
		t.Error(name)
	}
	if e := w.event(); e.Kind != terminate.Unavailable || e.Credential != "gone" || !strings.Contains(e.Text, "open /y: no such file") {
		t.Errorf("%+v", e)
	}
	answers <- terminate.Value{Bytes: []byte(second)}
	if a := <-slow; !strings.Contains(a.body, `X-Key=["`+second+`"]`) {
		t.Error(a.body)
	}
	if e := w.event(); e.Kind != terminate.Echo || e.Credential != "file" {
		t.Errorf("%+v", e)
	}
	// The next request asks again, and gets what the value is by then.
	next := get(file())
	<-asked
	answers <- terminate.Value{Bytes: []byte("rotated-" + second)}
	if a := <-next; !strings.Contains(a.body, `X-Key=["rotated-`+second+`"]`) {
		t.Error(a.body)
	}
	if e := w.event(); e.Kind != terminate.Echo || e.Credential != "file" {
		t.Errorf("%+v", e)
	}
	// A guest that does not wait leaves its question to the next one; that is no event.
	ctx, leave := context.WithCancel(t.Context())
	left := get(file().WithContext(ctx))
	<-asked
	leave()
	if a := <-left; a.Response != nil {
		t.Error(a.Status)
	}
	for next := get(file()); next != nil; {
		select {
		case answers <- terminate.Value{Bytes: []byte("last-" + second)}: // to one question or to two
		case a := <-next:
			if !strings.Contains(a.body, `X-Key=["last-`+second+`"]`) {
				t.Error(a.body)
			}
			next = nil
		}
	}
	if e := w.event(); e.Kind != terminate.Echo || e.Credential != "file" {
		t.Errorf("%+v", e)
	}
	// The guest that left may have got the value, too: its leave may come to the child later.
	if err := w.configure(c); err != nil {
		t.Fatal(err)
	}
	for len(w.events) > 0 {
		if e := w.event(); e.Kind != terminate.Echo || e.Credential != "file" {
			t.Errorf("%+v", e)
		}
	}
}

// TestChildReplaced: a Config that comes while requests are under way is for new ones. What was
// sent before is still found in answers.
func TestChildReplaced(t *testing.T) {
	w := newWorld(t)
	arrived, goOn := make(chan string, 1), make(chan string)
	w.serves(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/hold" {
			arrived <- r.Header.Get("Authorization")
			io.WriteString(rw, <-goOn) //nolint:errcheck // the guest says
			return
		}
		io.WriteString(rw, r.Header.Get("Authorization")+" "+r.URL.Query().Get("say")) //nolint:errcheck // likewise
	})
	const bindings = `{"name":"a","match":{"hosts":["api.example.com"]},"auth":{"type":"bearer","credential":"token"}}`
	v := vaultOf(t, inline("token", token), bindings)
	first := Config{Source: source, Network: network("open", "deny "+host+" DELETE"), Vault: v.Encode(), Mask: true}
	changed, err := v.PatchTrusted([]byte(`{"credentials":{"replace":[` + inline("token", second) + `]}}`))
	if err != nil {
		t.Fatal(err)
	}
	later := Config{Source: source, Network: network("open", "deny "+host+" - /v1/hold"), Vault: changed.Encode(), Mask: true}
	without := Config{Source: source, Network: open, Mask: true}
	if err := w.configure(first); err != nil {
		t.Fatal(err)
	}
	stars, more := strings.Repeat("*", len(token)), strings.Repeat("*", len(second))
	for _, h2 := range []bool{false, true} {
		client := w.client(h2) // its connections stay
		old := make(chan answer, 1)
		r := request(t, "GET", "https://"+host+"/v1/hold", "")
		go func() {
			resp, err := client.Do(r)
			if err != nil {
				old <- answer{body: err.Error()}
				return
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			old <- answer{resp, fmt.Sprint(string(b), err)}
		}()
		if got := <-arrived; got != "Bearer "+token {
			t.Error(got)
		}
		if err := w.configure(later); err != nil {
			t.Fatal(err)
		}
		if a := w.do(client, request(t, "GET", "https://"+host+"/v1/hold", "")); a.StatusCode != 403 {
			t.Errorf("%d %s", a.StatusCode, a.body)
		}
		// The new value is sent, and both are found.
		if a := w.do(client, request(t, "DELETE", "https://"+host+"/?say="+token, "")); a.body != "Bearer "+more+" "+stars {
			t.Error(a.body)
		}
		goOn <- "held " + token
		if a := <-old; a.body != "held "+stars+"<nil>" {
			t.Error(a.body)
		}
		// A child that is told nonsense keeps what it has, also for the next Config.
		for want, b := range nonsense(t) {
			err := terminate.Config{Roots: public().Certificate(), Judge: b}.Send(t.Context(), w.line)
			if err == nil || !strings.Contains(err.Error(), strings.TrimSpace(want)) || strings.Contains(err.Error(), "sEcr3T") {
				t.Errorf("%v, want %s", err, want)
			}
		}
		if a := w.do(client, request(t, "GET", "https://"+host+"/?say="+token, "")); a.body != "Bearer "+more+" "+stars {
			t.Error(a.body)
		}
		// Without a vault nothing is put in, and with it again it is known what was sent before.
		for _, c := range []struct {
			Config
			want string
		}{{without, " " + second}, {first, "Bearer " + stars + " " + more}} {
			if err := w.configure(c.Config); err != nil {
				t.Fatal(err)
			}
			if a := w.do(client, request(t, "GET", "https://"+host+"/?say="+second, "")); a.body != c.want {
				t.Errorf("%s, want %s", a.body, c.want)
			}
		}
	}
}

// TestRemovedMeanwhile: a guest that holds a request open gets no value into its body that was removed
// since.
func TestRemovedMeanwhile(t *testing.T) {
	w := newWorld(t)
	v := vaultOf(t, inline("token", token)+","+inline("second", second)+","+inline("basic", basic), auths)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			begun, all := make(chan bool), make(chan string, 1)
			w.serves(func(_ http.ResponseWriter, r *http.Request) {
				begin := make([]byte, 5)
				io.ReadFull(r.Body, begin) //nolint:errcheck // what came says
				close(begun)
				rest, err := io.ReadAll(r.Body)
				all <- fmt.Sprint(string(begin)+string(rest), err)
			})
			with := Config{Source: source, Network: network("open"), Vault: v.Encode()}
			if err := w.configure(with); err != nil {
				t.Fatal(err)
			}
			body, guest := io.Pipe()
			defer guest.Close()
			r, err := http.NewRequestWithContext(t.Context(), "POST", way.scheme+"://sub.example.com/", body)
			if err != nil {
				t.Fatal(err)
			}
			answered := make(chan string, 1)
			go func() {
				resp, err := w.client(way.h2).Do(r)
				if err != nil {
					answered <- err.Error()
					return
				}
				defer resp.Body.Close()
				b, err := io.ReadAll(resp.Body)
				answered <- fmt.Sprint(resp.StatusCode, " ", string(b), err)
			}()
			io.WriteString(guest, "{{TOKEN}}"+strings.Repeat("x", 1<<10)) //nolint:errcheck // what came says
			<-begun
			if err := w.configure(Config{Source: source, Network: network("open")}); err != nil {
				t.Fatal(err)
			}
			io.WriteString(guest, " {{TOKEN}} ") //nolint:errcheck // likewise
			guest.Close()
			if got := <-all; strings.Count(got, token) != 1 || strings.HasSuffix(got, "<nil>") {
				t.Errorf("the server got %q", got)
			}
			if got := <-answered; !strings.HasPrefix(got, "503 ") || !strings.Contains(got, "send it again") {
				t.Errorf("the guest got %q", got)
			}
		})
	}
}
