package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
)

const (
	// uploadStall is how long a client may send no byte of an archive. A program
	// at the other end of its pipe may think for minutes before it writes.
	uploadStall = 15 * time.Minute
	// uploadRate is what it must send beyond that, on average, in bytes a second:
	// imports are few at once, and one that drips keeps out others.
	uploadRate = 16 << 10
	// tellEvery is how often an import says how far it is.
	tellEvery = 250 * time.Millisecond
	// refusalTime is how long what is still sent is read after a refusal, so that
	// the refusal arrives; a client that reads it stops sending.
	refusalTime = 5 * time.Second
)

// importImage makes an image of the archive that is the body. While it comes,
// the answer says how far that is, one JSON object a line; the last line tells
// the image or the error. What fails before the first line is an answer of its
// own status. A client that leaves ends the import.
func (s *Server) importImage(w http.ResponseWriter, r *http.Request) error {
	rc := http.NewResponseController(w)
	rc.EnableFullDuplex() //nolint:errcheck // a recorder in a test reads the body first anyway
	q := r.URL.Query()
	infoOf(r).op, infoOf(r).image = opImageImport, httperr.Clip(q.Get("name"), 200)
	said := &teller{w: w, rc: rc, total: r.ContentLength, done: make(chan struct{})}
	said.going.Go(said.tell)
	im, err := s.images.Import(r.Context(), image.Archive{Name: q.Get("name"), Format: q.Get("format")}, &upload{ReadCloser: r.Body, deadline: rc.SetReadDeadline}, said.note)
	close(said.done)
	said.going.Wait()
	if err == nil {
		out := s.toImageInfo(im)
		said.line(wire.ImportLine{Image: &out})
		return nil
	}
	err = fmt.Errorf("import image %q: %w", httperr.Clip(q.Get("name"), 200), httperr.Recode(err, errs.NotFound, "IMAGE::NOT_FOUND"))
	if infoOf(r).wrote {
		infoOf(r).err = err
		_, body := httperr.Body(err, infoOf(r).requestID)
		said.line(wire.ImportLine{Error: &body})
	} else {
		w.Header().Set("Connection", "close")
		s.fail(w, r, err)
		rc.Flush() //nolint:errcheck // a client that left needs no answer
	}
	rc.SetReadDeadline(time.Now().Add(refusalTime)) //nolint:errcheck // a recorder in a test has none
	io.Copy(io.Discard, r.Body)                     //nolint:errcheck // it is not wanted any more
	return nil
}

// upload is a body whose sender may neither stall nor drip. Only the time counts
// that is spent waiting for it.
type upload struct {
	io.ReadCloser
	deadline func(time.Time) error
	n        int64
	waited   time.Duration
}

func (u *upload) Read(p []byte) (int, error) {
	start := time.Now()
	may := uploadStall + time.Duration(u.n/uploadRate)*time.Second - u.waited
	u.deadline(start.Add(min(may, uploadStall))) //nolint:errcheck // a recorder in a test has none
	n, err := u.ReadCloser.Read(p)
	u.n, u.waited = u.n+int64(n), u.waited+time.Since(start)
	switch {
	case err == nil, err == io.EOF: //nolint:errorlint // as a reader must return it
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = errs.Wrap(err, errs.Invalid, "the archive stopped coming, or came slower than %d KiB/s; send it again", uploadRate>>10)
	default:
		err = errs.Wrap(err, errs.Invalid, "the archive did not arrive to its end; send it again")
	}
	return n, err
}

// teller writes progress at a human pace, whatever that of the import.
type teller struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	total int64 // of the archive; not known if not above 0
	done  chan struct{}
	going sync.WaitGroup

	mu  sync.Mutex
	now *wire.ImportProgress // not told yet
}

func (t *teller) note(p image.Progress) {
	out := &wire.ImportProgress{Stage: p.Stage, Layer: p.Layer, Layers: p.Layers, Bytes: p.Bytes, Total: p.Total}
	if out.Total == 0 && p.Layer == 0 {
		out.Total = max(t.total, 0)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.now = out
}

func (t *teller) tell() {
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for {
		select {
		case <-t.done:
			return
		case <-tick.C:
		}
		t.mu.Lock()
		p := t.now
		t.now = nil
		t.mu.Unlock()
		if p != nil {
			t.line(wire.ImportLine{Progress: p})
		}
	}
}

func (t *teller) line(l wire.ImportLine) {
	t.w.Header().Set("Content-Type", "application/x-ndjson")
	b, err := json.Marshal(l)
	if err != nil {
		return
	}
	t.w.Write(append(b, '\n')) //nolint:errcheck // the body tells of a client that left
	t.rc.Flush()               //nolint:errcheck // see above
}
