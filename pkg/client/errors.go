package client

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// lost explains a connection that could not be made or broke.
func (d *daemon) lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		why := op.Err.Error()
		if errors.Is(err, os.ErrPermission) {
			return errs.Wrap(err, errs.Denied, "cannot connect to %s: permission denied; become root or a member of group sandboxd", d.host)
		}
		return errs.Wrap(err, errs.Unavailable, "cannot connect to %s: %s; is sandboxd running? "+
			"Start it with `make dev-up` or `systemctl start sandboxd`, or set SANDBOXD_HOST; `systemctl status sandboxd` and "+
			"`journalctl -u sandboxd -n 20` say why a service does not run", d.host, why)
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return errs.Wrap(err, errs.Denied, "the certificate of %s is not trusted: %s; set SSL_CERT_FILE to "+
			"the PEM file of the authority that signed it, and connect to a name that is in the certificate", d.host, err)
	}
	return errs.Wrap(err, errs.Unavailable, "the connection to %s broke: %s; check that sandboxd is running and try again", d.host, err)
}

// maxRetryAfter bounds what is believed of a Retry-After, in seconds: a day.
const maxRetryAfter = 24 * 60 * 60

// fromResponse turns an answer that is no success back into an error of
// pkg/errs: the other direction of the table in pkg/api.
func fromResponse(resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var e wire.Error
	if json.Unmarshal(b, &e) != nil || e.Message == "" {
		e.Message = strings.TrimSpace(string(b))
		if strings.HasSuffix(e.Message, "HTTP request to an HTTPS server.") { // net/http's own words
			e.Message = "this listener requires TLS; begin the host with https://"
		}
		if e.Message == "" || strings.HasPrefix(e.Message, "<") {
			e.Message = "the server answered " + resp.Status
		}
	}
	err := fromWire(resp.StatusCode, e)
	if n, perr := strconv.Atoi(resp.Header.Get("Retry-After")); perr == nil && n > 0 {
		err = errs.Retry(err, time.Duration(min(n, maxRetryAfter))*time.Second)
	}
	return err
}

func fromWire(status int, e wire.Error) error {
	return errs.Wire(errs.New(codeOf(status, e.Code), "%s", e.Message), e.Code)
}

func codeOf(status int, wireCode string) errs.Code {
	switch status {
	case http.StatusBadRequest:
		switch wireCode {
		case "SANDBOX::API_NOT_SUPPORTED", "SNAPSHOT::NOT_IMPLEMENTED", "VOLUME::UNSUPPORTED_BACKEND":
			return errs.Unsupported
		}
		return errs.Invalid
	case http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity, http.StatusMethodNotAllowed:
		return errs.Invalid
	case http.StatusUnauthorized, http.StatusForbidden:
		return errs.Denied
	case http.StatusNotFound:
		return errs.NotFound
	case http.StatusPreconditionFailed:
		return errs.WrongState
	case http.StatusConflict:
		// SANDBOX::ALREADY_EXISTS, SNAPSHOT::ALREADY_EXISTS, POOL::EXISTS
		if strings.HasSuffix(wireCode, "EXISTS") {
			return errs.Exists
		}
		return errs.WrongState
	case http.StatusTooManyRequests, http.StatusInsufficientStorage:
		return errs.Exhausted
	case http.StatusNotImplemented:
		return errs.Unsupported
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		if wireCode == "SANDBOX::CAPACITY_EXCEEDED" {
			return errs.Exhausted
		}
		return errs.Unavailable
	}
	return errs.Internal
}

// A socket that systemd holds accepts connections while no daemon runs: they wait for the next one. That is
// right for a restart, and wrong for a daemon that does not start. The kernel keeps who listens (SO_PEERCRED,
// unix(7)), and a daemon calls listen(2) on the socket that systemd passes as the first thing it does
// (systemd.Claim). So a client sees whether the last daemon lives.

// lookEvery is how often a client that waits looks, and desertedLooks after how many looks in a row it gives up
// that found no daemon, or another one than the last: a restart takes a second or two.
const (
	lookEvery     = 2 * time.Second
	desertedLooks = 4
)

// errDeserted is why a request was given up: no daemon serves the socket.
var errDeserted = errors.New("no daemon serves the socket")

// watchDaemon cancels a request that waits if no daemon comes to serve it. Call stop when its answer begins.
func (d *daemon) watchDaemon(cancel context.CancelCauseFunc) (stop func()) {
	if d.socket == "" {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(d.look)
		defer tick.Stop()
		last, none := 0, 0
		for none < desertedLooks {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			pid, lives := listener(d.socket)
			if lives && (pid == last || last == 0) {
				none = 0
			} else {
				none++
			}
			last = pid
		}
		cancel(errDeserted)
	}()
	return func() { close(done) }
}

// listener returns the process that listens on a socket, and whether it lives. What cannot be known, such as a
// process outside of this PID namespace, counts as one that lives.
func listener(socket string) (pid int, lives bool) {
	c, err := net.DialTimeout("unix", socket, lookEvery)
	if err != nil {
		return 0, true // the request itself meets it, or the queue is full
	}
	defer c.Close() //nolint:errcheck // nothing was written
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, true
	}
	var peer *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if cerr != nil || err != nil || peer.Pid <= 1 { // 1: systemd listens, and no daemon of this release ever did
		return 0, true
	}
	return int(peer.Pid), !errors.Is(unix.Kill(int(peer.Pid), 0), unix.ESRCH)
}
