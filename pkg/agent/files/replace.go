package files

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// A replacement is one value of POST /files/replace.
type replacement struct {
	Old string `json:"old"`
	New string `json:"new"`
}

// replaced is one value of its reply.
type replaced struct {
	Count int `json:"replacedCount"`
}

// replaceFiles is POST /files/replace. It replies with the counts, asked for or
// not: SDKs parse a 200 as JSON.
func (f *Files) replaceFiles(w http.ResponseWriter, r *http.Request) error {
	var req map[string]replacement
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	keys := slices.Sorted(maps.Keys(req))
	for _, asked := range keys { // all are checked before any is changed
		if req[asked].Old == "" {
			return reply.BadRequest("%s: old is empty, so there is nothing to replace", asked)
		}
		p, err := f.resolve(asked)
		if err != nil {
			return err
		}
		if _, err := os.Stat(p); err != nil {
			return fsFail("replace in "+p, err)
		}
	}
	counts := make(map[string]replaced, len(req))
	for _, asked := range keys {
		p, _ := f.resolve(asked)
		n, err := f.replaceIn(p, []byte(req[asked].Old), []byte(req[asked].New))
		if err != nil {
			return fsFail("replace in "+p, err)
		}
		counts[asked] = replaced{n}
	}
	return reply.JSON(w, http.StatusOK, counts)
}

func (f *Files) replaceIn(path string, old, with []byte) (int, error) {
	in, err := openRegular(path)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	d, err := f.newDraft(path)
	if err != nil {
		return 0, err
	}
	defer d.discard()
	n, err := replaceStream(d.f, in, old, with)
	if err != nil || n == 0 {
		return 0, err // without a match the file is left alone, times included
	}
	return n, d.commit(attributes{-1, -1, -1})
}

// replaceStream copies r to w with every old replaced, left to right, holding
// no more than a chunk and the length of old.
func replaceStream(w io.Writer, r io.Reader, old, with []byte) (count int, err error) {
	buf := make([]byte, 0, max(256<<10, 2*len(old)))
	for {
		n, readErr := io.ReadFull(r, buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		last := readErr == io.EOF || readErr == io.ErrUnexpectedEOF
		if readErr != nil && !last {
			return count, readErr
		}
		rest := buf
		for {
			i := bytes.Index(rest, old)
			if i < 0 {
				break
			}
			if _, err := w.Write(rest[:i]); err != nil {
				return count, err
			}
			if _, err := w.Write(with); err != nil {
				return count, err
			}
			rest = rest[i+len(old):]
			count++
		}
		keep := 0
		if !last {
			keep = min(len(old)-1, len(rest)) // may be the beginning of a match
		}
		if _, err := w.Write(rest[:len(rest)-keep]); err != nil {
			return count, err
		}
		if last {
			return count, nil
		}
		copy(buf, rest[len(rest)-keep:])
		buf = buf[:keep]
	}
}
