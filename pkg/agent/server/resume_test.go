package server

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// framed is a stream of frames, and what came of it.
type framed struct {
	*testing.T
	first agent.FrameInit
	fr    *agent.FrameReader
	leave context.CancelFunc
	got   [2]string
	exit  *agent.FrameExit
}

// framed sends a request that is answered with frames.
func (e *env) framed(method, path string, body []byte) *framed {
	e.Helper()
	ctx, cancel := context.WithCancel(e.Context())
	e.Cleanup(cancel)
	r := e.request(method, path, bytes.NewReader(body)).WithContext(ctx)
	r.Header.Set("Accept", agent.FramesType)
	resp, err := e.http.Client().Do(r)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { resp.Body.Close() })
	f := &framed{T: e.T, fr: agent.NewFrameReader(bufio.NewReader(resp.Body)), leave: cancel}
	_, payload, err := f.fr.Next()
	if err == nil {
		f.first, err = agent.ParseInit(payload)
	}
	if err != nil || resp.StatusCode != http.StatusOK || !f.first.Resumes {
		e.Fatalf("%s %s: %s, %+v, %v", method, path, resp.Status, f.first, err)
	}
	return f
}

// until reads until enough says so, or the end.
func (f *framed) until(enough func() bool) {
	f.Helper()
	for f.exit == nil && !enough() {
		stream, payload, err := f.fr.Next()
		if err != nil {
			f.Fatal(err)
		}
		switch stream {
		case agent.FrameStdout, agent.FrameStderr:
			f.got[stream-1] += string(payload)
		case agent.FrameEnd:
			x, err := agent.ParseExit(payload)
			if err != nil {
				f.Fatal(err)
			}
			f.exit = &x
		}
	}
}

func (f *framed) end() { f.until(func() bool { return false }) }

func argvOf(argv ...string) []byte {
	b := new(bytes.Buffer)
	fmt.Fprintf(b, `{"stdin":true,"argv":["%s"]}`, strings.Join(argv, `","`))
	return b.Bytes()
}

