package server

import (
	"context"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// More clients than there are turns, that send nothing or read nothing, hold up
// nobody; and all get what is theirs in the end.
func TestSlowClientsTakeNoTurn(t *testing.T) {
	e := newEnv(t)
	path := e.dir + "/large"
	e.write(path, string(make([]byte, 16<<20))) // more than the kernel keeps between two who do not read
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	many := cap(proc.FileTurns) + cap(proc.BriefTurns) + 1
	var unread []*http.Response
	var unsent []*io.PipeWriter
	replies := make(chan int, many)
	for range many {
		resp, err := http.DefaultClient.Do(e.request("GET", "/files/download?path="+q(path), nil).WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		unread = append(unread, resp)
		body, rest := io.Pipe()
		unsent = append(unsent, rest)
		r := e.request("POST", "/directories", body).WithContext(ctx)
		go func() {
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Error(err)
				replies <- 0
				return
			}
			resp.Body.Close()
			replies <- resp.StatusCode
		}()
		rest.Write([]byte("{")) //nolint:errcheck // taken by the client at once
	}
	e.call(http.StatusOK, "GET", "/files/info?path="+q(path), nil)
	e.events(agent.CommandRequest{Command: "seq 100000"}) // more than stays in memory
	for _, rest := range unsent {
		rest.Write([]byte("}")) //nolint:errcheck // the reply tells
		rest.Close()
	}
	for range many {
		if status := <-replies; status != http.StatusOK {
			t.Errorf("a body that came late: status %d", status)
		}
	}
	for _, resp := range unread {
		if n, err := io.Copy(io.Discard, resp.Body); n != 16<<20 || err != nil {
			t.Errorf("a body that was read late has %d bytes, %v", n, err)
		}
	}
}
