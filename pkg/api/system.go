package api

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// systemHandlers serve the routes about the daemon and its host.
type systemHandlers struct {
	known    System        // may be nil
	impaired func() string // see Config; may be nil
	release  wire.Version
	document []byte // of /openapi.json
	page     []byte // of /docs
	guard    *auth.Guard
	pruner
}

// system is what knows the host, or the refusal of a daemon without one.
func (s *systemHandlers) system() (System, error) {
	if s.known == nil {
		return nil, httperr.New(http.StatusNotImplemented, "GENERAL::NOT_IMPLEMENTED", errs.Unsupported,
			"this daemon was built without access to its host")
	}
	return s.known, nil
}

// health answers everybody; impaired names a fault that does not keep the daemon from
// serving.
func (s *systemHandlers) health(w http.ResponseWriter, _ *http.Request) error {
	answer := map[string]string{"status": "healthy"}
	if f := s.impaired; f != nil {
		if text := f(); text != "" {
			answer["warning"] = text
		}
	}
	writeJSON(w, http.StatusOK, answer)
	return nil
}

// version answers everybody; without a key it is the release alone.
func (s *systemHandlers) version(w http.ResponseWriter, r *http.Request) error {
	v := s.release
	if infoOf(r).role == "" {
		if s.guard.Keyless() { // a page asks
			return s.guard.Unauthorized(r)
		}
		v = wire.Version{Version: v.Version}
	}
	writeJSON(w, http.StatusOK, v)
	return nil
}

func (s *systemHandlers) openAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/json")
	w.Write(s.document) //nolint:errcheck // a client that left needs no answer
	return nil
}

// start says to somebody who came by a browser, or by hand, where they are.
func (s *systemHandlers) start(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	writeText(w, http.StatusOK, `This is sandboxd, which runs sandboxes on this host. It serves OpenSandbox's API, here and below /v1.

/docs           the API, for people, with an example for each route
/openapi.json   the API, for programs

From a shell: sandboxctl -H ADDRESS ps, with a key of this daemon in $OPEN_SANDBOX_API_KEY.`)
	return nil
}

// docs serves a page that shows the API. It loads nothing and runs nothing, and
// says so: guests serve pages under this address, too.
func (s *systemHandlers) docs(w http.ResponseWriter, _ *http.Request) error {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(len(s.page)))
	h.Set("Content-Security-Policy", "default-src 'none'; style-src "+styleOf(s.page)+
		"; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	w.Write(s.page) //nolint:errcheck // a client that left needs no answer
	return nil
}

