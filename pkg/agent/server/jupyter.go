package server

import (
	"cmp"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// jupyterPort is where images of OpenSandbox's code interpreter run a Jupyter
// server. Its SDKs (1.1 and later) run a command before the first code that
// connects to 127.0.0.1:${JUPYTER_PORT:-44771}, and give up after 30 s.
const jupyterPort = "44771"

// jupyterAddress is where to accept such connections: nowhere if the image or
// the sandbox names a Jupyter server of its own, or JUPYTER_PORT is no port.
func (g *guest) jupyterAddress() string {
	port := cmp.Or(g.env["JUPYTER_PORT"], jupyterPort)
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || g.env["JUPYTER_HOST"] != "" {
		return ""
	}
	return net.JoinHostPort("127.0.0.1", port)
}

// A jupyter is where the agent accepts such connections.
type jupyter struct {
	on bool // else nowhere: it is one port for all
	at string
	ln net.Listener // nil: none
}

// move has it accept connections where a guest's clients look for it.
func (j *jupyter) move(g *guest) (err error) {
	at := g.jupyterAddress()
	if !j.on || j.at == at && j.ln != nil {
		return nil
	}
	if j.ln != nil {
		j.ln.Close()
	}
	j.at = at
	j.ln, err = beReady(at)
	return err
}

// beReady accepts connections of clients that check whether code can be run: it can as
// soon as the agent answers. Every request there gets the same answer, which names the
// right address. The agent tries to listen once, before any code of the guest runs; if
// the port is taken, the program that took it answers.
func beReady(addr string) (net.Listener, error) {
	if addr == "" {
		return nil, nil
	}
	ln, err := listen(addr)
	if err != nil {
		if errors.Is(err, unix.EADDRINUSE) {
			return nil, nil
		}
		return nil, err
	}
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			reply.WriteError(w, reply.Fail(http.StatusNotFound, reply.Unsupported,
				"this is not a Jupyter server: run code with POST /code of the sandbox's agent, port 44772"))
		}),
		ReadHeaderTimeout: 5 * time.Second,
		MaxHeaderBytes:    4 << 10,
		ErrorLog:          log.New(io.Discard, "", 0),
	}
	srv.SetKeepAlivesEnabled(false)
	go proc.Guarded(func() { srv.Serve(ln) }) //nolint:errcheck // it ends with the process
	return ln, nil
}
