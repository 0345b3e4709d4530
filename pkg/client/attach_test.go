package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

const ptyID = "0123456789abcdef0123456789abcdef"

// ptyServer answers attaches, each by the next script; then there is no daemon.
type ptyServer struct {
	*httptest.Server
	mu      sync.Mutex
	scripts []func(ctx context.Context, ws *websocket.Conn)
	queries []string
}

func newPtyServer(t *testing.T, scripts ...func(ctx context.Context, ws *websocket.Conn)) (*ptyServer, *Terminal) {
	t.Helper()
	s := &ptyServer{scripts: scripts}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.queries = append(s.queries, r.URL.RawQuery)
		if len(s.scripts) == 0 {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		s.scripts[0](r.Context(), ws)
		s.scripts = s.scripts[1:]
		ws.CloseNow() //nolint:errcheck // the script may have
	}))
	t.Cleanup(s.Close)
	c, err := New(s.URL, "key")
	if err != nil {
		t.Fatal(err)
	}
	term, err := c.Terminals("lab").Get(ptyID)
	if err != nil {
		t.Fatal(err)
	}
	return s, term
}

func says(messages ...string) func(ctx context.Context, ws *websocket.Conn) {
	return func(ctx context.Context, ws *websocket.Conn) {
		for _, m := range messages {
			kind := websocket.MessageBinary
			if strings.HasPrefix(m, "{") {
				kind = websocket.MessageText
			}
			if ws.Write(ctx, kind, []byte(m)) != nil {
				return
			}
		}
	}
}

func replayed(off uint64, s string) string {
	return string(binary.BigEndian.AppendUint64([]byte{3}, off)) + s
}

const (
	connected = `{"type":"connected","session_id":"` + ptyID + `","mode":"pty"}`
	exited    = `{"type":"exit","exit_code":7}`
)

// A connection that breaks is made again, and goes on at the byte where it broke.
func TestAttachComesBack(t *testing.T) {
	s, term := newPtyServer(t, says(connected, "\x01one ", "\x01two "), says(replayed(8, "three "), connected, "\x02four", exited))
	var out bytes.Buffer
	var lost, back int
	exit, err := term.Attach(t.Context(),
		View{Out: &out, Patience: 10 * time.Second, Lost: func(error) { lost++ }, Back: func() { back++ }})
	if err != nil || exit.Code != 7 || out.String() != "one two three four" || lost != 1 || back != 1 {
		t.Errorf("%+v, %v, %q, lost %d, back %d", exit, err, out.String(), lost, back)
	}
	if want := []string{"since=0", "since=8&takeover=1"}; len(s.queries) != 2 || s.queries[0] != want[0] || s.queries[1] != want[1] {
		t.Errorf("%q", s.queries)
	}
}

func TestAttachEnds(t *testing.T) {
	taken := func(_ context.Context, ws *websocket.Conn) { ws.Close(4001, "TAKEN_OVER") } //nolint:errcheck // the client looks
	for name, c := range map[string]struct {
		script func(context.Context, *websocket.Conn)
		is     error
		code   errs.Code
		exit   Exit
	}{
		"signal": {
			script: says(connected, `{"type":"exit","exit_code":137,"signal":"SIGKILL"}`),
			exit:   Exit{Code: 137, Signal: "SIGKILL"},
		},
		"not started": {
			script: says(`{"type":"error","code":"START_FAILED","error":"no such file","exit_code":127}`),
			exit:   Exit{Code: 127, Error: "no such file"},
		},
		"no terminal": {script: says(`{"type":"error","code":"START_FAILED","error":"none left"}`), code: errs.Internal},
		"busy":        {script: says(`{"type":"error","code":"ALREADY_CONNECTED","error":"x"}`), code: errs.WrongState},
		"taken over":  {script: taken, is: ErrTakenOver},
		"no code":     {script: says(connected, `{"type":"exit"}`), code: errs.Internal},
		"no JSON":     {script: says(connected, `{"type":`), code: errs.Internal},
		"too large":   {script: says(connected, "\x01"+strings.Repeat("x", 3<<20)), code: errs.Internal},
		"lost":        {script: says(connected, "\x01x"), is: ErrLost},
		"short":       {script: says(connected, "\x03abc", exited), code: errs.Internal},
		"empty":       {script: says(connected, "", exited), code: errs.Internal},
		"unknown":     {script: says(connected, "\x09x", "\x01", `{"type":"x"}`, exited), exit: Exit{Code: 7}},
	} {
		_, term := newPtyServer(t, c.script)
		exit, err := term.Attach(t.Context(), View{Out: io.Discard, Patience: 300 * time.Millisecond})
		if c.is == nil && c.code == "" && err != nil || c.is != nil && !errors.Is(err, c.is) || c.code != "" && !errs.Is(err, c.code) ||
			exit != c.exit {
			t.Errorf("%s: %+v, %v", name, exit, err)
		}
	}
	_, term := newPtyServer(t) // answers 502 from the start: nothing is waited for
	start := time.Now()
	if _, err := term.Attach(t.Context(), View{Out: io.Discard, Patience: time.Minute}); !errs.Is(err, errs.Unavailable) ||
		time.Since(start) > 5*time.Second {
		t.Error(err)
	}
}