// styleOf names the style sheet in a page as a policy does, by its digest: a browser then
// takes no other. (CSP Level 3, §2.3.1)
func styleOf(page []byte) string {
	_, rest, _ := bytes.Cut(page, []byte("<style>"))
	sheet, _, ok := bytes.Cut(rest, []byte("</style>"))
	if !ok {
		return "'none'"
	}
	sum := sha256.Sum256(sheet)
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

func (s *systemHandlers) info(w http.ResponseWriter, r *http.Request) error {
	sys, err := s.system()
	if err != nil {
		return err
	}
	info, err := sys.Info(r.Context())
	if err != nil {
		return fmt.Errorf("read system information: %w", err)
	}
	info.Version = s.release
	writeJSON(w, http.StatusOK, info)
	return nil
}

func (s *systemHandlers) df(w http.ResponseWriter, r *http.Request) error {
	sys, err := s.system()
	if err != nil {
		return err
	}
	df, err := sys.DiskUsage(r.Context())
	if err != nil {
		return fmt.Errorf("measure disks: %w", err)
	}
	writeJSON(w, http.StatusOK, df)
	return nil
}

// A pruner removes what nobody uses.
type pruner struct {
	sandboxes Sandboxes
	snapshots Snapshots
	images    Images
}

// prune removes what has ended, failed or is not used, of all clients. It goes on after an
// error. No volume goes, also with ?volumes=true: as in docker that means those without a name,
// and all volumes of sandboxd have one.
func (s *systemHandlers) prune(w http.ResponseWriter, r *http.Request) error {
	sys, err := s.system()
	if err != nil {
		return err
	}
	q := r.URL.Query()
	all, aerr := spec.ParseBool(cmp.Or(q.Get("all"), "false"))
	_, verr := spec.ParseBool(cmp.Or(q.Get("volumes"), "false"))
	var before time.Time
	if v := q.Get("until"); v != "" {
		before, err = spec.ParseTime(v)
	}
	switch {
	case aerr != nil || verr != nil:
		return httperr.Invalid("all and volumes: want true or false")
	case err != nil:
		return httperr.Invalid("until %q: want a time such as 2030-01-02T15:04:05Z", httperr.Clip(q.Get("until"), 60))
	}
	ctx := context.WithoutCancel(r.Context()) // a client that hangs up has still asked for it
	df, err := sys.DiskUsage(ctx)
	if err != nil {
		return fmt.Errorf("measure disks: %w", err)
	}
	out := wire.SystemPruneReport{Sandboxes: []string{}, Snapshots: []string{}, Volumes: []string{}}
	err = errors.Join(s.pruneSandboxes(ctx, before, &out), s.pruneSnapshots(ctx, before, &out))
	for _, d := range df.Sandboxes {
		if slices.Contains(out.Sandboxes, d.ID) {
			out.BytesReclaimed += d.Bytes
		}
	}
	p, perr := s.images.Prune(ctx, all, before) // last: what is removed by now needs no layers
	if err = errors.Join(err, perr); err != nil {
		return fmt.Errorf("prune: %w", err)
	}
	out.Images, out.Layers = append([]string{}, p.Images...), append([]string{}, p.Layers...)
	out.BytesReclaimed += p.Bytes
	writeJSON(w, http.StatusOK, out)
	return nil
}

// pruneSandboxes removes what has ended, and was created before a time if that is not zero.
func (p *pruner) pruneSandboxes(ctx context.Context, before time.Time, out *wire.SystemPruneReport) error {
	list, err := p.sandboxes.List(ctx)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(r *record.Record) bool {
		return r.State != record.Ended || !before.IsZero() && !r.Created.Before(before)
	})
	deleted, failed := make([]bool, len(list)), make([]error, len(list))
	var g errgroup.Group
	g.SetLimit(prunedAtOnce)
	for i, r := range list {
		g.Go(func() error {
			deleted[i], failed[i] = p.sandboxes.DeleteEnded(ctx, r.ID)
			return nil
		})
	}
	g.Wait() //nolint:errcheck // each has its own
	for i, r := range list {
		if deleted[i] {
			out.Sandboxes = append(out.Sandboxes, r.ID)
		}
	}
	return errors.Join(failed...)
}

// prunedAtOnce bounds how many sandboxes are deleted at the same time: each is a commit of the store
// and a subvolume, and there may be a thousand.
const prunedAtOnce = 8

// pruneSnapshots removes the snapshots that failed.
func (p *pruner) pruneSnapshots(ctx context.Context, before time.Time, out *wire.SystemPruneReport) error {
	list, err := p.snapshots.List(ctx)
	if err != nil {
		return err
	}
	var failed []error
	for _, s := range list {
		if s.State != record.SnapshotFailed || !before.IsZero() && !s.Created.Before(before) {
			continue
		}
		if err := p.snapshots.Delete(ctx, s.ID); err == nil {
			out.Snapshots = append(out.Snapshots, s.ID)
		} else if !errs.Is(err, errs.NotFound) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// drain is for the person who runs the host: a client with a key should not be able to
// shut out all others.
func (s *systemHandlers) drain(on bool) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if err := onTheHost(r, "a host is drained by its administrator, so this request is accepted"); err != nil {
			return err
		}
		sys, err := s.system()
		if err != nil {
			return err
		}
		if err := sys.Drain(r.Context(), on); err != nil {
			return fmt.Errorf("drain: %w", err)
		}
		writeEmpty(w, http.StatusNoContent)
		return nil
	}
}

// onTheHost refuses requests that do not come by the Unix socket. why is the beginning
// of the sentence that says so.
func onTheHost(r *http.Request, why string) error {
	if auth.PeerOf(r).Unix {
		return nil
	}
	return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
		"%s over the Unix socket only: set SANDBOXD_HOST=%s on the host itself", why, "unix:///run/sandboxd/sandboxd.sock")
}

