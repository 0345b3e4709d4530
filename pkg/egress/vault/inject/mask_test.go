package inject

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// answer is a response to a request to a host, as net/http gives it.
func answer(t testing.TB, w *world, host string, r *http.Response) {
	t.Helper()
	req := parse(t, "GET / HTTP/1.1\nHost: "+host+"\n\n")
	u, err := w.at(req)
	if err != nil {
		t.Fatal(err)
	}
	if r.Request == nil {
		r.Request = req
	}
	if r.StatusCode == 0 {
		r.StatusCode = 200
	}
	if err := u.Mask(r); err != nil {
		t.Fatal(err)
	}
}

func text(body string) *http.Response {
	return &http.Response{
		Header: http.Header{"Content-Type": {"text/plain"}, "Content-Length": {fmt.Sprint(len(body))}}, ContentLength: int64(len(body)),
		Body: io.NopCloser(strings.NewReader(body)),
	}
}

// hidden is as many "*" as s has bytes.
func hidden(s string) string { return strings.Repeat("*", len(s)) }

// TestMaskForms: a value is found in each form that the documentation names, whatever stands around it.
func TestMaskForms(t *testing.T) {
	w := newWorld(t, Options{Mask: true})
	page, _ := json.Marshal(multi)
	forms := map[string]string{
		"raw": token, "percent": url.QueryEscape(token), "path": url.PathEscape(token), "lines": multi, "json": strings.Trim(jsonEscape(multi, false), `"`),
		"json for a page": string(page[1 : len(page)-1]), "form": url.QueryEscape(multi),
		"percent with blanks": strings.ReplaceAll(url.QueryEscape(multi), "+", "%20"),
		"second":              second, "small letters": lowerHex(url.QueryEscape(token)), "json of PHP": strings.ReplaceAll(token, "/", `\/`),
	}
	for name, form := range forms {
		r := text("a" + form + "b" + form)
		answer(t, w, "sub.example.com", r)
		if got, err := io.ReadAll(r.Body); string(got) != "a"+hidden(form)+"b"+hidden(form) || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	encodings := []*base64.Encoding{base64.StdEncoding, base64.URLEncoding, base64.RawStdEncoding, base64.RawURLEncoding}
	for _, value := range []string{token, second, multi} {
		for before := range 7 {
			for after := range 7 {
				for _, enc := range encodings {
					in := make([]byte, before+after)
					for i := range in {
						in[i] = byte(random.IntN(256))
					}
					coded := enc.EncodeToString([]byte(string(in[:before]) + value + string(in[before:])))
					r := text("[" + coded + "]")
					answer(t, w, "sub.example.com", r)
					got, err := io.ReadAll(r.Body)
					// What is left says nothing of the value but, at its ends, parts of one byte.
					left := len(got) - len("[]") - bytes.Count(got, []byte("*"))
					if err != nil || len(got) != len(coded)+2 || left > (before*8+5)/6+(after*8+5)/6+2+3 {
						t.Fatalf("%d before, %d after: %s became %s, %v", before, after, coded, got, err)
					}
				}
			}
		}
	}
	// Of basic also the password, and the pair.
	for _, form := range []string{basic, "user:sEcr3T-pass", "sEcr3T-pass"} {
		r := text(form)
		answer(t, w, "git.example.com", r)
		if got, _ := io.ReadAll(r.Body); string(got) != hidden(form) {
			t.Errorf("%s: %s", form, got)
		}
	}
}

func TestMask(t *testing.T) {
	for _, mask := range []bool{true, false} {
		w := newWorld(t, Options{Mask: mask})
		want := func(masked, plain string) string {
			if mask {
				return masked
			}
			return plain
		}
		r := text("echo " + token + " and " + token)
		r.Status = "200 " + token
		r.Header["Location"] = []string{"https://www.example.net/?x=" + url.QueryEscape(token)}
		r.Header[http.CanonicalHeaderKey("x-"+second)] = []string{"1"}
		r.Trailer = http.Header{"X-T": nil}
		r.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(r.Body, atEnd(func() { r.Trailer["X-T"] = []string{"a" + token} })), r.Body}
		answer(t, w, "sub.example.com", r)
		got, err := io.ReadAll(iotest.OneByteReader(r.Body))
		if string(got) != want("echo "+hidden(token)+" and "+hidden(token), "echo "+token+" and "+token) || err != nil {
			t.Errorf("body %q, %v", got, err)
		}
		_, named := r.Header[http.CanonicalHeaderKey("x-"+second)]
		coded := url.QueryEscape(token)
		if r.Status != want("200 "+hidden(token), "200 "+token) ||
			!strings.HasSuffix(r.Header["Location"][0], want("="+hidden(coded), coded)) ||
			named == mask || r.Trailer["X-T"][0] != want("a"+hidden(token), "a"+token) {
			t.Errorf("%v %v %v", r.Status, r.Header, r.Trailer)
		}
		if n := int64(len(got)); r.ContentLength != n || r.Header.Get("Content-Length") != fmt.Sprint(n) {
			t.Errorf("length %d, %s of %d", r.ContentLength, r.Header["Content-Length"], n)
		}
		seen := map[string]bool{}
		for _, e := range w.events {
			if e.Kind != Echo || e.Host != "sub.example.com" || e.Binding != "sub" || seen[e.Credential+e.Place] {
				t.Errorf("%+v", e)
			}
			seen[e.Credential+e.Place] = true
		}
		if len(seen) != 5 {
			t.Errorf("events %v", w.events)
		}
	}
}

