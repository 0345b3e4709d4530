package client

import (
	"context"
	"errors"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Vault is the credential vault of a sandbox. No answer has the value of a credential.
type Vault struct{ sandbox }

const vaultPath = "/credential-vault"

// Get returns the vault. See NoVault for a sandbox without one.
func (c Vault) Get(ctx context.Context) (wire.CredentialVault, error) {
	return ask[wire.CredentialVault](ctx, c.daemon, get(c.path(vaultPath)))
}

// Create makes the vault. If there is one, it fails with errs.Exists. A sandbox that was created
// without CredentialProxy gets none: errs.WrongState.
func (c Vault) Create(ctx context.Context, r wire.CredentialVaultRequest) (wire.CredentialVault, error) {
	return ask[wire.CredentialVault](ctx, c.daemon, request{method: http.MethodPost, path: c.path(vaultPath), json: r})
}

// Patch changes the vault: all of it holds for the next request of the sandbox, or nothing. If
// the vault has another revision than is expected, it fails with errs.WrongState.
func (c Vault) Patch(ctx context.Context, p wire.CredentialVaultPatch) (wire.CredentialVault, error) {
	return ask[wire.CredentialVault](ctx, c.daemon, request{method: http.MethodPatch, path: c.path(vaultPath), json: p})
}

// Delete removes the vault.
func (c Vault) Delete(ctx context.Context) error {
	return c.do(ctx, request{method: http.MethodDelete, path: c.path(vaultPath)}, nil)
}

// NoVault reports whether err says that a sandbox, which there is, has no vault.
func NoVault(err error) bool {
	e, ok := errors.AsType[*errs.Error](err)
	return ok && e.Wire == wire.CodeNoVault
}
