package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// secretsKey checks the key that seals vaults and authorities of sandboxes: whether only root can
// read it, and whether it is the one that has sealed what is stored. While a daemon runs, nobody
// else can open the state; that daemon has tried its secrets when it started.
var secretsKey = check{
	name: "secrets-key", protects: "secrets of sandboxes, and sandboxes with inspected hosts, which do not start without it", root: true,
	run: func(_ context.Context, h *host) Finding {
		file := filepath.Join(h.cfg.StateDir, sealed.Credential)
		pid := h.daemon()
		facts, err := h.stored(pid)
		if err != nil {
			return skipped("%v", err)
		}
		key, err := sealed.Open(h.credentials(pid), file, false)
		switch {
		case errors.Is(err, fs.ErrNotExist) && pid == 0 && facts.Secrets == 0:
			return ok("there is none yet, and nothing is sealed: the daemon makes %s when it starts", file)
		case errors.Is(err, fs.ErrNotExist):
			return fail(fmt.Sprintf("put back your copy of %s, mode 0600; without one, make a new key, (umask 077; openssl rand -hex 32 "+
				">%s), and set the secrets again", file, file), "%s is missing%s", file, sealedBy(facts))
		case err != nil:
			return fail(fmt.Sprintf("chown root:root %s && chmod 0600 %s, or put back your copy of it, as the error says", file, file),
				"%v", err)
		}
		missing := slices.DeleteFunc(facts.SecretKeys, func(id string) bool { return slices.Contains(key.IDs(), id) })
		switch {
		case len(missing) > 0:
			return fail(key.Bring(), "%s has no key %s%s", key.From(), strings.Join(missing, ", "), sealedBy(facts))
		case pid != 0:
			return ok("%s, for root only; the log of the daemon that runs names the secrets that it does not open", key.From())
		}
		return ok("%s, for root only; it has the keys of all %s", key.From(), errs.Count(facts.Secrets, "secret", "secrets"))
	},
}

// stored is what the state says of secrets: nothing while a daemon has it open, or before the first.
func (h *host) stored(daemon int) (store.Facts, error) {
	state := filepath.Join(h.cfg.StateDir, "sandboxd.db")
	if _, err := os.Stat(state); daemon != 0 || errors.Is(err, fs.ErrNotExist) {
		return store.Facts{}, nil
	}
	return store.Examine(state)
}

// sealedBy says that the state needs a key.
func sealedBy(f store.Facts) string {
	if f.Secrets == 0 {
		return ""
	}
	return fmt.Sprintf(", and the state has %s, which nothing else opens", errs.Count(f.Secrets, "secret", "secrets"))
}

// credentials is the directory of the service's credentials (systemd.exec(5)): that of the daemon
// which runs, or this process's own.
func (h *host) credentials(daemon int) string {
	if daemon == 0 {
		return os.Getenv("CREDENTIALS_DIRECTORY")
	}
	for kv := range strings.SplitSeq(h.read(fmt.Sprintf("/proc/%d/environ", daemon)), "\x00") {
		if dir, ok := strings.CutPrefix(kv, "CREDENTIALS_DIRECTORY="); ok {
			return dir
		}
	}
	return ""
}