// atEnd is a reader that calls f when it is read, and has nothing.
type atEnd func()

func (f atEnd) Read([]byte) (int, error) { f(); return 0, io.EOF }

// TestMaskLeaves: these answers pass as they are.
func TestMaskLeaves(t *testing.T) {
	w := newWorld(t, Options{Mask: true})
	for name, change := range map[string]func(*http.Response){
		"HEAD": func(r *http.Response) { r.Request = &http.Request{Method: "HEAD"} },
		"101":  func(r *http.Response) { r.StatusCode = 101 },
	} {
		r := text(token)
		change(r)
		answer(t, w, "sub.example.com", r)
		got, err := io.ReadAll(r.Body)
		if string(got) != token || err != nil || r.ContentLength != int64(len(token)) || r.Header.Get("Content-Length") == "" {
			t.Errorf("%s: %q, %v, length %d", name, got, err, r.ContentLength)
		}
	}
	r := text(token)
	answer(t, w, "www.example.net", r)
	if got, _ := io.ReadAll(r.Body); string(got) != token {
		t.Errorf("another host: %q", got)
	}
	if len(w.events) > 0 {
		t.Error(w.events)
	}
	if u := (*Use)(nil); u.Mask(text(token)) != nil || u.Binding() != "" {
		t.Error("a Use of nothing does something")
	}
	// A value of another binding of the host is found, also if this request got none.
	req := parse(t, "GET /v2 HTTP/1.1\nHost: api.example.com\n\n")
	u, err := w.at(req)
	r = text(token)
	if err := errors.Join(err, u.Mask(r)); err != nil || u.Binding() != "" {
		t.Fatal(err)
	}
	if got, _ := io.ReadAll(r.Body); string(got) != hidden(token) {
		t.Errorf("a request without a binding: %q", got)
	}
	// The guest may choose what an answer says of itself.
	for _, header := range []string{"Content-Type: image/png", "Content-Type: application/grpc", "Content-Encoding: gzip"} {
		name, value, _ := strings.Cut(header, ": ")
		r := text("a" + token)
		r.Header.Set(name, value)
		answer(t, w, "sub.example.com", r)
		if got, err := io.ReadAll(r.Body); string(got) != "a"+hidden(token) || err != nil {
			t.Errorf("%s: %q, %v", header, got, err)
		}
	}
}

