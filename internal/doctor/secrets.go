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
	run: func(ctx context.Context, h *host) Finding { return h.secretsKey(ctx, h.daemon()) },
}

// secretsKey is the check, beside the daemon with that pid; 0: none runs.
func (h *host) secretsKey(ctx context.Context, pid int) Finding {
	file, dir := filepath.Join(h.cfg.StateDir, sealed.Credential), h.credentials(pid)
	key, err := sealed.Open(dir, file, false)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail(fmt.Sprintf("chown root:root %s && chmod 0600 %s, or put back your copy of it, as the error says", file, file),
			"%v", err)
	}
	facts, read, unknown := h.stored(ctx, pid)
	if unknown != nil {
		return *unknown
	}
	lost := fmt.Sprintf("put back your copy of %s, mode 0600; without one, make a new key, (umask 077; openssl rand -hex 32 >%s), and "+
		"set the secrets again", file, file)
	switch {
	case err != nil && pid == 0 && facts.Secrets == 0:
		return ok("there is none yet, and nothing is sealed: the daemon makes %s when it starts", file)
	case err != nil && pid == 0 && dir == "":
		return warn(fmt.Sprintf("if the service has the key as its credential %s, which no other program sees, start it, and ask "+
			"again; if not, %s", sealed.Credential, lost), "%s is missing%s", file, sealedBy(facts))
	case err != nil:
		return fail(lost, "%s is missing%s", file, sealedBy(facts))
	}
	without := func(ids []string) []string {
		return slices.DeleteFunc(slices.Clone(facts.SecretKeys), func(id string) bool { return slices.Contains(ids, id) })
	}
	if missing := without(key.IDs()); len(missing) > 0 {
		return fail(key.Bring(), "%s has no key %s%s", key.From(), strings.Join(missing, ", "), sealedBy(facts))
	}
	if read != nil && (len(read) == 0 || len(without(read)) > 0) {
		return fail("restart sandboxd, which reads the key when it starts; sandboxes keep running",
			"%s has all keys that are needed, but the daemon, pid %d, started without them", key.From(), pid)
	}
	return ok("%s, for root only; it has the keys of all %s", key.From(), errs.Count(facts.Secrets, "secret", "secrets"))
}

// stored is what the state says of secrets, or a finding that says why nobody knows. A daemon that
// runs has the state open, and tells by a backup; read are the keys that it has, nil if it does not
// say so.
func (h *host) stored(ctx context.Context, daemon int) (f store.Facts, read []string, unknown *Finding) {
	var err error
	if daemon == 0 {
		f, err = store.Examine(filepath.Join(h.cfg.StateDir, "sandboxd.db"))
	} else {
		f, read, err = h.told(ctx)
	}
	switch e, answered := errors.AsType[*errs.Error](err); {
	case err == nil || daemon == 0 && errors.Is(err, fs.ErrNotExist): // before the first start
		return f, read, nil
	case daemon == 0 && !errors.Is(err, store.ErrLocked):
		found := fail("do what the error says, or restore a backup", "%v", err)
		return f, read, &found
	case answered && e.Code == errs.Internal:
		found := fail("look into the log of sandboxd: it says which record cannot be read, and what to do", "%v", err)
		return f, read, &found
	}
	found := skipped("%v", err)
	return f, read, &found
}

// told is what the daemon says of its state and its keys.
func (h *host) told(ctx context.Context) (f store.Facts, read []string, err error) {
	c, err := client.New("unix://"+h.cfg.Listen.Socket, "")
	if err != nil {
		return f, nil, err
	}
	r, w := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		err := c.System().Backup(ctx, w)
		w.CloseWithError(err)
		sent <- err
	}()
	m, err := backup.Read(r, io.Discard)
	r.Close()
	if failed := <-sent; failed != nil && !errors.Is(failed, io.ErrClosedPipe) {
		err = failed
	}
	if err != nil {
		return f, nil, fmt.Errorf("ask the daemon for what it has sealed: %w", err)
	}
	info, err := c.System().Info(ctx)
	if err != nil {
		return f, nil, fmt.Errorf("ask the daemon for its keys: %w", err)
	}
	return m.State, info.SecretKeys, nil
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