// What is typed while the connection is away arrives, and its reader's error ends all.
func TestAttachTypes(t *testing.T) {
	got, closed := make(chan string, 9), make(chan struct{})
	listen := func(ctx context.Context, ws *websocket.Conn) {
		says(connected)(ctx, ws)
		for {
			kind, b, err := ws.Read(ctx)
			if err != nil {
				return
			}
			if got <- string(b); kind == websocket.MessageText {
				return // breaks at the first size
			}
		}
	}
	_, term := newPtyServer(t, listen, func(ctx context.Context, ws *websocket.Conn) {
		says(connected)(ctx, ws)
		for range 3 {
			_, b, err := ws.Read(ctx)
			if err != nil {
				t.Error(err)
			}
			got <- string(b)
		}
		ws.Close(websocket.StatusNormalClosure, "detached") //nolint:errcheck // the client looks
		close(closed)
	})
	r, w := io.Pipe()
	over := errors.New("detached")
	v := View{In: r, Out: io.Discard, Size: func() (int, int) { return 5, 6 }, Patience: 10 * time.Second}
	v.Lost = func(error) { go w.Write([]byte("typed")) } //nolint:errcheck // got tells
	go func() {
		for _, want := range []string{`{"type":"resize","cols":5,"rows":6}`, `{"type":"resize","cols":5,"rows":6}`, "\x00typed"} {
			if s := <-got; s != want {
				t.Errorf("%q, want %q", s, want)
			}
		}
		w.CloseWithError(over)
	}()
	if _, err := term.Attach(t.Context(), v); !errors.Is(err, over) {
		t.Error(err)
	}
	<-closed
	if s := <-got; s != `{"type":"detach"}` {
		t.Errorf("left by %q", s)
	}
}

// An agent that takes no input for a while, since its process reads none, is
// there as long as it says so; one that says nothing is not.
func TestAttachWaits(t *testing.T) {
	// A client that heard no ping of the agent would give up after one and a half of
	// its own, while the agent's come far more often than that, on a busy host too.
	const patient, every, rounds = time.Second, 100 * time.Millisecond, 20
	for try := 1; ; try++ {
		var typed []byte
		var round time.Duration // the longest
		s, term := newPtyServer(t, func(ctx context.Context, ws *websocket.Conn) {
			says(connected)(ctx, ws)
			for range rounds { // it reads nothing, so it sees no answer
				began := time.Now()
				hold, cancel := context.WithTimeout(ctx, every)
				ws.Ping(hold) //nolint:errcheck // that it is sent is enough
				cancel()
				round = max(round, time.Since(began))
			}
			_, typed, _ = ws.Read(ctx)
			says(exited)(ctx, ws)
		})
		term.in.ping = patient
		exit, err := term.Attach(t.Context(), View{In: strings.NewReader("typed"), Out: io.Discard})
		s.mu.Lock() // which the script holds
		connections, late := len(s.queries), round > patient
		s.mu.Unlock()
		if err != nil && late && try < 10 {
			continue // this process stood still, so the agent did say nothing
		}
		if err != nil || exit.Code != 7 || string(typed) != "\x00typed" || connections != 1 {
			t.Errorf("%+v, %v; the agent got %q over %d connections", exit, err, typed, connections)
		}
		break
	}
	silent := make(chan struct{})
	_, term := newPtyServer(t, func(ctx context.Context, ws *websocket.Conn) {
		says(connected)(ctx, ws)
		<-silent
	})
	defer close(silent)
	term.in.ping = every
	lost := make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	//nolint:errcheck // lost tells
	term.Attach(ctx, View{Out: io.Discard, Patience: time.Minute, Lost: func(error) { close(lost); cancel() }})
	select {
	case <-lost:
	default:
		t.Error("an agent that says nothing is believed to be there")
	}
}
