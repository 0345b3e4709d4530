package agent

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// An Adoption is the body of POST /adopt: a running agent becomes that of another sandbox. Without
// Copy it has idled, and is afterwards as one that has booted with the Bootstrap; it must have no
// entrypoint. docs/design/agent.md says what changes and what stays.
type Adoption struct {
	Bootstrap
	// Copy is set if the memory is a copy of that of a sandbox that goes on, or went on. Then what
	// runs goes on, and Entrypoint is not started again.
	Copy *Copy `json:"copy,omitempty"`
}

// A Copy is what makes a copy of a sandbox's memory differ from all others.
type Copy struct {
	Generation string `json:"generation"` // unique for each copy; hex
	MachineID  string `json:"machineId"`  // 32 hex digits, as machine-id(5)
	Seed       []byte `json:"seed"`       // entropy for this copy, from the host
}

// GenerationFile is where a guest reads the Generation of its copy, with a line end. A sandbox
// whose memory is no copy has none.
const GenerationFile = "/run/sandboxd/generation"

const (
	// MaxAdoption bounds the body of POST /adopt, in bytes.
	MaxAdoption = MaxBootstrap + 16<<10
	// MinSeed and MaxSeed bound Copy.Seed, in bytes.
	MinSeed = 32
	MaxSeed = 4 << 10

	maxGeneration = 128
)

// pathAdopt is the route of an Adoption.
const pathAdopt = "/adopt"

// DaemonOnly reports whether a path of the agent is for the daemon itself, and for no client that
// has the token.
func DaemonOnly(p string) bool { return path.Clean("/"+p) == pathAdopt }

// Check says why no agent can take a.
func (a *Adoption) Check() error {
	if err := a.check(); err != nil || a.Copy == nil {
		return err
	}
	c := a.Copy
	switch _, err := hex.DecodeString(c.Generation); {
	case err != nil || c.Generation == "" || len(c.Generation) > maxGeneration:
		return fmt.Errorf("the generation of a copy must be hex, of 2 to %d digits", maxGeneration)
	case len(c.Seed) < MinSeed || len(c.Seed) > MaxSeed:
		return fmt.Errorf("the seed of a copy has %d bytes; want %d to %d", len(c.Seed), MinSeed, MaxSeed)
	}
	if b, err := hex.DecodeString(c.MachineID); err != nil || len(b) != 16 {
		return fmt.Errorf("the machine id of a copy must have 32 hex digits")
	}
	return nil
}

// Adopt has the agent become that of another sandbox, and returns when that is ready, as
// [Client.Ready] does after a boot. It proves itself with the token that c has. Afterwards the
// agent answers to a.Token only, and c goes on with that and its connections, except after the
// adoption of a copy: then c is of no use.
//
// Errors by code: Denied, the agent has another token; WrongState, it cannot become that one now;
// Unsupported, it never can: it is of an older release, or its host name cannot be changed from
// inside. After each of these nothing has changed. After any other error the agent may have changed
// or have ended; the token that it takes says which.
func (c *Client) Adopt(ctx context.Context, a Adoption) error {
	a.Protocol = cmp.Or(a.Protocol, Protocol)
	if err := a.Check(); err != nil {
		return fmt.Errorf("adopt: %w", err)
	}
	b, err := json.Marshal(a)
	if err != nil {
		return fmt.Errorf("adopt: encode: %w", err)
	}
	if len(b) > MaxAdoption {
		return fmt.Errorf("adopt: the bootstrap has %d bytes; at most %d are allowed: use fewer or shorter environment variables",
			len(b), MaxAdoption)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandbox"+pathAdopt, bytes.NewReader(b))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := c.RoundTripper().RoundTrip(r)
	if err != nil {
		return fmt.Errorf("adopt: ask the agent: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if err != nil {
		return fmt.Errorf("adopt: the agent's answer: %w", brief(err))
	}
	switch {
	case resp.StatusCode == http.StatusOK && a.Copy == nil:
		c.token.Store(&a.Token)
		return nil
	case resp.StatusCode == http.StatusOK:
		c.Close()
		return nil
	}
	return refusedAdoption(resp.StatusCode, text)
}

// refusedAdoption is the error of an answer. Its text is hostile, as all that an agent says.
func refusedAdoption(status int, body []byte) error {
	var e Error
	if json.Unmarshal(body, &e) != nil || e.Message == "" {
		e.Message = fmt.Sprintf("status %d", status)
	}
	e.Message = printable(e.Message, maxError)
	switch status {
	case http.StatusUnauthorized:
		return errs.New(errs.Denied, "the agent refused its token: it is that of another sandbox")
	case http.StatusNotFound, http.StatusMethodNotAllowed:
		return errs.New(errs.Unsupported, "the agent of this sandbox is of an older release and cannot become that of another: "+
			"only sandboxes that this release has started can be claimed or forked")
	case http.StatusConflict:
		return errs.New(errs.WrongState, "%s", e.Message)
	case http.StatusNotImplemented:
		return errs.New(errs.Unsupported, "%s", e.Message)
	}
	return fmt.Errorf("adopt: the agent answers %d: %s", status, e.Message)
}
