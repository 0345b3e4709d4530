// Package validity knows when certificates and keys end, and says so in time.
//
//	files of the configuration ─┐             ┌─▶ the log, once a day
//	API keys                    ├─▶ End ─ due ┼─▶ an event
//	authorities of sandboxes   ─┘             └─▶ metrics, the doctor
//
// An End is due 30 days before, or when a third of its life is left, if that is later:
// otherwise a certificate that is renewed every week would be due always.
//
// What surprises: a file of certificates that are trusted ends later than its first
// certificate. An authority that was renewed stands there twice, under one name, and the newer
// one counts. In a file of several authorities, one that ended long ago does not count: such
// files keep some for years.
package validity

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Notice is how long before its end a certificate or a key is due, at most.
const Notice = 30 * 24 * time.Hour

// shortest is the life of the keys that are not watched: somebody has made them for one task.
const shortest = 3 * 24 * time.Hour

// What an End is of, if it is of no file of the configuration. A file has the key of the
// configuration instead.
const (
	APIKey    = "api_key"
	Authority = "authority"
)

// An End is the end of a certificate or of a key.
type End struct {
	What string    // APIKey, Authority, or the key of the configuration that names File
	File string    // the path; empty: it is in no file
	Name string    // for people: the certificate's subject, the name of the key, the ID of the sandbox
	From time.Time // when its life began; zero: unknown
	At   time.Time
	Do   string // what to do about it
}

// Notice is how long before its end it is due.
func (e *End) Notice() time.Duration {
	if e.From.IsZero() {
		return Notice
	}
	return min(Notice, e.At.Sub(e.From)/3)
}

// Due reports whether the end is near, or past.
func (e *End) Due(now time.Time) bool { return !now.Before(e.At.Add(-e.Notice())) }

// Text says in one line what ends, when, and what to do.
func (e *End) Text(now time.Time) string {
	what := map[string]string{APIKey: "API key " + e.Name, Authority: "the certificate authority of sandbox " + e.Name}[e.What]
	if what == "" {
		what = fmt.Sprintf("the certificate %q in %s (%s)", e.Name, e.File, e.What)
	}
	verb := "ends in " + days(e.At.Sub(now))
	if !now.Before(e.At) {
		verb = "ended " + days(now.Sub(e.At)) + " ago"
	}
	return fmt.Sprintf("%s %s, at %s: %s", what, verb, e.At.UTC().Format(time.RFC3339), e.Do)
}

// days is a time that people read: days, or less than two days in hours.
func days(d time.Duration) string {
	if d < 48*time.Hour {
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// first orders Ends by which is due first.
func first(a, b End) int { return a.At.Add(-a.Notice()).Compare(b.At.Add(-b.Notice())) }

// A File is a file of certificates that the configuration names.
type File struct {
	Key     string // of the configuration, as listen.tls_cert
	Path    string
	Trusted bool // it says whom to trust; otherwise it is a certificate that is shown, and those that signed it
}

// End reads the file. It fails if the file has no certificate.
func (f File) End(now time.Time) (End, error) {
	text, err := os.ReadFile(f.Path)
	if err != nil {
		return End{}, fmt.Errorf("find out when %s ends: %w", f.Key, err)
	}
	var ders [][]byte
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		if b.Type == "CERTIFICATE" {
			ders = append(ders, b.Bytes)
		}
	}
	return f.Of(ders, now)
}

// Of is End for certificates that were read from the file before, as DER.
func (f File) Of(ders [][]byte, now time.Time) (End, error) {
	var all []*x509.Certificate
	for _, der := range ders {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			if f.Trusted { // one that nobody can read verifies nothing
				continue
			}
			return End{}, fmt.Errorf("find out when %s ends: read %s: %w", f.Key, f.Path, err)
		}
		all = append(all, c)
	}
	do := "renew it; sandboxd reads the file again by itself"
	if f.Trusted {
		all = inUse(all, now)
		do = "add its successor to the file, and restart sandboxd; sandboxes keep running"
	}
	if len(all) == 0 {
		return End{}, fmt.Errorf("find out when %s ends: %s has no certificate in PEM", f.Key, f.Path)
	}
	c := slices.MinFunc(all, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) })
	return End{What: f.Key, File: f.Path, Name: c.Subject.String(), From: c.NotBefore, At: c.NotAfter, Do: do}, nil
}

// inUse are the certificates of a file of authorities that count: the newest of each name, and
// of these not those that ended more than Notice ago, unless all did.
func inUse(all []*x509.Certificate, now time.Time) (out []*x509.Certificate) {
	newest := map[string]*x509.Certificate{}
	for _, c := range all {
		if was := newest[string(c.RawSubject)]; was == nil || c.NotAfter.After(was.NotAfter) {
			newest[string(c.RawSubject)] = c
		}
	}
	var old []*x509.Certificate
	for _, c := range newest {
		if now.Sub(c.NotAfter) > Notice {
			old = append(old, c)
		} else {
			out = append(out, c)
		}
	}
	if len(out) == 0 {
		return old
	}
	return out
}

// Keys are the ends of API keys. Those that have ended are not among them: whoever has one is
// told when it is refused. Nor are those that were made for less than three days.
func Keys(all []record.Key, now time.Time) (ends []End) {
	for i := range all {
		k := &all[i]
		if k.Expires.IsZero() || !now.Before(k.Expires) || k.Expires.Sub(k.Created) < shortest {
			continue
		}
		ends = append(ends, End{
			What: APIKey, Name: k.Name, From: k.Created, At: k.Expires,
			Do: "give its holder another one (`sandboxctl key create`)",
		})
	}
	return ends
}

// Sandbox is the end of the certificate authority of a sandbox.
func Sandbox(id string, at time.Time) End {
	return End{What: Authority, Name: id, At: at, Do: "stop and start the sandbox, which gives it a new one"}
}