// TestComeBack: a client whose connection broke goes on at the byte of each stream where it
// was, while the command runs and when it has ended, and the streams are told apart.
func TestComeBack(t *testing.T) {
	e := newEnv(t)
	go1, go2 := filepath.Join(e.dir, "1"), filepath.Join(e.dir, "2")
	f := e.framed("POST", "/command", argvOf("sh", "-c", "echo out1; echo err1 >&2; until [ -e "+go1+" ]; do sleep 0.01; done; "+
		"echo out2; echo err2 >&2; until [ -e "+go2+" ]; do sleep 0.01; done; echo err3 >&2; echo out3; exit 7"))
	id := f.first.ID
	f.until(func() bool { return len(f.got[0]) == 5 && len(f.got[1]) == 5 })
	f.leave()
	if err := os.WriteFile(go1, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// It has all of one stream, and a part of the other.
	f = e.framed("GET", "/command/"+id+"/frames?stdout=5&stderr=3", nil)
	if f.first.ID != id || f.first.Stdout != 5 || f.first.Stderr != 3 {
		t.Errorf("begins with %+v", f.first)
	}
	f.until(func() bool { return strings.HasSuffix(f.got[0], "out2\n") && strings.HasSuffix(f.got[1], "err2\n") })
	if f.got != [2]string{"out2\n", "1\nerr2\n"} {
		t.Errorf("%q", f.got)
	}
	// Another one takes over, and the connection of the first ends.
	g := e.framed("GET", "/command/"+id+"/frames?stdout=10&stderr=10", nil)
	if _, err := io.ReadAll(e.rest(f)); err == nil {
		t.Error("the connection that was taken over ends as if the command had")
	}
	if err := os.WriteFile(go2, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	g.end()
	if g.got != [2]string{"out3\n", "err3\n"} || g.exit.ExitCode != 7 {
		t.Errorf("%q, %+v", g.got, g.exit)
	}
	// It has ended: all of it can be read again, with the exit.
	f = e.framed("GET", "/command/"+id+"/frames", nil)
	f.end()
	if f.got != [2]string{"out1\nout2\nout3\n", "err1\nerr2\nerr3\n"} || f.exit.ExitCode != 7 {
		t.Errorf("%q, %+v", f.got, f.exit)
	}
	for _, bad := range []string{"?stdout=x", "?stderr=-1", "?stdout=16"} {
		r := e.request("GET", "/command/"+id+"/frames"+bad, nil)
		r.Header.Set("Accept", agent.FramesType)
		if resp, body := e.send(r); resp.StatusCode != 400 {
			t.Errorf("%s: %s %s", bad, resp.Status, body)
		}
	}
	e.call(400, "GET", "/command/"+id+"/frames", nil) // events
	e.call(404, "GET", "/command/0123456789abcdef0123456789abcdef/frames", nil)
}

// TestComeBackToNothing: a command that could not be started says so again. The connection
// of the first answer serves another request by then, and is left alone.
func TestComeBackToNothing(t *testing.T) {
	e := newEnv(t)
	f := e.framed("POST", "/command", argvOf("/no/such/program"))
	f.end()
	if _, _, err := f.fr.Next(); err != io.EOF {
		t.Fatal(err)
	}
	other := e.framed("POST", "/command", argvOf("cat"))
	again := e.framed("GET", "/command/"+f.first.ID+"/frames", nil)
	again.end()
	if f.exit.ExitCode != 127 || again.exit.ExitCode != 127 {
		t.Errorf("%+v, then %+v", f.exit, again.exit)
	}
	e.call(200, "POST", "/command/"+other.first.ID+"/stdin?offset=0", "hello")
	if other.end(); other.got[0] != "hello" {
		t.Errorf("%q", other.got)
	}
}

// rest is what is left of a stream.
func (e *env) rest(f *framed) io.Reader { return restOf{f} }

type restOf struct{ f *framed }

func (r restOf) Read(b []byte) (int, error) {
	_, _, err := r.f.fr.Next()
	return 0, err
}

// TestNothingLost: a command that writes more than is kept waits for its client, which has
// gone and comes back.
func TestNothingLost(t *testing.T) {
	e := newEnv(t)
	f := e.framed("POST", "/command", argvOf("sh", "-c", "seq 1 4000000; exit 3"))
	f.until(func() bool { return len(f.got[0]) > 1000 })
	f.leave()
	have := len(f.got[0])
	c := e.s.commands.Get(f.first.ID)
	for { // until it waits; any state will do for what follows
		_, before := c.Output.Range()
		time.Sleep(50 * time.Millisecond)
		if _, now := c.Output.Range(); now == before {
			break
		}
	}
	g := e.framed("GET", fmt.Sprintf("/command/%s/frames?stdout=%d", f.first.ID, have), nil)
	g.end()
	sum, want := sha256.New(), sha256.New()
	io.WriteString(sum, f.got[0]+g.got[0]) //nolint:errcheck // never fails
	for i := 1; i <= 4000000; i++ {
		fmt.Fprintln(want, i)
	}
	if g.first.Stdout != int64(have) || g.exit.ExitCode != 3 || !bytes.Equal(sum.Sum(nil), want.Sum(nil)) {
		t.Errorf("goes on at %d of %d, %d bytes, %+v", g.first.Stdout, have, len(f.got[0])+len(g.got[0]), g.exit)
	}
}

// TestStdinInParts: a part that is sent again is not written twice, and the last one ends
// the input.
func TestStdinInParts(t *testing.T) {
	e := newEnv(t)
	f := e.framed("POST", "/command", argvOf("cat"))
	at := "/command/" + f.first.ID + "/stdin"
	e.call(200, "POST", at+"?offset=0&more=true", "one ")
	e.call(200, "POST", at+"?offset=0&more=true", "one ")
	e.call(200, "POST", at+"?offset=2&more=true", "e two ") // a part of it is new
	e.call(409, "POST", at+"?offset=99&more=true", "lost")
	e.call(400, "POST", at+"?offset=x", "x")
	e.call(400, "POST", at+"?offset=8&more=true", strings.Repeat("x", agent.MaxStdinPart+1))
	e.call(200, "POST", at+"?offset=8", "three")
	f.end()
	if f.got[0] != "one two three" || f.exit.ExitCode != 0 {
		t.Errorf("%q, %+v", f.got, f.exit)
	}
	e.call(200, "POST", at+"?offset=8", "three") // its answer was lost
	e.call(409, "POST", at+"?offset=13&more=true", "four")
}

// TestStdinPartWaits: a part that the command does not read waits, and its client may leave
// and send it again.
func TestStdinPartWaits(t *testing.T) {
	e := newEnv(t)
	gate := filepath.Join(e.dir, "gate")
	f := e.framed("POST", "/command", argvOf("sh", "-c", "until [ -e "+gate+" ]; do sleep 0.01; done; cat"))
	at := "/command/" + f.first.ID + "/stdin"
	all := strings.Repeat("0123456789abcdef", 20_000) // more than a pipe holds
	ctx, cancel := context.WithCancel(t.Context())
	began := make(chan struct{})
	sent := make(chan error, 1)
	go func() {
		close(began)
		resp, err := e.http.Client().Do(e.request("POST", at+"?offset=0", strings.NewReader(all)).WithContext(ctx))
		if err == nil {
			resp.Body.Close()
		}
		sent <- err
	}()
	<-began
	cancel()
	<-sent
	if err := os.WriteFile(gate, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e.call(200, "POST", at+"?offset=0", all)
	f.end()
	if f.got[0] != all {
		t.Errorf("%d bytes came of %d", len(f.got[0]), len(all))
	}
}
