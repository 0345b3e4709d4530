package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// secretsKey checks the key that seals vaults and authorities of sandboxes: whether only root can
// read it, and whether it is the one that has sealed what is stored.
var secretsKey = check{
	name: "secrets-key", protects: "secrets of sandboxes, and sandboxes with inspected hosts, which do not start without it", root: true,
	run: func(ctx context.Context, h *host) Finding {
		file, pid := filepath.Join(h.cfg.StateDir, sealed.Credential), h.daemon()
		key, err := sealed.Open(h.credentials(pid), file, false)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fail(fmt.Sprintf("chown root:root %s && chmod 0600 %s, or put back your copy of it, as the error says", file, file),
				"%v", err)
		}
		facts, unknown := h.stored(ctx, pid)
		switch {
		case unknown != nil:
			return skipped("%v", unknown)
		case err != nil && pid == 0 && facts.Secrets == 0:
			return ok("there is none yet, and nothing is sealed: the daemon makes %s when it starts", file)
		case err != nil:
			return fail(fmt.Sprintf("put back your copy of %s, mode 0600; without one, make a new key, (umask 077; openssl rand -hex 32 "+
				">%s), and set the secrets again", file, file), "%s is missing%s", file, sealedBy(facts))
		}
		missing := slices.DeleteFunc(facts.SecretKeys, func(id string) bool { return slices.Contains(key.IDs(), id) })
		if len(missing) > 0 {
			return fail(key.Bring(), "%s has no key %s%s", key.From(), strings.Join(missing, ", "), sealedBy(facts))
		}
		return ok("%s, for root only; it has the keys of all %s", key.From(), errs.Count(facts.Secrets, "secret", "secrets"))
	},
}

// stored is what the state says of secrets. A daemon that runs has it open, and tells by a backup.
func (h *host) stored(ctx context.Context, daemon int) (f store.Facts, err error) {
	state := filepath.Join(h.cfg.StateDir, "sandboxd.db")
	if daemon == 0 {
		if _, err := os.Stat(state); errors.Is(err, fs.ErrNotExist) {
			return f, nil // before the first start
		}
		return store.Examine(state)
	}
	c, err := client.New("unix://"+h.cfg.Listen.Socket, "")
	if err != nil {
		return f, err
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(c.System().Backup(ctx, w)) }()
	m, err := backup.Read(r, io.Discard)
	r.Close()
	if err != nil {
		return f, fmt.Errorf("ask the daemon for what it has sealed: %w", err)
	}
	return m.State, nil
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
