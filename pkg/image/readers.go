package image

import (
	"encoding/hex"
	"hash"
	"io"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// meter reports how much was read.
type meter struct {
	r      io.Reader
	n      int64
	report func(int64)
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	if n > 0 {
		m.n += int64(n)
		m.report(m.n)
	}
	return n, err
}

// roomy is a reader that fails when the disk has no more room for imports.
type roomy struct {
	r     io.Reader
	n     int64
	asked bool
	room  func() error
}

func (m *roomy) Read(p []byte) (int, error) {
	if !m.asked || m.n >= 64<<20 {
		m.asked, m.n = true, 0
		if err := m.room(); err != nil {
			return 0, err
		}
	}
	n, err := m.r.Read(p)
	m.n += int64(n)
	return n, err
}

// summed is a reader that checks that its content has the digest want.
type summed struct {
	r    io.Reader
	h    hash.Hash
	want string
}

func (s *summed) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.h.Write(p[:n])
	return n, err
}

// check reads the rest and compares.
func (s *summed) check() error {
	if s.want == "" {
		return nil
	}
	if _, err := io.Copy(io.Discard, s); err != nil {
		return err
	}
	if got := "sha256:" + hex.EncodeToString(s.h.Sum(nil)); got != s.want {
		return errs.New(errs.Invalid, "it has the digest %s, but the image's manifest says %s: the archive was changed or is damaged", got,
			s.want)
	}
	return nil
}