// TestMaskRotated: after a value has changed, the one before it is still found.
func TestMaskRotated(t *testing.T) {
	v, err := vault.CreateTrusted([]byte(`{"credentials":[{"name":"f","source":{"type":"file","path":"/x"}}],"bindings":[
		{"name":"b","match":{"hosts":["a.example.com"]},"auth":{"type":"bearer","credential":"f"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	o := Options{Mask: true, Source: func(context.Context, *vault.Credential) (vault.Secret, error) {
		n++
		return vault.NewSecret(fmt.Sprintf("sEcr3T-number-%d", n)), nil
	}}
	l := New(v, o, nil)
	var u *Use
	for range 3 {
		if u, err = l.Apply(parse(t, "GET / HTTP/1.1\nHost: a.example.com\n\n"), "https", "a.example.com", 443); err != nil {
			t.Fatal(err)
		}
	}
	r := text("sEcr3T-number-3 sEcr3T-number-2")
	if err := u.Mask(r); err != nil {
		t.Fatal(err)
	}
	if got, _ := io.ReadAll(r.Body); string(got) != hidden("sEcr3T-number-3")+" "+hidden("sEcr3T-number-2") {
		t.Errorf("%s", got)
	}
	// A changed vault knows what the one before it has sent.
	next := New(v, o, l)
	req := parse(t, "OPTIONS / HTTP/1.1\nHost: a.example.com\n\n")
	if u, err = next.Apply(req, "https", "a.example.com", 443); err != nil || u.Binding() != "" {
		t.Fatal(err, u.Binding())
	}
	r = text("sEcr3T-number-3")
	if err := u.Mask(r); err != nil {
		t.Fatal(err)
	}
	if got := mustRead(r.Body); string(got) != hidden("sEcr3T-number-3") {
		t.Errorf("after a change: %s", got)
	}
	// A request knows its own value, whatever others have used while its body came.
	req = parse(t, "POST / HTTP/1.1\nHost: a.example.com\nContent-Length: 1\n\nx")
	req.Body = io.NopCloser(io.MultiReader(strings.NewReader("x"), atEnd(func() {
		for range 3 {
			if _, err := next.Apply(parse(t, "GET / HTTP/1.1\nHost: a.example.com\n\n"), "https", "a.example.com", 443); err != nil {
				t.Error(err)
			}
		}
	})))
	if u, err = next.Apply(req, "https", "a.example.com", 443); err != nil {
		t.Fatal(err)
	}
	own := strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer ")
	r = text(own)
	if err := u.Mask(r); err != nil {
		t.Fatal(err)
	}
	if got := mustRead(r.Body); n != 7 || own != "sEcr3T-number-4" || string(got) != hidden(own) {
		t.Errorf("its own: %s of %s, %d values", got, own, n)
	}
}

// TestPrinted: what goes with an answer shows no value, however it is printed.
func TestPrinted(t *testing.T) {
	w := newWorld(t, Options{Mask: true})
	u, err := w.at(parse(t, "GET / HTTP/1.1\nHost: sub.example.com\n\n"))
	if err != nil {
		t.Fatal(err)
	}
	numbers := strings.Trim(fmt.Sprint([]byte(token)), "[]")
	for verb := range strings.SplitSeq("v +v #v s q x X d", " ") {
		for _, a := range []any{u, *u, w.Live, *w.Live} {
			out := fmt.Sprintf("%"+verb, a)
			for _, form := range []string{token, fmt.Sprintf("%x", token), fmt.Sprintf("%X", token), numbers} {
				if strings.Contains(out, form) {
					t.Errorf("%%%s of %T: %s", verb, a, out)
				}
			}
		}
	}
}

// TestConcurrent: one Live serves many requests at once, while a value changes.
func TestConcurrent(t *testing.T) {
	v, err := vault.CreateTrusted([]byte(`{"credentials":[{"name":"f","source":{"type":"file","path":"/x"}}],"bindings":[
		{"name":"b","match":{"hosts":["a.example.com"]},"auth":{"type":"bearer","credential":"f"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	var n, events atomic.Int64
	l := New(v, Options{
		Mask: true, Report: func(Event) { events.Add(1) }, Source: func(context.Context, *vault.Credential) (vault.Secret, error) {
			return vault.NewSecret(fmt.Sprintf("sEcr3T-number-%d", n.Add(1)%2)), nil
		},
	}, nil)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				u, err := l.Apply(parse(t, "GET / HTTP/1.1\nHost: a.example.com\n\n"), "https", "a.example.com", 443)
				r := text("sEcr3T-number-0 sEcr3T-number-1")
				if err := errors.Join(err, u.Mask(r)); err != nil {
					t.Error(err)
				}
				if got := mustRead(r.Body); !bytes.Contains(got, []byte(hidden("sEcr3T-number-0"))) {
					t.Errorf("%s", got)
				}
			}
		})
	}
	wg.Wait()
	if events.Load() != 400 {
		t.Errorf("%d events of 400 answers", events.Load())
	}
}

// byTheBook replaces as a searcher says: of the needles that begin first the longest.
func byTheBook(text string, needles []needle) string {
	var out strings.Builder
	for i := 0; i < len(text); {
		longest := ""
		for _, n := range needles {
			if strings.HasPrefix(text[i:], string(n.text)) && len(n.text) > len(longest) {
				longest = string(n.text)
			}
		}
		if longest == "" {
			out.WriteByte(text[i])
			i++
			continue
		}
		out.WriteString("<" + longest + ">")
		i += len(longest)
	}
	return out.String()
}

// pieces is a reader that returns what it has in pieces of random lengths. held is told how much
// of the text was given.
type pieces struct {
	text string
	r    *rand.Rand
	gave int
}

func (p *pieces) Read(b []byte) (int, error) {
	if p.gave == len(p.text) {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), 1+p.r.IntN(7))], p.text[p.gave:])
	p.gave += n
	return n, nil
}

