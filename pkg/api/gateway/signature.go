package gateway

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A signature opens one port of one sandbox until it expires. It is part of the
// address, as OpenSandbox's OSEP-0011 has it: {id}-{port}-{expires}-{signature}, and
// the signed text is the one described there. The signature itself differs: it has 32
// digits, where OpenSandbox has 8 and the name of a key. Anybody who has the address
// could try all 2^32 in days, and no client reads the signature.
type signature struct {
	expires string // seconds since 1970 in base 36
	mac     string // 32 hexadecimal digits
}

var (
	signedLabel = regexp.MustCompile(`^([a-z2-7]{` + strconv.Itoa(record.IDLen) + `})-([0-9]{1,5})-([0-9a-z]{1,8})-([0-9a-f]{32})$`)
	macForm     = regexp.MustCompile(`^[0-9a-f]{32}$`)
	expiresForm = regexp.MustCompile(`^[1-9a-z][0-9a-z]{0,7}$`)
	tokenInText = regexp.MustCompile(tokenQuery + `=[^&#\s;,"]*&?`)
)

// latestExpiry is the last second that a signed address may name: the end of the year
// 9999. With more digits the label would be longer than the 63 that DNS allows.
const latestExpiry = 253402300799

// parseSigned reads the four segments of a signed label.
func parseSigned(label string) (id, port string, sig signature, ok bool) {
	m := signedLabel.FindStringSubmatch(label)
	if m == nil {
		return "", "", sig, false
	}
	return m[1], m[2], signature{m[3], m[4]}, true
}

func (sig signature) wellFormed() bool {
	return macForm.MatchString(sig.mac) && expiresForm.MatchString(sig.expires)
}

// label is {id}-{port}, and the signature if there is one.
func (sig signature) label(id, port string) string {
	if sig.mac == "" {
		return id + "-" + port
	}
	return id + "-" + port + "-" + sig.expires + "-" + sig.mac
}

// path is /{id}/{port}, and the signature if there is one.
func (sig signature) path(id, port string) string {
	if sig.mac == "" {
		return "/" + id + "/" + port
	}
	return "/" + id + "/" + port + "/" + sig.expires + "/" + sig.mac
}

// sign makes the signature of a port that expires at a second since 1970.
func (g *Gateway) sign(id string, port uint16, until int64) signature {
	return g.signText(id, port, strconv.FormatInt(until, 36))
}

func (g *Gateway) signText(id string, port uint16, expires string) signature {
	m := hmac.New(sha256.New, g.cfg.Secret)
	fmt.Fprintf(m, "v1\nshort\n%s\n%d\n%s\n", id, port, expires)
	return signature{expires, hex.EncodeToString(m.Sum(nil)[:16])}
}

// CheckSignature checks the signature of t, if it has one, and notes that it is right.
// A wrong signature in a path counts as part of the guest's own path; elsewhere it is
// refused.
func (g *Gateway) CheckSignature(t *Target, rec *record.Record, port uint16) error {
	if t.sig.mac == "" {
		return nil
	}
	if t.ID != rec.ID || !equal(t.sig.mac, g.signText(rec.ID, port, t.sig.expires).mac) {
		if t.sigInPath {
			t.unsign()
			return nil
		}
		return refuseAddress(port, "the signature of this address is not valid for this port of this sandbox")
	}
	until, err := strconv.ParseInt(t.sig.expires, 36, 64)
	if err != nil || time.Now().Unix() > until {
		return errAddressExpired(time.Unix(until, 0), port)
	}
	t.signed, t.until = true, time.Unix(until+1, 0) // it may be used within its last second
	return nil
}

func refuseAddress(port uint16, format string, args ...any) error {
	return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
		format+"; request a new one with GET /v1/sandboxes/{id}/endpoints/%d?expires=…", append(args, port)...)
}

func errAddressExpired(at time.Time, port uint16) error {
	return refuseAddress(port, "this address expired at %s", at.UTC().Format(time.RFC3339))
}

// ParseExpires reads when a signed address is to expire, in seconds since 1970. That is
// never after the sandbox's own expiry as of now; after a renewal clients ask for a new
// address.
func ParseExpires(text string, rec *record.Record) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n > latestExpiry || strconv.FormatInt(n, 10) != text || n < 0 {
		return 0, httperr.Invalid("expires %q: want whole seconds since 1970 (UTC), as `date -d '1 hour' +%%s` prints them",
			httperr.Clip(text, 30))
	}
	if now := time.Now().Unix(); n <= now {
		return 0, httperr.Invalid("expires %d is in the past: the time is %d, in seconds since 1970 (UTC)", n, now)
	}
	if !rec.Expires.IsZero() {
		n = min(n, rec.Expires.Unix())
	}
	return n, nil
}
