package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// flaky is a daemon that is restarted: after a stream broke it does not answer the next
// requests.
type flaky struct {
	*Client
	mu    sync.Mutex
	away  int // requests that are not answered
	asked []string
}

// newFlaky serves streams with h, which panics with http.ErrAbortHandler where they break.
func newFlaky(t *testing.T, h func(w http.ResponseWriter, r *http.Request)) *flaky {
	f := &flaky{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.away > 0 {
			f.away--
			panic(http.ErrAbortHandler)
		}
		if r.URL.Path != "/v1/version" {
			f.asked = append(f.asked, r.Method+" "+strings.TrimPrefix(r.URL.RequestURI(), "/v1/sandboxes/lab"))
			h(w, r)
		}
	}))
	t.Cleanup(srv.Close)
	c, err := New(srv.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	f.Client = c
	return f
}

// breaks sends what was written, cuts the connection, and is away for some requests.
func (f *flaky) breaks(w http.ResponseWriter, away int) {
	http.NewResponseController(w).Flush() //nolint:errcheck // the test sees what is missing
	f.away = away
	panic(http.ErrAbortHandler)
}

// notes are Notices that remember.
func notes(said *[]string) Notices {
	return Notices{
		Lost: func(error) { *said = append(*said, "lost") },
		Back: func() { *said = append(*said, "back") },
	}
}

func resuming(w http.ResponseWriter, stdout, stderr int) {
	w.Header().Set("Content-Type", agent.FramesType)
	fmt.Fprintf(w, "%s", agent.AppendFrame(nil, agent.FrameControl,
		fmt.Appendf(nil, `{"id":%q,"resumes":true,"stdout":%d,"stderr":%d}`, commandID, stdout, stderr)))
}

func piece(w io.Writer, stream byte, text string) {
	w.Write(agent.AppendFrame(nil, stream, []byte(text))) //nolint:errcheck // the test sees what is missing
}

