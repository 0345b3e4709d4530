package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/test/internet/bulk"
)

// sayings are what is said to the server EchoHost of test/internet, each in one request.
var sayings = []struct {
	name     string
	versions []string // of HTTP: "1" or "2"
	say      func(ctx context.Context, c *http.Client, url string) error
}{
	{"hello", []string{"1", "2"}, hello},
	{"stream", []string{"1", "2"}, stream},
	{"both-ways", []string{"1", "2"}, bothWays},
	{"expect", []string{"1", "2"}, expect},
	{"unexpected", []string{"1", "2"}, unexpected},
	{"trailers", []string{"1", "2"}, trailers},
	{"websocket", []string{"1"}, socket},
	{"grpc", []string{"2"}, talk},
	{"grpc-refused", []string{"2"}, noMethod},
}

// answer is a whole answer.
func answer(resp *http.Response, err error) (string, *http.Response, error) {
	if err != nil {
		return "", nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), resp, err
}

// hello: the server is spoken to in the version that the client speaks.
func hello(ctx context.Context, c *http.Client, url string) error {
	body, resp, err := answer(do(ctx, c, http.MethodGet, url+"/hello", nil))
	if err == nil && body != resp.Proto+" GET\n" {
		err = fmt.Errorf("%s %q by %s", resp.Status, body, resp.Proto)
	}
	return err
}

// stream sends a line when it has the answer to the one before.
func stream(ctx context.Context, c *http.Client, url string) error {
	out, in := io.Pipe()
	defer in.Close()
	resp, err := do(ctx, c, http.MethodPost, url+"/echo", out)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	r := bufio.NewReader(resp.Body)
	for i := range 20 {
		said := fmt.Sprintf("line %d\n", i)
		io.WriteString(in, said) //nolint:errcheck // the answer says
		if got, err := r.ReadString('\n'); err != nil || got != said {
			return fmt.Errorf("%q came back as %q, %v", said, got, err)
		}
	}
	in.Close() //nolint:errcheck // it has no error
	if rest, err := io.ReadAll(r); err != nil || len(rest) > 0 {
		return fmt.Errorf("behind the lines is %q, %v", rest, err)
	}
	return nil
}

// bothWays sends and reads a body at the same time.
func bothWays(ctx context.Context, c *http.Client, url string) error {
	const size = 2 << 20
	resp, err := do(ctx, c, http.MethodPost, url+"/echo", bulk.Reader(size))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if n, err := bulk.Check(resp.Body); err != nil || n != size {
		return fmt.Errorf("%s with %d bytes of %d: %w", resp.Status, n, size, err)
	}
	return nil
}

// expect: the server says that it wants the body.
func expect(ctx context.Context, c *http.Client, url string) error {
	asked := false
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got100Continue: func() { asked = true }})
	body, resp, err := answer(do(ctx, c, http.MethodPost, url+"/echo", strings.NewReader("words"), "Expect", "100-continue"))
	if err == nil && (body != "words" || !asked) {
		err = fmt.Errorf("%s %q; asked for the body: %t", resp.Status, body, asked)
	}
	return err
}

// unexpected: the server says that it does not.
func unexpected(ctx context.Context, c *http.Client, url string) error {
	body, resp, err := answer(do(ctx, c, http.MethodPost, url+"/refuse", strings.NewReader("words"), "Expect", "100-continue"))
	if err == nil && (resp.StatusCode != http.StatusExpectationFailed || body != "not expected\n") {
		err = fmt.Errorf("%s %q", resp.Status, body)
	}
	return err
}

// trailers: behind the bodies of both sides.
func trailers(ctx context.Context, c *http.Client, url string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/echo", io.MultiReader(strings.NewReader("words")))
	if err != nil {
		return err
	}
	r.Trailer = http.Header{"X-Said": {"at the end"}}
	body, resp, err := answer(c.Do(r))
	if err == nil && (body != "words" || resp.Trailer.Get("X-Said") != "at the end" || resp.Trailer.Get("X-Count") != "5") {
		err = fmt.Errorf("%s %q with the trailers %v", resp.Status, body, resp.Trailer)
	}
	return err
}

// socket sends messages of a WebSocket, and has the server close it.
func socket(ctx context.Context, c *http.Client, url string) error {
	ws, _, err := websocket.Dial(ctx, url+"/socket", &websocket.DialOptions{HTTPClient: c, Subprotocols: []string{"none", "echo"}})
	if err != nil {
		return err
	}
	defer ws.CloseNow() //nolint:errcheck // the end
	if ws.Subprotocol() != "echo" {
		return fmt.Errorf("it speaks %q", ws.Subprotocol())
	}
	ws.SetReadLimit(1 << 20)
	large, err := io.ReadAll(bulk.Reader(200_000))
	if err != nil {
		return err
	}
	for _, m := range []struct {
		kind websocket.MessageType
		body []byte
	}{
		{websocket.MessageText, []byte("a text")},
		{websocket.MessageBinary, []byte{0, 0xff, '\n', 0}},
		{websocket.MessageText, nil},
		{websocket.MessageBinary, large},
		{websocket.MessageText, []byte("another one")},
	} {
		if err := ws.Write(ctx, m.kind, m.body); err != nil {
			return err
		}
		if kind, got, err := ws.Read(ctx); err != nil || kind != m.kind || !bytes.Equal(got, m.body) {
			return fmt.Errorf("%s of %d bytes came back as %s of %d: %w", m.kind, len(m.body), kind, len(got), err)
		}
	}
	if err := ws.Write(ctx, websocket.MessageText, []byte("bye")); err != nil {
		return err
	}
	if _, _, err = ws.Read(ctx); websocket.CloseStatus(err) != 4000 || !strings.Contains(err.Error(), "as you wish") {
		return fmt.Errorf("it was closed otherwise: %w", err)
	}
	return nil
}

// A call of gRPC: messages with a head of five bytes, and the status in the trailers.
func rpc(ctx context.Context, c *http.Client, url string, body io.Reader) (*http.Response, error) {
	return do(ctx, c, http.MethodPost, url, body, "Content-Type", "application/grpc+proto", "Te", "trailers")
}

// talk sends a message when it has the answer to the one before.
func talk(ctx context.Context, c *http.Client, url string) error {
	out, in := io.Pipe()
	defer in.Close()
	resp, err := rpc(ctx, c, url+"/test.Echo/Talk", out)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for i := range 20 {
		size := i
		if i == 10 {
			size = 100_000
		}
		said := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(size)), bytes.Repeat([]byte{byte(i)}, size)...)
		go in.Write(said) //nolint:errcheck // the answer says
		got := make([]byte, len(said))
		if _, err := io.ReadFull(resp.Body, got); err != nil || !bytes.Equal(got, said) {
			return fmt.Errorf("message %d: %w", i, err)
		}
	}
	in.Close() //nolint:errcheck // it has no error
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 || resp.Trailer.Get("Grpc-Status") != "0" {
		return fmt.Errorf("%d bytes, trailers %v, %w", len(rest), resp.Trailer, err)
	}
	return nil
}

// noMethod: a call that is refused has no body, and its status is where the header is.
func noMethod(ctx context.Context, c *http.Client, url string) error {
	body, resp, err := answer(rpc(ctx, c, url+"/test.Echo/Sing", nil))
	if err == nil && (body != "" || resp.Header.Get("Grpc-Status") != "12" || !strings.Contains(resp.Header.Get("Grpc-Message"), "Sing")) {
		err = fmt.Errorf("%s %q, %v", resp.Status, body, resp.Header)
	}
	return err
}
