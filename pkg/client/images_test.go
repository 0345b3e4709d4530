package client

import (
	"io"
	"net/http"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A daemon that dies is noticed also while the archive's other end is silent.
func TestImportFromSilentPipe(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadFull(r.Body, make([]byte, 4))
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		conn.Close()
	})
	silent, pipe := io.Pipe()
	go func() { _, _ = pipe.Write([]byte("half")) }()
	if _, err := c.Images().Import(t.Context(), Archive{Name: "x", Body: silent}, nil); !errs.Is(err, errs.Unavailable) {
		t.Errorf("%v, want unavailable", err)
	}
}
