package server

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// An adoption makes this agent that of another sandbox (docs/design/agent.md):
//
//	POST /adopt ─ check ─ drafts, host name ─┬─ door: the new token, closed ─ become ─ open ─▶ answer
//	                 └── refused: nothing has changed     └── fails: the agent ends, as at a boot
//
// Requests with the new token wait until the door is open, so none of them meets half of
// either sandbox. Those that were let in before end as they began.

// A door lets in requests with a token.
type door struct {
	sum  [sha256.Size]byte // of the token
	open chan struct{}     // closed once requests are answered
}

func newDoor(token string) *door {
	return &door{sum: sha256.Sum256([]byte(token)), open: make(chan struct{})}
}

// fits reports whether a request has the token.
func (d *door) fits(r *http.Request) bool {
	sum := sha256.Sum256([]byte(r.Header.Get(agent.TokenHeader)))
	return subtle.ConstantTimeCompare(sum[:], d.sum[:]) == 1
}

func conflict(format string, args ...any) error {
	return reply.Fail(http.StatusConflict, reply.Failed, format, args...)
}

// adopt is POST /adopt.
func (s *Server) adopt(w http.ResponseWriter, r *http.Request) error {
	a, err := readAdoption(w, r)
	if err != nil {
		return err
	}
	if !s.adopting.TryLock() {
		return conflict("another adoption of this agent is going on")
	}
	defer s.adopting.Unlock()
	switch {
	case !s.opens.Load().fits(r):
		return conflict("another adoption of this agent was faster")
	case s.stopping.Load():
		return reply.ErrStopping
	case a.Copy == nil && s.entrypoint.Load() != nil:
		return conflict("this sandbox has an entrypoint, so it is in use: only one that idles can become another")
	}
	g, err := s.newGuest(&a.Bootstrap)
	if err != nil {
		return reply.BadRequest("%v", err)
	}
	var identity copied
	if a.Copy != nil {
		proc.FileTurns.Do(func() { identity, err = s.draftIdentity(a.Copy) })
	}
	if err == nil {
		err = takeName(a.Hostname, &identity)
	}
	if err != nil {
		return err
	}
	return s.take(w, r, a, g, &identity)
}

// readAdoption reads all of the body before anything is done.
func readAdoption(w http.ResponseWriter, r *http.Request) (*agent.Adoption, error) {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, agent.MaxAdoption))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, reply.Fail(http.StatusRequestEntityTooLarge, reply.BadBody, "an adoption has %d bytes at most", agent.MaxAdoption)
		}
		return nil, reply.BadRequest("read the request body: %v", err)
	}
	var a agent.Adoption
	if err := json.Unmarshal(b, &a); err != nil {
		return nil, reply.BadRequest("the request body is no adoption: %v", err)
	}
	if err := a.Check(); err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	return &a, nil
}

// takeName gives the sandbox its host name and puts the files of a copy in place, or does
// neither. The kernel lets no process of a sandbox change the name (CAP_SYS_ADMIN), so most often
// the host has to do it before: gVisor takes the name of the specification when it restores.
func takeName(name string, files *copied) error {
	was, err := nodeName()
	if err == nil && name != "" && name != was {
		err = unix.Sethostname([]byte(name))
	}
	if err != nil {
		files.discard()
		return reply.Fail(http.StatusNotImplemented, reply.Unsupported,
			"this sandbox is called %q and cannot be called %q: its host name can be changed from outside only (%v)", was, name, err)
	}
	if err := files.commit(); err != nil {
		files.discard()
		if name != "" && name != was {
			unix.Sethostname([]byte(was)) //nolint:errcheck // it could be set just now
		}
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "give the copy its own identity: %v", err)
	}
	return nil
}

// nodeName is the host name that programs see (uname(2)).
func nodeName() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", os.NewSyscallError("uname", err)
	}
	return unix.ByteSliceToString(u.Nodename[:]), nil
}

// take makes the agent that of a. From here on nothing is refused.
func (s *Server) take(w http.ResponseWriter, r *http.Request, a *agent.Adoption, g *guest, identity *copied) error {
	door := newDoor(a.Token)
	s.opens.Store(door)
	s.limits.Store(&a.Limits)
	s.commands.SetOutputLimits(outputLimits(&a.Bootstrap))
	g.makeEnvFile(envFile)
	s.jupyter.move(g) //nolint:errcheck // as at a boot; standard error is nobody's here
	var err error
	if a.Copy == nil {
		err = s.begin(a, g)
	} else {
		s.commands.LoseClients()
		s.terminals.LoseClients()
		s.conns.closeOthers(r)
	}
	s.who.Store(g)
	s.ahead.Renew(a.ShellAhead)
	if a.Copy == nil {
		s.code.move(a.Prestart)
	} else {
		s.diverge(a.Copy, identity)
	}
	close(door.open)
	if err != nil {
		return err
	}
	go proc.Guarded(func() { s.prestart(a.Prestart, door) })
	return reply.OK(w)
}

// begin starts the entrypoint of a and waits for it, as a boot does. An error means that the agent
// ends.
func (s *Server) begin(a *agent.Adoption, g *guest) error {
	s.commands.ForgetEnded()
	st := startOf(&a.Bootstrap, g)
	if code, err := s.startEntrypoint(&st); err != nil {
		s.stopping.Store(true)
		s.state.writeObituary(agent.Obituary{ExitCode: code, Message: err.Error()}, nil) //nolint:errcheck // the answer says it too
		s.failed <- code
		return err
	}
	if st.command == nil {
		return nil
	}
	s.begun <- struct{}{}
	if !s.awaitStart(&st) {
		s.stopping.Store(true) // live sets it too
		return reply.ErrStopping
	}
	return nil
}