// TestStreamByTheBook compares a stream with its definition, on texts and needles of two letters,
// cut anywhere. It holds back no byte that cannot belong to a needle.
func TestStreamByTheBook(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	word := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = "ab"[r.IntN(2)]
		}
		return string(b)
	}
	for round := range 4000 {
		s := &searcher{}
		for range r.IntN(12) {
			s.needles = append(s.needles, needle{text: []byte(word(1 + r.IntN(6)))})
		}
		in := word(r.IntN(60))
		if round%8 == 0 {
			in = strings.ReplaceAll(in, "ab", "....")
		}
		src := &pieces{in, r, 0}
		to := func(b []byte, _ *needle) ([]byte, error) { return []byte("<" + string(b) + ">"), nil }
		st := newStream(io.NopCloser(src), s, to, func() error { return nil })
		var got []byte
		b := make([]byte, 5)
		for {
			n, err := st.Read(b[:1+r.IntN(5)])
			got = append(got, b[:n]...)
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			held := len(st.buf)
			if st.wait && held > 0 && s.open(st.buf, 0) != 0 {
				t.Fatalf("%q: %q is held back", in, st.buf)
			}
		}
		want := byTheBook(in, s.needles)
		if string(got) != want {
			t.Fatalf("%q of %q: %q; want %q", s.needles, in, got, want)
		}
		if once, err := s.replace(in, 100_000, to); once != want || err != nil {
			t.Fatalf("%q at once: %q, %v; want %q", in, once, err, want)
		}
	}
}

// TestStreamMemory: input that is nothing but placeholders for the longest value needs little memory.
func TestStreamMemory(t *testing.T) {
	big := bytes.Repeat([]byte("x"), vault.MaxValue)
	s := &searcher{needles: []needle{{text: []byte("{{TOKEN}}")}}}
	src := io.NopCloser(io.LimitReader(&endless{"{{TOKEN}}", 0}, 9*1000))
	st := newStream(src, s, func([]byte, *needle) ([]byte, error) { return big, nil }, func() error { return nil })
	total, most := 0, 0
	b := make([]byte, 4096)
	for {
		n, err := st.Read(b)
		total, most = total+n, max(most, cap(st.buf)+cap(st.out))
		if err == io.EOF {
			break
		}
	}
	if total != 1000*len(big) || most > 4*len(big) {
		t.Errorf("%d bytes came out, by %d of memory", total, most)
	}
}

// endless is a text again and again. It fills what it is given.
type endless struct {
	text string
	at   int
}

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = e.text[e.at]
		e.at = (e.at + 1) % len(e.text)
	}
	return len(p), nil
}

// TestTransport sends by a real client to a real server: what is refused in the middle of a body
// is the error of the client, and the server gets no part of the placeholder.
func TestTransport(t *testing.T) {
	w := newWorld(t, Options{})
	got := make(chan string, 1)
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		got <- fmt.Sprintf("%s %v %v %v", b[max(0, len(b)-60):], err != nil, r.Trailer, r.Header["Authorization"])
		io.WriteString(rw, "echo "+token) //nolint:errcheck // the test reads it
	}))
	defer server.Close()
	transport := &http.Transport{DisableCompression: true}
	defer transport.CloseIdleConnections()
	send := func(host, body string, trailer http.Header) (*http.Response, error) {
		r, err := http.NewRequest("POST", server.URL+"/", iotest.OneByteReader(strings.NewReader(body)))
		if err != nil {
			t.Fatal(err)
		}
		r.Host, r.Trailer = host, trailer
		if _, err := w.at(r); err != nil {
			t.Fatal(err)
		}
		return transport.RoundTrip(r)
	}
	r, err := send("sub.example.com", "a{{TOKEN}}b", http.Header{"X-T": {"1"}})
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	if s := <-got; s != "a"+token+"b false map[X-T:[1]] []" {
		t.Error(s)
	}
	_, err = send("git.example.com", strings.Repeat("y", 100)+w.drawn("basic")+"z", nil)
	if d, ok := errors.AsType[*Denied](err); !ok || d.Kind != WrongPlace {
		t.Errorf("%v", err)
	}
	if s := <-got; strings.Contains(s, "sbx") || !strings.HasPrefix(s, strings.Repeat("y", 60)+" true") {
		t.Error(s)
	}
}

func BenchmarkMask(b *testing.B) {
	w := newWorld(b, Options{Mask: true})
	body := bytes.Repeat([]byte(`{"id":"chatcmpl","choices":[{"delta":{"content":"The quick brown fox"}}]}`+"\n"), 15000)
	for _, host := range []string{"api.example.com", "two.example.com"} {
		b.Run(host, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				r := text("")
				r.Body = io.NopCloser(bytes.NewReader(body))
				answer(b, w, host, r)
				if _, err := io.Copy(io.Discard, r.Body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
