package api

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// What the daemon says of itself and its host. See api/openapi.yaml.

// system answers what a daemon that has no System can not.
func (s *Server) system() (System, error) {
	if s.cfg.System == nil {
		return nil, httperr.New(http.StatusNotImplemented, "GENERAL::NOT_IMPLEMENTED", errs.Unsupported, "this daemon was built without what knows its host")
	}
	return s.cfg.System, nil
}

// health answers everybody; impaired is what the daemon serves in spite of.
func (s *Server) health(w http.ResponseWriter, _ *http.Request) error {
	answer := map[string]string{"status": "healthy"}
	if f := s.cfg.Impaired; f != nil {
		if text := f(); text != "" {
			answer["warning"] = text
		}
	}
	writeJSON(w, http.StatusOK, answer)
	return nil
}

// version answers everybody; without a key it is the release alone.
func (s *Server) version(w http.ResponseWriter, r *http.Request) error {
	v := s.cfg.Version
	if infoOf(r).role == "" {
		if s.guard.Keyless() { // a page asks
			return s.guard.Unauthorized(r)
		}
		v = wire.Version{Version: v.Version}
	}
	writeJSON(w, http.StatusOK, v)
	return nil
}

func (s *Server) openAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/json")
	w.Write(s.cfg.OpenAPI) //nolint:errcheck // a client that left needs no answer
	return nil
}

// docs serves a page that shows the API. It loads nothing and runs nothing, and
// says so: guests serve pages under this address, too.
func (s *Server) docs(w http.ResponseWriter, _ *http.Request) error {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(len(s.cfg.Docs)))
	h.Set("Content-Security-Policy",
		"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	w.Write(s.cfg.Docs) //nolint:errcheck // a client that left needs no answer
	return nil
}

func (s *Server) info(w http.ResponseWriter, r *http.Request) error {
	sys, err := s.system()
	if err != nil {
		return err
	}
	info, err := sys.Info(r.Context())
	if err != nil {
		return fmt.Errorf("look at the system: %w", err)
	}
	info.Version = s.cfg.Version
	writeJSON(w, http.StatusOK, info)
	return nil
}

func (s *Server) df(w http.ResponseWriter, r *http.Request) error {
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

// drain is for who runs the host: a client with a key should not be able to
// shut out all others.
func (s *Server) drain(on bool) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if err := onTheHost(r, "a host is drained by who runs it, so that is asked"); err != nil {
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

// onTheHost refuses what comes by another way than the Unix socket; why is the
// beginning of the sentence that says so.
func onTheHost(r *http.Request, why string) error {
	if auth.PeerOf(r).Unix {
		return nil
	}
	return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
		"%s over the Unix socket only: set SANDBOXD_HOST=%s on the host itself", why, "unix:///run/sandboxd/sandboxd.sock")
}

// backup sends the state. A key opens every sandbox, but what is in here also
// opens what their environments are keys to: it is for who is root in all but
// name.
func (s *Server) backup(w http.ResponseWriter, r *http.Request) error {
	if err := onTheHost(r, "a backup holds the environment and the tokens of every sandbox, so it is given"); err != nil {
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
			h.Set("Content-Length", strconv.FormatInt(fi.Size(), 10)) // what is cut short is seen to be
		}
	}
	w.WriteHeader(http.StatusOK)
	if _, err := io.Copy(w, f); err != nil && r.Context().Err() == nil {
		return errors.Join(errors.New("send the backup"), err)
	}
	return nil
}
