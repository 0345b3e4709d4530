package server

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

func benchEnv(b *testing.B) (*Server, func(method, path, contentType string, body []byte)) {
	dir := b.TempDir()
	s, err := New(Config{
		Bootstrap: agent.Bootstrap{Token: "tok", Workdir: dir, User: strconv.Itoa(os.Getuid()) + ":" + strconv.Itoa(os.Getgid())},
		StateDir:  filepath.Join(dir, "state"),
	})
	if err != nil {
		b.Fatal(err)
	}
	h := httptest.NewServer(s)
	b.Cleanup(h.Close)
	return s, func(method, path, contentType string, body []byte) {
		r, _ := http.NewRequest(method, h.URL+path, bytes.NewReader(body))
		r.Header.Set("Content-Type", contentType)
		r.Header.Set(agent.TokenHeader, "tok")
		r.Header.Set("Accept", agent.FramesType)
		resp, err := h.Client().Do(r)
		if err != nil {
			b.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode >= 300 {
			b.Fatal(resp.StatusCode, err)
		}
	}
}

// BenchmarkCommand compares a command over HTTP with a bare spawn of the same.
func BenchmarkCommand(b *testing.B) {
	s, do := benchEnv(b)
	b.Run("spawn", func(b *testing.B) {
		n := s.commands.DevNull.Fd()
		for b.Loop() {
			p, err := proc.Start(proc.Spec{Path: "/bin/true", Argv: []string{"true"}, Dir: "/", Files: [3]uintptr{n, n, n}})
			if err != nil {
				b.Fatal(err)
			}
			<-p.Done()
		}
	})
	for _, command := range []string{"true", "echo hello", "'true'"} {
		b.Run(command, func(b *testing.B) {
			for b.Loop() {
				do("POST", "/command", "", []byte(`{"command":"`+command+`"}`))
			}
		})
	}
	b.Run("output", func(b *testing.B) {
		b.SetBytes(100 << 20)
		for b.Loop() {
			do("POST", "/command", "", []byte(`{"command":"head -c 104857600 /dev/zero"}`))
		}
	})
}

func BenchmarkFiles(b *testing.B) {
	_, do := benchEnv(b)
	data := make([]byte, 100<<20)
	body, typ := form(meta("big", ""), content(string(data)))
	b.Run("upload", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			do("POST", "/files/upload", typ, body)
		}
	})
	b.Run("download", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			do("GET", "/files/download?path=big", "", nil)
		}
	})
}

// BenchmarkAhead is a command that the shell ahead runs, with a pause before
// each in which that is made; and the same by a shell that is started for it.
func BenchmarkAhead(b *testing.B) {
	s, do := benchEnv(b)
	for name, body := range map[string]string{"ahead": `{"command":"true"}`, "cold": `{"argv":["bash","-c","true"]}`} {
		b.Run(name, func(b *testing.B) {
			s.ahead.On.Store(name == "ahead")
			var took []float64
			for b.Loop() {
				if s.ahead.On.Load() {
					s.ahead.Refill()
					time.Sleep(10 * time.Millisecond) // off the clock that counts
				}
				start := time.Now()
				do("POST", "/command", "", []byte(body))
				took = append(took, float64(time.Since(start).Microseconds()))
			}
			slices.Sort(took)
			b.ReportMetric(took[len(took)/2], "p50-µs")
		})
	}
}