// backup sends the state. An API key opens every sandbox; the state also has their
// environments, which are keys to other things. So only users of the Unix socket get
// it, who are root in all but name.
func (s *systemHandlers) backup(w http.ResponseWriter, r *http.Request) error {
	if err := onTheHost(r, "a backup contains the environment and the tokens of every sandbox, so it is sent"); err != nil {
		return err
	}
	sys, err := s.system()
	if err != nil {
		return err
	}
	f, err := sys.Backup(r.Context())
	if err != nil {
		return fmt.Errorf("back up the state: %w", err)
	}
	defer f.Close() //nolint:errcheck // read only
	h := w.Header()
	h.Set("Content-Type", "application/gzip")
	if st, ok := f.(interface{ Stat() (fs.FileInfo, error) }); ok {
		if fi, err := st.Stat(); err == nil {
			h.Set("Content-Length", strconv.FormatInt(fi.Size(), 10)) // so that a client notices a backup that was cut short
		}
	}
	w.WriteHeader(http.StatusOK)
	if _, err := io.Copy(w, f); err != nil && r.Context().Err() == nil {
		return errors.Join(errors.New("send the backup"), err)
	}
	return nil
}

// backupHandlers serve the routes about the backups on the target of the configuration.
type backupHandlers struct {
	known Backups // may be nil
}

func (b *backupHandlers) backups() (Backups, error) {
	if b.known == nil {
		return nil, errs.New(errs.Unsupported, "this daemon was built without backups on a timer")
	}
	return b.known, nil
}

func (b *backupHandlers) list(w http.ResponseWriter, r *http.Request) error {
	return answerOf(w, b, http.StatusOK, func(k Backups) (wire.BackupList, error) {
		all, err := k.List(r.Context())
		return wire.BackupList{Items: append([]wire.Backup{}, all...)}, err
	})
}

func (b *backupHandlers) status(w http.ResponseWriter, _ *http.Request) error {
	return answerOf(w, b, http.StatusOK, Backups.Status)
}

// now takes a backup. A client that hangs up has still asked for it.
func (b *backupHandlers) now(w http.ResponseWriter, r *http.Request) error {
	return answerOf(w, b, http.StatusCreated, func(k Backups) (wire.Backup, error) { return k.Now(context.WithoutCancel(r.Context())) })
}

// drill tries to restore the newest backup.
func (b *backupHandlers) drill(w http.ResponseWriter, r *http.Request) error {
	return answerOf(w, b, http.StatusOK, func(k Backups) (wire.BackupDrill, error) { return k.Drill(context.WithoutCancel(r.Context())) })
}

// adopt makes backups of other states count.
func (b *backupHandlers) adopt(w http.ResponseWriter, r *http.Request) error {
	var req wire.AdoptBackups
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if req.All == (len(req.Names) > 0) {
		return errs.New(errs.Invalid, "adopt: want either the names of backups, or all")
	}
	return answerOf(w, b, http.StatusOK, func(k Backups) (wire.BackupList, error) {
		all, err := k.Adopt(r.Context(), req.Names)
		return wire.BackupList{Items: append([]wire.Backup{}, all...)}, err
	})
}

// remove removes backups that count.
func (b *backupHandlers) remove(w http.ResponseWriter, r *http.Request) error {
	var req wire.RemoveBackups
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if len(req.Names) == 0 {
		return errs.New(errs.Invalid, "remove: want the names of backups")
	}
	return answerOf(w, b, http.StatusOK, func(k Backups) (wire.RemovedBackups, error) { return k.Remove(r.Context(), req.Names) })
}

// check reads backups. It streams what it finds, one JSON object a line; the last has the report or the error.
// An error before the first line is an answer with a status of its own. A client that leaves ends the check.
func (b *backupHandlers) check(w http.ResponseWriter, r *http.Request) error {
	var req wire.CheckBackups
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if req.All == (len(req.Names) > 0) {
		return errs.New(errs.Invalid, "check: want either the names of backups, or all")
	}
	k, err := b.backups()
	if err != nil {
		return err
	}
	rc := http.NewResponseController(w)
	var said time.Time
	line := func(l wire.BackupCheckLine) {
		if l.Progress != nil {
			if time.Since(said) < reportEvery {
				return
			}
			said = time.Now()
		}
		w.Header().Set("Content-Type", "application/x-ndjson")
		if text, err := json.Marshal(l); err == nil {
			w.Write(append(text, '\n')) //nolint:errcheck // if the client has left, the context ends
			rc.Flush()                  //nolint:errcheck // see above
		}
	}
	report, err := k.Check(r.Context(), req.Names, line)
	switch {
	case err == nil:
		line(wire.BackupCheckLine{Report: &report})
	case !infoOf(r).wrote:
		return err
	default:
		infoOf(r).err = err
		_, body := httperr.Body(err, infoOf(r).requestID)
		line(wire.BackupCheckLine{Error: &body})
	}
	return nil
}

