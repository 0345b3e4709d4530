package secrets

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Create gives a sandbox its vault, by the body of OpenSandbox's POST /credential-vault. It fails
// with errs.WrongState and ErrOff if the sandbox was made without inspection, with errs.Exists if
// it has a vault, and with errs.Invalid if the body is no vault, or if a binding of it is for a host
// that the network policy of r does not allow. errs.Unavailable: the key is missing.
func (k *Keeper) Create(ctx context.Context, r *record.Record, body []byte) (vault.State, error) {
	return k.create(ctx, r, body, vault.Create)
}

// CreateTrusted is Create for an administrator, whose credentials may come from files and
// commands of the host (vault.CreateTrusted).
func (k *Keeper) CreateTrusted(ctx context.Context, r *record.Record, body []byte) (vault.State, error) {
	return k.create(ctx, r, body, vault.CreateTrusted)
}

type parser func(body []byte) (*vault.Vault, error)

func (k *Keeper) create(ctx context.Context, r *record.Record, body []byte, parse parser) (vault.State, error) {
	return k.change(ctx, r, func(old *vault.Vault, found bool) (*vault.Vault, error) {
		if found {
			return nil, errs.New(errs.Exists, "sandbox %s has a credential vault already; change that, or delete it first", r.ID)
		}
		return parse(body)
	})
}

// Patch changes the vault of a sandbox, by the body of OpenSandbox's PATCH /credential-vault. It
// fails as Create does, with errs.NotFound if there is no vault, and with errs.WrongState if its
// revision is not the one that the body expects.
func (k *Keeper) Patch(ctx context.Context, r *record.Record, body []byte) (vault.State, error) {
	return k.patch(ctx, r, func(v *vault.Vault) (*vault.Vault, error) { return v.Patch(body) })
}

// PatchTrusted is Patch for an administrator, as CreateTrusted is Create.
func (k *Keeper) PatchTrusted(ctx context.Context, r *record.Record, body []byte) (vault.State, error) {
	return k.patch(ctx, r, func(v *vault.Vault) (*vault.Vault, error) { return v.PatchTrusted(body) })
}

func (k *Keeper) patch(ctx context.Context, r *record.Record, edit func(*vault.Vault) (*vault.Vault, error)) (vault.State, error) {
	return k.change(ctx, r, func(old *vault.Vault, found bool) (*vault.Vault, error) {
		if !found {
			return nil, noVault(r.ID)
		}
		return edit(old)
	})
}

// An edit makes a vault of the old one, or of nil if found is false.
type edit func(old *vault.Vault, found bool) (*vault.Vault, error)

// change puts what an edit makes of the vault in its place, and applies it.
func (k *Keeper) change(ctx context.Context, r *record.Record, e edit) (s vault.State, err error) {
	if !r.Spec.Inspect {
		return s, errs.Wrap(ErrOff, errs.WrongState, "sandbox %s was made without inspection of its requests, which a credential vault "+
			"needs: make one with credentialProxy.enabled = true", r.ID)
	}
	unlock, err := k.lock(ctx, r.ID, record.Vault)
	if err != nil {
		return s, err
	}
	defer unlock()
	ctx = context.WithoutCancel(ctx) // what is durable gets applied
	next, err := k.put(ctx, r, e)
	for range 3 { // a key rotation seals anew what is there, without another change
		if !errors.Is(err, errMeanwhile) {
			break
		}
		next, err = k.put(ctx, r, e)
	}
	if err != nil {
		return s, err
	}
	if err := k.apply(ctx, r.ID, fmt.Sprintf("the change of the credential vault of sandbox %s is kept, as revision %d", r.ID,
		next.Revision())); err != nil {
		return s, err
	}
	return next.State(), nil
}

var errMeanwhile = errors.New("the secret was changed meanwhile")

// put makes the change durable.
func (k *Keeper) put(ctx context.Context, r *record.Record, e edit) (*vault.Vault, error) {
	if k.c.Key == nil {
		return nil, k.noKey()
	}
	was, found, err := k.c.Store.Secret(ctx, r.ID, record.Vault)
	if err != nil {
		return nil, err
	}
	var old *vault.Vault
	if found {
		if old, err = k.open(was); err != nil {
			return nil, err
		}
	}
	next, err := e(old, found)
	if err != nil {
		return nil, err
	}
	if err := k.covered(next, r.Spec.Network); err != nil {
		return nil, err
	}
	text := next.Encode()
	v := record.Secret{Sandbox: r.ID, Kind: record.Vault}
	v.Sealed = k.c.Key.Seal(v.Name(), text)
	clear(text)
	err = k.c.Store.PutSecret(ctx, v, was)
	if errs.Is(err, errs.WrongState) {
		return nil, fmt.Errorf("%w: %w", errMeanwhile, err)
	}
	return next, err
}

