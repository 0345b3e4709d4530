package validity

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const day = 24 * time.Hour

// today is the clock of all tests here.
var today = time.Date(2027, 3, 1, 12, 0, 0, 0, time.UTC)

// issue makes a certificate as PEM that began and ends so long from today on.
func issue(t *testing.T, name string, began, ends time.Duration) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: today.Add(began), NotAfter: today.Add(ends),
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// file writes certificates, one after the other.
func file(t *testing.T, blocks ...[]byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "certificates.pem")
	if err := os.WriteFile(path, slices.Concat(blocks...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestFile: which end a file has, as a chain that is shown and as authorities that are trusted.
func TestFile(t *testing.T) {
	one := func(name string, ends time.Duration) []byte { return issue(t, name, -300*day, ends) }
	for what, c := range map[string]struct {
		blocks          [][]byte
		served, trusted string // the name that ends first; empty: an error
	}{
		"one":                  {[][]byte{one("a", 40*day)}, "CN=a", "CN=a"},
		"a chain":              {[][]byte{one("a", 40*day), one("b", 20*day)}, "CN=b", "CN=b"},
		"a renewed one":        {[][]byte{one("a", 5*day), one("a", 40*day), one("b", 20*day)}, "CN=a", "CN=b"},
		"one long ended":       {[][]byte{one("a", 40*day), one("b", -31*day)}, "CN=b", "CN=a"},
		"one just ended":       {[][]byte{one("a", 40*day), one("b", -29*day)}, "CN=b", "CN=b"},
		"only one, long ended": {[][]byte{one("a", -31*day)}, "CN=a", "CN=a"},
		"beside a key": {[][]byte{
			pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("secret")}), one("a", 40*day),
		}, "CN=a", "CN=a"},
		"one that cannot be read": {[][]byte{
			pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")}), one("a", 40*day),
		}, "", "CN=a"},
		"none":    {nil, "", ""},
		"no PEM":  {[][]byte{[]byte("hello")}, "", ""},
		"no cert": {[][]byte{pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("secret")})}, "", ""},
	} {
		path := file(t, c.blocks...)
		for trusted, want := range map[bool]string{false: c.served, true: c.trusted} {
			e, err := File{"listen.tls_cert", path, trusted}.End(today)
			if e.Name != want || (err == nil) != (want != "") {
				t.Errorf("%s, trusted %v: %q, %v; want %q", what, trusted, e.Name, err, want)
			}
			if err != nil && (!strings.Contains(err.Error(), "listen.tls_cert") || strings.Contains(err.Error(), "secret")) {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	if _, err := (File{"network.roots", filepath.Join(t.TempDir(), "none"), true}).End(today); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an absent file: %v", err)
	}
}

// TestDue: 30 days before the end, or when a third of the life is left.
func TestDue(t *testing.T) {
	for _, c := range []struct {
		began, ends time.Duration
		due         bool
	}{
		{-335 * day, 31 * day, false},
		{-335 * day, 30 * day, true},
		{-335 * day, -day, true},
		{-59 * day, 31 * day, false}, // of 90 days
		{-60 * day, 30 * day, true},
		{-3 * day, 3 * day, false}, // of six days
		{-4 * day, 2 * day, true},
	} {
		e := End{From: today.Add(c.began), At: today.Add(c.ends)}
		if e.Due(today) != c.due {
			t.Errorf("began %v, ends %v: due is %v", c.began, c.ends, !c.due)
		}
	}
	e := Sandbox("dabcdefghijk", today.Add(30*day))
	if !e.Due(today) || e.Due(today.Add(-time.Second)) {
		t.Error("without a beginning it is not due 30 days before")
	}
}

// TestKeys: keys without an end, those that have ended and those of a task are not watched.
func TestKeys(t *testing.T) {
	key := func(name string, began, ends time.Duration) record.Key {
		return record.Key{Name: name, Created: today.Add(began), Expires: today.Add(ends)}
	}
	ends := Keys([]record.Key{
		{Name: "for ever", Created: today}, key("ended", -20*day, -time.Second), key("task", -time.Hour, day), key("ci", -80*day, 10*day),
	}, today)
	if len(ends) != 1 || ends[0].Name != "ci" || ends[0].What != APIKey || !ends[0].Due(today) {
		t.Errorf("%+v", ends)
	}
}

func TestText(t *testing.T) {
	for want, e := range map[string]End{
		`the certificate "CN=a" in /etc/tls.crt (listen.tls_cert) ends in 12 days, at 2027-03-13T12:00:00Z: renew it`: {
			What: "listen.tls_cert", File: "/etc/tls.crt", Name: "CN=a", At: today.Add(12 * day), Do: "renew it",
		},
		"API key ci ends in 47 h, at 2027-03-03T11:30:00Z: replace it": {
			What: APIKey, Name: "ci", At: today.Add(47*time.Hour + 30*time.Minute), Do: "replace it",
		},
		"the certificate authority of sandbox dabcdefghijk ended 3 days ago, at 2027-02-26T12:00:00Z: stop and start the sandbox, which " +
			"gives it a new one": Sandbox("dabcdefghijk", today.Add(-3*day)),
	} {
		if got := e.Text(today); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// TestWatch lets a year pass, hour by hour: what is due is said once a day, a certificate that
// was renewed is not said any more, and what cannot be read is said once a day too.
func TestWatch(t *testing.T) {
	now := today
	path := file(t, issue(t, "a", -335*day, 30*day+time.Hour))
	broken := errors.New("a file is missing")
	var unread error
	var said []string
	var log bytes.Buffer
	asked := 0
	w := &Watch{
		Quick: func(_ context.Context, now time.Time) ([]End, error) {
			e, err := File{Key: "listen.tls_cert", Path: path}.End(now)
			return []End{e}, errors.Join(err, unread)
		},
		Slow: func(context.Context, time.Time) ([]End, error) {
			asked++
			return []End{Sandbox("dabcdefghijk", today.Add(365*day)), Sandbox("dbbcdefghijk", today.Add(300*day))}, nil
		},
		Tell: func(_ End, text string) { said = append(said, text) },
		Log:  slog.New(slog.NewTextHandler(&log, nil)),
		Now:  func() time.Time { return now },
	}
	pass := func(d time.Duration) (n int) {
		said = nil
		for end := now.Add(d); now.Before(end); now = now.Add(30 * time.Minute) {
			w.Look(t.Context())
		}
		return len(said)
	}
	if n := pass(time.Hour); n != 0 || asked != 1 {
		t.Errorf("before it is due it was said %d times; asked %d times in an hour", n, asked)
	}
	if n := pass(10 * day); n != 10 || !strings.Contains(said[9], "ends in 21 days") {
		t.Errorf("within ten days it was said %d times: %q", n, said)
	}
	if n := strings.Count(log.String(), "level=WARN msg=\"ends soon\" what=listen.tls_cert"); n != 10 {
		t.Errorf("the log has it %d times:\n%s", n, &log)
	}
	left := w.Left()
	if len(left) != 2 || left[0].What != "listen.tls_cert" || left[0].Notice != Notice || left[0].Left > 21*day || left[0].Left < 19*day {
		t.Errorf("left: %+v", left)
	}
	if left[1].What != Authority || left[1].Left.Round(day) != 290*day { // the one that ends first
		t.Errorf("left: %+v", left)
	}
	if err := os.WriteFile(path, issue(t, "a", 10*day, 400*day), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := pass(10 * day); n != 0 {
		t.Errorf("a renewed one was said: %q", said)
	}
	log.Reset()
	unread = broken
	if pass(2 * day); strings.Count(log.String(), "level=ERROR") != 2 || !strings.Contains(log.String(), broken.Error()) {
		t.Errorf("in two days the log has:\n%s", &log)
	}
	unread = nil
	// The second sandbox is due 270 days after the start, and was not restarted.
	if n := pass(270*day - now.Sub(today)); n != 0 {
		t.Errorf("too early: %q", said)
	}
	if n := pass(5 * day); n != 5 || !strings.Contains(said[0], "dbbcdefghijk ends in 30 days") {
		t.Errorf("%d: %q", n, said)
	}
	now = today.Add(-time.Hour) // a clock that is set back starves nothing
	was := asked
	if w.Look(t.Context()); asked != was+1 {
		t.Error("a clock that was set back: the authorities were not asked for")
	}
}
