package judge

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Config is what a Judge decides by.
type Config struct {
	Source  netip.Addr // of the sandbox
	Host    policy.Host
	Network record.Network
	Vault   []byte // vault.Encode; empty: rules only
	Mask    bool   // see inject.Options.Mask
}

// rules is the part of a Config that has no values.
type rules struct {
	Source  netip.Addr     `json:"source"`
	Deny    []record.Rule  `json:"deny,omitempty"`  // of the host
	Allow   []record.Rule  `json:"allow,omitempty"` // likewise
	Network record.Network `json:"network"`
	Mask    bool           `json:"mask,omitempty"`
}

// Encode writes c for terminate.Config.Judge: the length of the rules in four bytes, little
// endian, the rules in JSON, and the vault. The values of credentials are in it.
//
// It has no version: the daemon that writes it has started the child that reads it, or speaks
// the same terminate.Version.
func (c Config) Encode() []byte {
	j, err := json.Marshal(rules{c.Source, c.Host.Deny, c.Host.Allow, c.Network, c.Mask})
	if err != nil {
		panic("judge: rules cannot be written as JSON: " + err.Error()) // they are texts, addresses and numbers
	}
	b := make([]byte, 0, 4+len(j)+len(c.Vault))
	return append(append(binary.LittleEndian.AppendUint32(b, uint32(len(j))), j...), c.Vault...)
}

// decode reads what Encode has written. Its errors have nothing of the vault in them.
func decode(b []byte) (c Config, err error) {
	if len(b) < 4 || uint64(len(b)-4) < uint64(binary.LittleEndian.Uint32(b)) {
		return c, errors.New("the configuration is not whole")
	}
	end := 4 + int(binary.LittleEndian.Uint32(b))
	var r rules
	d := json.NewDecoder(bytes.NewReader(b[4:end]))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return c, fmt.Errorf("read the rules of the configuration: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return c, errors.New("the configuration has something behind its rules")
	}
	if !r.Source.Is4() {
		return c, fmt.Errorf("the address of the sandbox is %q in the configuration: want one of IPv4", r.Source)
	}
	return Config{r.Source, policy.Host{Deny: r.Deny, Allow: r.Allow}, r.Network, b[end:], r.Mask}, nil
}
