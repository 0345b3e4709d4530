package vault

import (
	"maps"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A mutation changes one of the two lists of a vault.
type mutation[T any] struct {
	add, replace []T
	remove       []string
}

// A change is a request to change a vault.
type change struct {
	expected    int64
	expects     bool
	credentials mutation[*Credential]
	bindings    mutation[*Binding]
}

// Patch reads the change of an API client, CredentialVaultMutationRequest of
// api/opensandbox/egress.yaml, and returns the vault that it makes of v, with a revision one
// higher. On an error nothing has changed.
//
// A wrong expectedRevision is errs.WrongState (409). All else is errs.Invalid (400), as in
// OpenSandbox's server, also a name that is to be added and is there, or is to be replaced or
// deleted and is not: that document has 404 for a sandbox without a vault only. A name stands
// in one operation of a patch: to delete it and add it is to replace it.
//
// A client may not bind a credential that the administrator takes from a file or a command: it
// could send the value to a server of its own. That is errs.Denied.
func (v *Vault) Patch(data []byte) (*Vault, error) { return v.patch(data, false) }

// PatchTrusted is Patch for the administrator of the host, as CreateTrusted is Create.
func (v *Vault) PatchTrusted(data []byte) (*Vault, error) { return v.patch(data, true) }

func (v *Vault) patch(data []byte, trusted bool) (*Vault, error) {
	var c change
	err := read(data, func(r *reader) fields {
		return fields{
			"expectedRevision": r.number(&c.expected, &c.expects),
			"credentials": func(at string) error {
				_, err := r.object(at, fields{
					"add": r.credentials(&c.credentials.add, trusted), "replace": r.credentials(&c.credentials.replace, trusted),
					"delete": r.texts(&c.credentials.remove, MaxCredentials),
				})
				return err
			},
			"bindings": func(at string) error {
				_, err := r.object(at, fields{
					"add": r.bindings(&c.bindings.add), "replace": r.bindings(&c.bindings.replace),
					"delete": r.texts(&c.bindings.remove, MaxBindings),
				})
				return err
			},
		}
	})
	if err != nil {
		return nil, err
	}
	return v.changed(c, trusted)
}

// changed returns v with a change.
func (v *Vault) changed(c change, trusted bool) (*Vault, error) {
	if c.expects && c.expected != v.revision {
		return nil, errs.New(errs.WrongState, "credential vault: its revision is %d, not %d as expected; read it again", v.revision,
			c.expected)
	}
	out := &Vault{v.revision + 1, maps.Clone(v.credentials), maps.Clone(v.bindings)}
	for _, new := range slices.Concat(c.credentials.add, c.credentials.replace) {
		new.Revision = out.revision
		if old := v.credentials[new.Name]; old != nil {
			new.Placeholder = old.Placeholder
			if new.keepsEnv {
				new.Env = old.Env
			}
		}
		new.keepsEnv = false
	}
	for _, new := range slices.Concat(c.bindings.add, c.bindings.replace) {
		new.Revision = out.revision
	}
	if err := c.credentials.apply(out.credentials, "credential", func(c *Credential) string { return c.Name }); err != nil {
		return nil, err
	}
	if err := c.bindings.apply(out.bindings, "binding", func(b *Binding) string { return b.Name }); err != nil {
		return nil, err
	}
	if err := out.check(); err != nil {
		return nil, err
	}
	if n := len(out.Encode()); n > MaxEncoded {
		return nil, invalid("", "it has %d bytes as JSON, with escapes; at most %d are allowed", n, MaxEncoded)
	}
	if !trusted {
		for _, b := range slices.Concat(c.bindings.add, c.bindings.replace) {
			for _, name := range b.Uses() {
				if s := out.credentials[name].Source.Type; s != Inline {
					return nil, errs.New(errs.Denied, "credential vault: binding %q uses credential %q, which is a %s of the host: "+
						"only the administrator of the host may bind it", b.Name, name, s)
				}
			}
		}
	}
	return out, nil
}

// apply changes m. what is what m has.
func (c mutation[T]) apply(m map[string]T, what string, nameOf func(T) string) error {
	seen := map[string]bool{}
	once := func(name string, there bool) error {
		_, ok := m[name]
		switch {
		case seen[name]:
			return invalid("", "%s %q stands in the request twice; name it once, and replace what is to be deleted and added", what,
				short(name))
		case there && !ok:
			return invalid("", "the vault has no %s %q to replace or delete; add it", what, short(name))
		case !there && ok:
			return invalid("", "the vault has a %s %q already; replace it", what, short(name))
		}
		seen[name] = true
		return nil
	}
	for _, name := range c.remove {
		if err := once(name, true); err != nil {
			return err
		}
	}
	for _, new := range c.replace {
		if err := once(nameOf(new), true); err != nil {
			return err
		}
	}
	for _, new := range c.add {
		if err := once(nameOf(new), false); err != nil {
			return err
		}
	}
	for _, name := range c.remove {
		delete(m, name)
	}
	for _, new := range slices.Concat(c.replace, c.add) {
		m[nameOf(new)] = new
	}
	return nil
}