// answerOf answers with what ask returns.
func answerOf[T any](w http.ResponseWriter, b *backupHandlers, status int, ask func(Backups) (T, error)) error {
	k, err := b.backups()
	if err != nil {
		return err
	}
	v, err := ask(k)
	if err != nil {
		return err
	}
	writeJSON(w, status, v)
	return nil
}

// keyHandlers list, make and remove API keys.
type keyHandlers struct {
	guard *auth.Guard
}

func (h *keyHandlers) list(w http.ResponseWriter, _ *http.Request) error {
	out := wire.KeyList{Items: []wire.Key{}}
	for _, k := range h.guard.Keys() {
		out.Items = append(out.Items, toWireKey(k))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func toWireKey(k record.Key) wire.Key {
	source := wire.KeyOfStore
	if strings.HasPrefix(k.Name, auth.FixedPrefix) {
		source = wire.KeyOfConfiguration
	}
	return wire.Key{
		Name: k.Name, Role: cmp.Or(string(k.Role), "none"), Source: source, CreatedAt: spec.Moment(k.Created),
		ExpiresAt: spec.Moment(k.Expires),
	}
}

// create makes a key. Its answer is the only place that ever has the secret.
func (h *keyHandlers) create(w http.ResponseWriter, r *http.Request) error {
	var req wire.KeyRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	role := record.Role(cmp.Or(req.Role, string(record.Operator)))
	switch {
	case !h.guard.KeepsKeys():
		return errs.New(errs.Unsupported, "this daemon was built without a store for API keys")
	case !spec.IsName(req.Name) || strings.HasPrefix(req.Name, auth.FixedPrefix):
		return httperr.Invalid("name %q: want 1 to 63 characters of A-Z a-z 0-9 _ . - that begin with a letter or digit, without two "+
			"dots in a row, and not with the prefix %s", httperr.Clip(req.Name, 80), auth.FixedPrefix)
	case !slices.Contains(record.Roles, role):
		return httperr.Invalid("role %q: want viewer, operator or admin", httperr.Clip(req.Role, 40))
	}
	secret, sum := auth.NewSecret()
	key := record.Key{Name: req.Name, Role: role, Sum: sum, Created: time.Now().UTC()}
	if req.ExpiresAt != "" {
		t, err := spec.ParseTime(req.ExpiresAt)
		if err != nil || !t.After(key.Created) {
			return httperr.Invalid("expiresAt %q: want a future time such as 2030-01-02T15:04:05Z, or none",
				httperr.Clip(req.ExpiresAt, 60))
		}
		key.Expires = t.UTC()
	}
	if err := h.guard.AddKey(r.Context(), key); err != nil {
		return err
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, http.StatusCreated, wire.NewKey{Key: toWireKey(key), Secret: secret})
	return nil
}

func (h *keyHandlers) remove(w http.ResponseWriter, r *http.Request) error {
	name := segmentOf(r, "name")
	switch {
	case strings.HasPrefix(name, auth.FixedPrefix):
		return errs.New(errs.WrongState,
			"API key %s is in the file that listen.api_key_file names; remove it there and restart sandboxd", httperr.Clip(name, 80))
	case !h.guard.KeepsKeys(), !spec.IsName(name):
		return errs.Wire(errs.New(errs.NotFound, "there is no API key %q; `sandboxctl key ls` lists them", httperr.Clip(name, 80)),
			"KEY::NOT_FOUND")
	}
	if err := h.guard.RemoveKey(r.Context(), name); err != nil {
		return httperr.Recode(err, errs.NotFound, "KEY::NOT_FOUND")
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}
