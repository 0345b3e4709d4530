package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Reached is the reply of POST /reach?host=HOST&port=PORT: how far the sandbox came when it
// tried to reach a TCP port of a host.
type Reached struct {
	OK      bool   `json:"ok"`
	Step    string `json:"step"`              // the last one that was tried, one of Step…
	Address string `json:"address,omitempty"` // that was tried
	Error   string `json:"error,omitempty"`   // why it did not get further
}

// The steps on the way to a host.
const (
	StepResolve = "resolve"
	StepConnect = "connect" // on ports other than 80 and 443 the last one
	StepTLS     = "tls"     // on port 443: a handshake that names the host
	StepHTTP    = "http"    // on port 80: a request that names the host
)

// maxReached bounds the reply, in bytes, and maxReachedText each text in it.
const (
	maxReached     = 4 << 10
	maxReachedText = 300
)

// Reach asks the agent behind t to try to reach a port. An agent of an older release
// cannot: then ok is false.
func Reach(ctx context.Context, t http.RoundTripper, host string, port uint16) (got Reached, ok bool, err error) {
	q := url.Values{"host": {host}, "port": {strconv.Itoa(int(port))}}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandbox/reach?"+q.Encode(), http.NoBody)
	if err != nil {
		return got, false, err
	}
	resp, err := t.RoundTrip(r)
	if err != nil {
		return got, false, fmt.Errorf("ask the agent: %w", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxReached))
	if err != nil {
		return got, false, fmt.Errorf("ask the agent: %w", err)
	}
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return got, false, nil
	default:
		return got, false, fmt.Errorf("the agent answered status %d", resp.StatusCode)
	}
	if err := json.Unmarshal(b, &got); err != nil {
		return got, false, fmt.Errorf("the agent's answer: %w", err)
	}
	for _, text := range []*string{&got.Step, &got.Address, &got.Error} {
		*text = strings.ToValidUTF8((*text)[:min(len(*text), maxReachedText)], "")
	}
	return got, true, nil
}
