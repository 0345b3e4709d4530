package vault

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"time"
)

// storedVersion is that of the storage form.
const storedVersion = 1

// The storage form, with values. Only its version is read by other versions.
type stored struct {
	Version     int                `json:"version"`
	Revision    int64              `json:"revision"`
	Credentials []storedCredential `json:"credentials"`
	Bindings    []storedBinding    `json:"bindings"`
}

type storedCredential struct {
	Name        string        `json:"name"`
	Placeholder string        `json:"placeholder"`
	Env         string        `json:"env,omitempty"`
	Revision    int64         `json:"revision"`
	Type        SourceType    `json:"type"`
	Value       string        `json:"value,omitempty"`
	Path        string        `json:"path,omitempty"`
	Argv        []string      `json:"argv,omitempty"`
	Cache       time.Duration `json:"cache,omitempty"`
}

type storedBinding struct {
	Name     string `json:"name"`
	Revision int64  `json:"revision"`
	Match    Match  `json:"match"`
	Auth     Auth   `json:"auth"`
}

// Encode returns the vault with its values, to be sealed by the caller: it must be written
// nowhere as it is. The same vault has the same bytes.
func (v *Vault) Encode() []byte {
	out := stored{Version: storedVersion, Revision: v.revision}
	for _, c := range v.Credentials() {
		s := c.Source
		out.Credentials = append(out.Credentials, storedCredential{
			c.Name, c.Placeholder, c.Env, c.Revision, s.Type, s.Value.Reveal(), s.Path, s.Argv, s.Cache,
		})
	}
	for _, b := range v.Bindings() {
		out.Bindings = append(out.Bindings, storedBinding{b.Name, b.Revision, b.Match, b.Auth})
	}
	data, err := json.Marshal(out)
	if err != nil {
		panic("vault: a struct of strings cannot be written as JSON") // the error could quote a value
	}
	return data
}

var placeholderForm = regexp.MustCompile("^" + PlaceholderPrefix + "[A-Z2-7]{26}$")

// Decode reads what Encode has written, and checks it as a client's, but for what older releases
// took. Its errors contain no value.
func Decode(data []byte) (*Vault, error) {
	var version struct {
		Version int `json:"version"`
	}
	if json.Unmarshal(data, &version) != nil {
		return nil, errors.New("stored credential vault: it is not JSON")
	}
	if version.Version != storedVersion {
		return nil, fmt.Errorf("stored credential vault: version %d; this sandboxd reads version %d", version.Version, storedVersion)
	}
	var in stored
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if d.Decode(&in) != nil {
		return nil, fmt.Errorf("stored credential vault: it is not in the form of version %d", storedVersion)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("stored credential vault: there is data after it")
	}
	v := &Vault{in.Revision, map[string]*Credential{}, map[string]*Binding{}}
	drawn := map[string]bool{}
	for i, s := range in.Credentials {
		at := fmt.Sprintf("credentials[%d]", i)
		c := &Credential{s.Name, Source{s.Type, NewSecret(s.Value), s.Path, s.Argv, s.Cache}, s.Placeholder, s.Env, s.Revision, false}
		if err := errors.Join(checkName(at, c.Name), checkStoredEnv(at, c.Env), c.Source.check(at)); err != nil {
			return nil, fmt.Errorf("stored %w", err)
		}
		if v.credentials[s.Name] != nil || drawn[s.Placeholder] || !placeholderForm.MatchString(s.Placeholder) ||
			!revised(s.Revision, v.revision) || s.Cache < 0 || s.Cache > MaxCache ||
			s.Type != Inline && s.Type != File && s.Type != Command {
			return nil, fmt.Errorf("stored credential vault: %s: its name or placeholder is not its own, its type is unknown, or a number "+
				"is out of range", at)
		}
		v.credentials[s.Name], drawn[s.Placeholder] = c, true
	}
	for i, s := range in.Bindings {
		at := fmt.Sprintf("bindings[%d]", i)
		b := &Binding{Name: s.Name, Match: s.Match, Auth: s.Auth, Revision: s.Revision}
		if err := errors.Join(checkName(at, b.Name), b.Match.normalize(at), b.Auth.normalize(at), b.compile(at)); err != nil {
			return nil, fmt.Errorf("stored %w", err)
		}
		if v.bindings[s.Name] != nil || !revised(s.Revision, v.revision) || !b.Auth.shaped() {
			return nil, fmt.Errorf("stored credential vault: %s: its name is not its own, its revision is out of range, or its headers "+
				"are not those of its type", at)
		}
		v.bindings[s.Name] = b
	}
	if err := v.check(); err != nil {
		return nil, fmt.Errorf("stored %w", err)
	}
	return v, nil
}

func revised(part, whole int64) bool { return 1 <= part && part <= whole }

// shaped reports whether an auth has as many headers as its type.
func (a *Auth) shaped() bool {
	switch n := len(a.Headers); a.Type {
	case Bearer, Basic:
		return n == 1 && a.Headers[0].Name == "Authorization"
	case APIKey:
		return n == 1
	case CustomHeaders:
		return n > 0
	case Passthrough:
		return n == 0
	}
	return false
}