// TestWaitOn: the output of a command goes on where it was, each stream by itself, and the
// exit status arrives.
func TestWaitOn(t *testing.T) {
	var f *flaky
	f = newFlaky(t, func(w http.ResponseWriter, r *http.Request) {
		switch n := len(f.asked); n {
		case 1:
			resuming(w, 0, 0)
			piece(w, 1, "one ")
			piece(w, 2, "e1 ")
			f.breaks(w, 4)
		case 2: // it was restarted, and dies again before it says anything
			panic(http.ErrAbortHandler)
		case 3:
			resuming(w, 4, 10) // the agent has forgotten seven bytes
			piece(w, 1, "two")
			piece(w, 2, "e2")
			piece(w, 3, `{"exit_code":7}`)
		}
	})
	p, err := f.Start(t.Context(), "lab", Command{Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	var out, errout strings.Builder
	var said []string
	forgot := int64(0)
	exit, err := p.WaitOn(t.Context(), notes(&said), func(n int64) { forgot += n }, &out, &errout)
	if err != nil || exit.Code != 7 || out.String() != "one two" || errout.String() != "e1 e2" || forgot != 7 {
		t.Errorf("%v, %+v, %q, %q, %d forgotten", err, exit, out.String(), errout.String(), forgot)
	}
	at := "/proxy/44772/command"
	again := "GET " + at + "/" + commandID + "/frames?stderr=3&stdout=4"
	if want := []string{"POST " + at, again, again}; !slices.Equal(f.asked, want) {
		t.Errorf("asked %q, want %q", f.asked, want)
	}
	if !slices.Equal(said, []string{"lost", "back"}) {
		t.Errorf("said %q", said)
	}
}

// TestWaitOnEnds: a command that is gone, and an agent that lets nobody come back, end it.
func TestWaitOnEnds(t *testing.T) {
	var f *flaky
	resumes := true
	f = newFlaky(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		if resumes {
			resuming(w, 0, 0)
		} else {
			w.Header().Set("Content-Type", agent.FramesType)
			w.Write(frames()) //nolint:errcheck // the test sees what is missing
		}
		f.breaks(w, 0)
	})
	for range 2 {
		p, err := f.Start(t.Context(), "lab", Command{Argv: []string{"x"}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.WaitOn(t.Context(), Notices{}, nil, io.Discard, io.Discard)
		if resumes && !errs.Is(err, errs.NotFound) || !resumes && !broken(err) {
			t.Errorf("resumes %v: %v", resumes, err)
		}
		resumes = false
	}
	if gets := strings.Count(strings.Join(f.asked, "\n"), "GET"); gets != 1 {
		t.Errorf("asked %q", f.asked)
	}
}

// TestPersistEnds: ctx ends the waiting, and a daemon that was never there is not waited for.
func TestPersistEnds(t *testing.T) {
	f := newFlaky(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	f.away = 1 << 30
	err := f.Persist(ctx, Notices{Lost: func(error) { cancel() }}, func() error { return f.do(ctx, get("/x"), nil) })
	if ctx.Err() == nil || err == nil {
		t.Errorf("%v", err)
	}
	var said []string
	err = f.FollowLogs(t.Context(), "lab", AllLines, LogTimes{}, notes(&said), io.Discard)
	if !errs.Is(err, errs.Unavailable) || said != nil {
		t.Errorf("a stream that never began: %v, %q", err, said)
	}
}

// TestFollowComesBack: logs go on at the byte where they were, and end with the sandbox
// that has ended meanwhile.
func TestFollowComesBack(t *testing.T) {
	var f *flaky
	f = newFlaky(t, func(w http.ResponseWriter, r *http.Request) {
		switch len(f.asked) {
		case 1:
			w.Header().Set(agent.CursorHeader, "100")
			io.WriteString(w, "one\ntw") //nolint:errcheck // the test sees what is missing
			f.breaks(w, 2)
		case 2:
			w.Header().Set(agent.CursorHeader, "106")
			io.WriteString(w, "o\nthr") //nolint:errcheck // the test sees what is missing
			f.breaks(w, 2)
		default: // of the record, which has the end of the output
			io.WriteString(w, "two\nthree\n") //nolint:errcheck // the test sees what is missing
		}
	})
	var out strings.Builder
	if err := f.FollowLogs(t.Context(), "lab", 7, LogTimes{}, Notices{}, &out); err != nil || out.String() != "one\ntwo\nthree\n" {
		t.Errorf("%v, %q", err, out.String())
	}
	want := []string{"GET /logs?follow=true&tail=7", "GET /logs?cursor=106&follow=true", "GET /logs?cursor=111&follow=true"}
	if !slices.Equal(f.asked, want) {
		t.Errorf("asked %q, want %q", f.asked, want)
	}
}

// TestFollowStampsComeBack: a connection that breaks inside the time before a line costs no
// byte, and repeats none.
func TestFollowStampsComeBack(t *testing.T) {
	const one, two = "2026-11-23T12:00:00.000000000Z one\n", "2026-11-23T12:00:01.000000000Z two\n"
	for _, n := range []int{10, stampLen, stampLen + 2} {
		var f *flaky
		f = newFlaky(t, func(w http.ResponseWriter, r *http.Request) {
			switch len(f.asked) {
			case 1:
				w.Header().Set(agent.CursorHeader, "0")
				io.WriteString(w, one+two[:n]) //nolint:errcheck // the test sees what is missing
				f.breaks(w, 0)
			case 2:
				w.Header().Set(agent.CursorHeader, r.URL.Query().Get("cursor"))
				from := 0
				if n > stampLen { // inside a line comes no time
					from = n
				}
				io.WriteString(w, two[from:]) //nolint:errcheck // the test sees what is missing
				f.breaks(w, 0)
			default:
				w.Header().Set(agent.CursorHeader, r.URL.Query().Get("cursor"))
			}
		})
		var out strings.Builder
		err := f.FollowLogs(t.Context(), "lab", AllLines, LogTimes{Stamps: true}, Notices{}, &out)
		if err != nil || out.String() != one+two || len(f.asked) != 3 || !strings.Contains(f.asked[2], "cursor=8&") {
			t.Errorf("broken after %d bytes: %v, %q, %q", n, err, out.String(), f.asked)
		}
	}
}

// TestFollowCommandComesBack is TestFollowComesBack for the output of a command.
func TestFollowCommandComesBack(t *testing.T) {
	var f *flaky
	f = newFlaky(t, func(w http.ResponseWriter, r *http.Request) {
		first := r.URL.Query().Get("cursor")
		w.Header().Set(agent.CursorHeader, first)
		if first == "3" {
			io.WriteString(w, "one") //nolint:errcheck // the test sees what is missing
			f.breaks(w, 2)
		}
		io.WriteString(w, "two") //nolint:errcheck // the test sees what is missing
	})
	var out strings.Builder
	err := f.Commands("lab").Follow(t.Context(), commandID, 3, Notices{}, &out)
	if err != nil || out.String() != "onetwo" || len(f.asked) != 2 || !strings.Contains(f.asked[1], "cursor=6") {
		t.Errorf("%v, %q, %q", err, out.String(), f.asked)
	}
}

// TestEventsComeBack: the daemon is told the last event that was read.
func TestEventsComeBack(t *testing.T) {
	var f *flaky
	var since []string
	f = newFlaky(t, func(w http.ResponseWriter, r *http.Request) {
		since = append(since, r.Header.Get("Last-Event-ID"))
		n := len(since)
		fmt.Fprintf(w, "id: e-%d\n\n", 10*n)
		if n > 1 {
			fmt.Fprintf(w, "id: e-%d\nevent: running\ndata: {\"type\":\"running\",\"id\":\"sb%d\"}\n\n: alive\n\n", 10*n+1, n)
		}
		f.breaks(w, 2)
	})
	var got []string
	for ev, err := range f.Events(t.Context(), time.Time{}, Notices{}) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, ev.Type+" "+ev.ID)
		if len(got) == 2 {
			break
		}
	}
	if !slices.Equal(got, []string{"running sb2", "running sb3"}) || !slices.Equal(since, []string{"", "e-10", "e-21"}) {
		t.Errorf("%q since %q", got, since)
	}
}

// TestStdinParts: a part whose answer was lost is sent again, from the same byte, and each
// byte of the input comes once.
func TestStdinParts(t *testing.T) {
	var f *flaky
	var have []byte
	sent := 0
	f = newFlaky(t, func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/stdin") {
			resuming(w, 0, 0)
			return
		}
		sent++
		b, err := io.ReadAll(r.Body)
		var offset int
		fmt.Sscan(r.URL.Query().Get("offset"), &offset) //nolint:errcheck // the test sees what is missing
		if err != nil || offset > len(have) || len(b) > agent.MaxStdinPart {
			t.Errorf("a part of %d bytes from %d on, of %d: %v", len(b), offset, len(have), err)
		}
		have = append(have[:offset], b...)
		if sent == 1 || sent == 3 {
			f.breaks(w, 1)
		}
	})
	p, err := f.Start(t.Context(), "lab", Command{Argv: []string{"cat"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Repeat("0123456789abcdef", 1<<18) // 4 MiB
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.SendStdin(ctx, strings.NewReader(all)); err != nil || string(have) != all {
		t.Errorf("%v: %d bytes came of %d", err, len(have), len(all))
	}
	if last := f.asked[len(f.asked)-1]; strings.Contains(last, "more") {
		t.Errorf("the last part does not end the input: %s", last)
	}
}
