package api

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestLogTimes: logs since a time, and with times before the lines, as docker prints them.
func TestLogTimes(t *testing.T) {
	w := newWorld(t)
	out := "one\ntwo\nthree"
	old := false // the agent is of an older release
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/command/entrypoint/times" && !old:
			fmt.Fprint(rw, `{"end":13,"marks":[[0,1000],[4,2500]]}`)
		case r.URL.Path != "/command/entrypoint/logs":
			http.NotFound(rw, r)
		default:
			n := 0
			fmt.Sscan(r.URL.Query().Get("cursor"), &n) //nolint:errcheck // none is 0
			if since := r.URL.Query().Get("since"); since != "" && !old {
				first := map[string]int{"1970-01-01T00:00:02Z": 4, "2030-01-01T00:00:00Z": len(out)}[since]
				rw.Header().Set(agent.SinceHeader, fmt.Sprint(first))
			}
			rw.Header().Set(agent.CursorHeader, fmt.Sprint(len(out)))
			fmt.Fprint(rw, out[n:])
		}
	})
	sb := w.create()
	at := "/v1/sandboxes/" + sb.ID + "/logs"
	const first, second = "1970-01-01T00:00:01.000000000Z ", "1970-01-01T00:00:02.500000000Z "
	for query, want := range map[string]string{
		"":                                   out,
		"?timestamps=true":                   first + "one\n" + second + "two\n" + second + "three",
		"?timestamps=true&tail=1":            second + "three",
		"?since=1970-01-01T00:00:02Z":        "two\nthree",
		"?since=1970-01-01T00:00:02Z&tail=1": "three",
		"?since=1970-01-01T00:00:02Z&tail=9": "two\nthree",
		"?since=1970-01-01T00:00:02Z&timestamps=true": second + "two\n" + second + "three",
		"?since=2030-01-01T00:00:00Z":                 "",
	} {
		if a := w.do("GET", at+query, ""); a.StatusCode != 200 || string(a.body) != want {
			t.Errorf("%s: %d %q, want %q", query, a.StatusCode, a.body, want)
		}
	}
	out = "one\ntwo\nth" + strings.Repeat("r", 2*agent.MaxLastOutput)
	if a := w.do("GET", at+"?timestamps=true&cursor=10", ""); string(a.body) != out[10:] {
		t.Errorf("back inside a line, after a long time: %.60q", a.body)
	}
	for query, status := range map[string]int{"?since=yesterday": 400, "?timestamps=perhaps": 400} {
		if a := w.do("GET", at+query, ""); a.StatusCode != status {
			t.Errorf("%s: %d %s", query, a.StatusCode, a.body)
		}
	}
	old = true
	for _, query := range []string{"?since=2030-01-01T00:00:00Z", "?timestamps=true"} {
		if a := w.do("GET", at+query, ""); a.StatusCode != 409 || !strings.Contains(string(a.body), "older release") {
			t.Errorf("an old agent, %s: %d %s", query, a.StatusCode, a.body)
		}
	}
	ended := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	w.set(sb.ID, func(r *record.Record) {
		r.State, r.Reason, r.LastOutput, r.Changed = record.Ended, record.Exited, "bye\n", ended
	})
	for query, want := range map[string]string{
		"": "bye\n", "?since=2026-01-02T03:04:05Z": "bye\n", "?since=2026-01-02T03:04:06Z": "", "?timestamps=true": "no times are kept",
	} {
		if a := w.do("GET", at+query, ""); !strings.Contains(string(a.body), want) || want == "" && len(a.body) > 0 {
			t.Errorf("ended, %s: %d %q", query, a.StatusCode, a.body)
		}
	}
}

// TestStamper: lines may come in pieces, and later ones have the time at which they come.
func TestStamper(t *testing.T) {
	var b strings.Builder
	s := &stamper{w: &b, times: agent.OutputTimes{End: 2, Marks: [][2]int64{{0, 0}}}}
	for _, piece := range []string{"a", "", "\nb", "c\n", "\n"} {
		if n, err := s.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatal(n, err)
		}
	}
	lines := strings.Split(b.String(), "\n")
	if len(lines) != 4 || lines[0] != "1970-01-01T00:00:00.000000000Z a" || !strings.HasSuffix(lines[1], "Z bc") ||
		strings.HasPrefix(lines[1], "1970") || !strings.HasSuffix(lines[2], "Z ") || lines[3] != "" {
		t.Errorf("%q", lines)
	}
}

// TestLogTimesOfLongOutput: the times are right where the agent has dropped the beginning
// of the output.
func TestLogTimesOfLongOutput(t *testing.T) {
	w := newWorld(t)
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set(agent.CursorHeader, "12")
		switch {
		case r.URL.Path == "/command/entrypoint/times":
			fmt.Fprint(rw, `{"end":12,"marks":[[0,1000],[4,2000],[8,3000]]}`)
		case r.Method == http.MethodHead:
			rw.Header().Set(agent.SinceHeader, "4")
		default:
			fmt.Fprint(rw, "two\nend\n")
		}
	})
	a := w.do("GET", "/v1/sandboxes/"+w.create().ID+"/logs?timestamps=true", "")
	if want := "1970-01-01T00:00:02.000000000Z two\n1970-01-01T00:00:03.000000000Z end\n"; string(a.body) != want {
		t.Errorf("%s %q, want %q", a.Status, a.body, want)
	}
}

// TestLogsSinceUntilTheEnd: where logs are followed since a time, the end of the sandbox
// adds nothing that is older.
func TestLogsSinceUntilTheEnd(t *testing.T) {
	const old, new = "old\n", "new\n"
	for _, written := range []string{old, old + new} {
		w := newWorld(t)
		var id string
		w.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			n := 0
			fmt.Sscan(r.URL.Query().Get("cursor"), &n) //nolint:errcheck // none is 0
			cursor := len(written)
			switch {
			case r.Method == http.MethodHead:
				rw.Header().Set(agent.SinceHeader, fmt.Sprint(len(old)))
			case r.URL.Query().Has("follow"):
				cursor = n
				defer w.set(id, func(r *record.Record) { r.State, r.LastOutput = record.Ended, written+"last\n" })
			}
			rw.Header().Set(agent.CursorHeader, fmt.Sprint(cursor))
			fmt.Fprint(rw, written[n:])
		})
		id = w.create().ID
		a := w.do("GET", "/v1/sandboxes/"+id+"/logs?follow=true&since=2026-01-02T03:04:05Z", "")
		if want := written[len(old):] + "last\n"; string(a.body) != want {
			t.Errorf("%s %q, want %q", a.Status, a.body, want)
		}
	}
}