// Delete removes the vault of a sandbox, also one that does not open. It fails with errs.NotFound
// if there is none. It needs no key.
func (k *Keeper) Delete(ctx context.Context, r *record.Record) error {
	unlock, err := k.lock(ctx, r.ID, record.Vault)
	if err != nil {
		return err
	}
	defer unlock()
	ctx = context.WithoutCancel(ctx)
	err = k.c.Store.DeleteSecret(ctx, r.ID, record.Vault)
	if _, pending := k.isPending(r.ID); pending && errs.Is(err, errs.NotFound) {
		err = nil // a Delete that could not be applied is repeated
	}
	if errs.Is(err, errs.NotFound) {
		return noVault(r.ID)
	}
	if err != nil {
		return err
	}
	return k.apply(ctx, r.ID, fmt.Sprintf("the credential vault of sandbox %s is deleted", r.ID))
}

// Get returns what may be shown of the vault of a sandbox. It fails with errs.NotFound if there is
// none, and with errs.Unavailable if its key is missing.
func (k *Keeper) Get(ctx context.Context, r *record.Record) (vault.State, error) {
	v, err := k.vault(ctx, r.ID)
	if err != nil {
		return vault.State{}, err
	}
	return v.State(), nil
}

// Environment is what the guest of a sandbox has beside its own environment: placeholders, by the
// variables of vault.Credential.Env. It is empty if there is no vault, and fails as Get does.
func (k *Keeper) Environment(ctx context.Context, r *record.Record) (map[string]string, error) {
	v, err := k.vault(ctx, r.ID)
	if errs.Is(err, errs.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, c := range v.Credentials() {
		if c.Env != "" {
			out[c.Env] = c.Placeholder
		}
	}
	return out, nil
}

// CheckPolicy fails with errs.Invalid if the network policy n would not allow a host of the vault
// of r that the present policy allows. One that is denied already, as by a rule of the host that
// is newer than the vault, stops no other change. A vault and a policy that change at the same
// moment may pass both checks: then the policy holds, and the binding does nothing.
func (k *Keeper) CheckPolicy(r *record.Record, n record.Network) error {
	v, err := k.vault(context.Background(), r.ID)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	missing, err := k.lost(v, r.Spec.Network, n)
	if err != nil {
		return err
	}
	return uncovered(missing, "allow it, or change the credential vault first")
}

// lost are the hosts of a vault that the policy now allows and the policy next does not.
func (k *Keeper) lost(v *vault.Vault, now, next record.Network) ([]vault.Uncovered, error) {
	will, err := k.allows(next)
	if err != nil {
		return nil, err
	}
	does, err := k.allows(now)
	if err != nil { // the record is of another sandboxd; next may be to mend that
		does = func(string, uint16) bool { return true }
	}
	return v.Uncovered(func(host string, port uint16) bool { return will(host, port) || !does(host, port) }), nil
}

// covered fails if a policy does not allow a host of a binding that the change which made v has
// added or replaced. Others may have been denied since: a value can be replaced and a binding be
// removed all the same.
func (k *Keeper) covered(v *vault.Vault, n record.Network) error {
	allows, err := k.allows(n)
	if err != nil {
		return err
	}
	missing := slices.DeleteFunc(v.Uncovered(allows), func(m vault.Uncovered) bool { return !m.New })
	return uncovered(missing, "allow it first, or leave it out of the binding")
}

// allows is what the rules of the host, and then a policy, say of a host and its port.
func (k *Keeper) allows(n record.Network) (func(host string, port uint16) bool, error) {
	p, err := policy.Compile(k.c.Host, n)
	if err != nil {
		return nil, err
	}
	return func(host string, port uint16) bool {
		return p.Covers(policy.Flow{Proto: unix.IPPROTO_TCP, Port: port}, host)
	}, nil
}

// uncovered is the error about hosts that are not allowed; nil if there is none.
func uncovered(missing []vault.Uncovered, help string) error {
	if len(missing) == 0 {
		return nil
	}
	var texts []string
	for _, m := range missing[:min(len(missing), 3)] {
		texts = append(texts, fmt.Sprintf("%s:%d of binding %q", m.Host, m.Port, m.Binding))
	}
	if more := len(missing) - len(texts); more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	return errs.New(errs.Invalid, "credential vault: the network policy does not allow %s; %s", strings.Join(texts, ", "), help)
}

// vault opens the vault of a sandbox.
func (k *Keeper) vault(ctx context.Context, id string) (*vault.Vault, error) {
	s, found, err := k.c.Store.Secret(ctx, id, record.Vault)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, noVault(id)
	}
	return k.open(s)
}

// open opens a vault.
func (k *Keeper) open(s record.Secret) (*vault.Vault, error) {
	text, err := k.unseal(s)
	if err != nil {
		return nil, err
	}
	defer clear(text)
	v, err := vault.Decode(text)
	if err != nil {
		return nil, errs.Wrap(err, errs.Internal, "the credential vault of sandbox %s cannot be read; delete it, and set it again",
			s.Sandbox)
	}
	return v, nil
}

func noVault(id string) error {
	return errs.New(errs.NotFound, "sandbox %s has no credential vault", id)
}
