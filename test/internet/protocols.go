package internet

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/test/internet/bulk"
)

// The hosts that speak protocols, and two that cannot be inspected. All of them are at Shared.
const (
	EchoHost     = "echo.example"     // wants Secret as a Bearer token: see protocols
	MutualHost   = "mutual.example"   // wants a certificate of its client
	StrangerHost = "stranger.example" // has a certificate of its own making
)

// Hangup is the code with which EchoHost closes a WebSocket that asks for it by the text Bye.
const (
	Hangup = 4000
	Bye    = "bye"
)

// protocols serves EchoHost.
func protocols() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(rw, "%s %s\n", r.Proto, r.Method) //nolint:errcheck // the client sees what is missing
	})
	mux.HandleFunc("/echo", echo)
	mux.HandleFunc("/refuse", func(rw http.ResponseWriter, _ *http.Request) { // without a look at the body
		http.Error(rw, "not expected", http.StatusExpectationFailed)
	})
	mux.HandleFunc("/take", func(rw http.ResponseWriter, r *http.Request) {
		n, err := bulk.Check(r.Body)
		fmt.Fprintln(rw, n, err) //nolint:errcheck // as above
	})
	mux.HandleFunc("/give/{n}", func(rw http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
		if err != nil {
			http.Error(rw, err.Error(), http.StatusBadRequest)
			return
		}
		rw.Header().Set("Content-Length", fmt.Sprint(n))
		io.Copy(rw, bulk.Reader(n)) //nolint:errcheck // as above
	})
	mux.HandleFunc("/socket", socket)
	mux.HandleFunc("/test.Echo/", call)
	return wants("Authorization", "Bearer "+Secret, mux)
}

// echo returns what comes while it comes. Behind it, as trailers, are how much that was and
// what the trailer X-Said said.
func echo(rw http.ResponseWriter, r *http.Request) {
	c := http.NewResponseController(rw)
	c.EnableFullDuplex() //nolint:errcheck // HTTP/2 is always
	rw.Header().Set("Trailer", "X-Count")
	if r.Header.Get("Expect") == "" { // else it begins with the answer 100, when the body is read
		c.Flush() //nolint:errcheck // the client sees what is missing
	}
	n := 0
	for b := make([]byte, 32<<10); ; {
		k, err := r.Body.Read(b)
		n += k
		if _, failed := rw.Write(b[:k]); failed != nil || err != nil && !errors.Is(err, io.EOF) {
			panic(http.ErrAbortHandler)
		}
		if err != nil {
			break
		}
		c.Flush() //nolint:errcheck // as above
	}
	rw.Header().Set("X-Count", fmt.Sprint(n))
	rw.Header().Set(http.TrailerPrefix+"X-Said", r.Trailer.Get("X-Said")) // it was not announced
}

// socket returns the messages of a WebSocket.
func socket(rw http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(rw, r, &websocket.AcceptOptions{Subprotocols: []string{"echo"}})
	if err != nil {
		return
	}
	defer c.CloseNow() //nolint:errcheck // the client sees it
	c.SetReadLimit(1 << 20)
	for ctx := context.WithoutCancel(r.Context()); ; {
		kind, b, err := c.Read(ctx)
		switch {
		case err != nil:
			return
		case string(b) == Bye:
			c.Close(Hangup, "as you wish") //nolint:errcheck // as above
			return
		case c.Write(ctx, kind, b) != nil:
			return
		}
	}
}

// call is a method of gRPC in both directions (PROTOCOL-HTTP2.md of grpc/grpc). Talk returns
// each message; others are refused, by trailers and nothing else.
func call(rw http.ResponseWriter, r *http.Request) {
	h := rw.Header()
	h.Set("Content-Type", "application/grpc")
	if r.ProtoMajor != 2 || r.Method != http.MethodPost || r.Header.Get("Te") != "trailers" ||
		!strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		http.Error(rw, "this is no call of gRPC", http.StatusUnsupportedMediaType)
		return
	}
	if r.URL.Path != "/test.Echo/Talk" {
		h.Set("Grpc-Status", "12")
		h.Set("Grpc-Message", "there is no method "+r.URL.Path)
		return
	}
	c := http.NewResponseController(rw)
	c.Flush() //nolint:errcheck // the client sees what is missing
	status := "0"
	for head := make([]byte, 5); ; c.Flush() { //nolint:errcheck // as above
		if _, err := io.ReadFull(r.Body, head); err != nil {
			if !errors.Is(err, io.EOF) {
				status = "13"
			}
			break
		}
		rw.Write(head)                                                 //nolint:errcheck // as above
		io.CopyN(rw, r.Body, int64(binary.BigEndian.Uint32(head[1:]))) //nolint:errcheck // as above
	}
	h.Set(http.TrailerPrefix+"Grpc-Status", status)
}

// forClient is what a server does with the client of MutualHost: nil for others.
func (w *web) forClient(h *tls.ClientHelloInfo) (*tls.Config, error) {
	if h.ServerName != MutualHost {
		return nil, nil
	}
	return &tls.Config{GetCertificate: w.certificate, ClientAuth: tls.RequireAnyClientCert, NextProtos: []string{"h2", "http/1.1"}}, nil
}

// Pin is what curl(1) wants for --pinnedpubkey of any server here.
func (in *Internet) Pin() string {
	key, _ := x509.MarshalPKIXPublicKey(in.web.key.Public()) // of a known kind
	sum := sha256.Sum256(key)
	return "sha256//" + base64.StdEncoding.EncodeToString(sum[:])
}
