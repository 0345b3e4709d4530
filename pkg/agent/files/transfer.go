package files

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

const (
	maxMetadata = 64 << 10 // bytes of one metadata part
	maxPending  = 10_000   // metadata parts that may wait for their files
	ioBuffer    = 256 << 10
)

type pending struct {
	path string
	mode agent.FileMode
}

// upload is POST /files/upload: metadata and file parts, paired in order. Every
// SDK alternates them, so files of any size stream; each is in place as soon as
// its part has ended.
func (f *Files) upload(w http.ResponseWriter, r *http.Request) error {
	// The multipart reader peeks 4 KiB at a time: this makes large reads of them.
	r.Body = reply.Buffered{Reader: bufio.NewReaderSize(r.Body, ioBuffer), Closer: r.Body}
	mr, err := r.MultipartReader()
	if err != nil {
		return reply.Fail(http.StatusBadRequest, reply.BadFile, "the body is not multipart/form-data: %v", err)
	}
	var waiting []pending
	files := 0
	out := bufio.NewWriterSize(nil, ioBuffer)
	for {
		part, err := mr.NextRawPart()
		if err == io.EOF {
			break
		}
		if err != nil {
			return reply.Fail(http.StatusBadRequest, reply.BadContent, "the upload was cut off: %v", err)
		}
		switch part.FormName() {
		case "metadata":
			p, err := readMetadata(part)
			if err != nil {
				return reply.Fail(http.StatusBadRequest, reply.BadMetadata, "metadata part %d: %v", files+len(waiting)+1, err)
			}
			if waiting = append(waiting, p); len(waiting) > maxPending {
				return reply.Fail(http.StatusBadRequest, reply.BadFile, "more than %d metadata parts before their files", maxPending)
			}
		case "file":
			if len(waiting) == 0 {
				return reply.Fail(http.StatusBadRequest, reply.BadMetadata, "file part %d has no metadata part before it", files+1)
			}
			if err := f.receive(waiting[0], part, out); err != nil {
				return err
			}
			waiting, files = waiting[1:], files+1
		default:
			return reply.Fail(http.StatusBadRequest, reply.BadFile, "part %.64q is neither metadata nor file", part.FormName())
		}
	}
	switch {
	case files == 0 && len(waiting) == 0:
		return reply.Fail(http.StatusBadRequest, reply.BadMetadata, "the upload has no metadata and no file part")
	case files == 0:
		return reply.Fail(http.StatusBadRequest, reply.BadContent, "the upload has no file part")
	case len(waiting) > 0:
		return reply.Fail(http.StatusBadRequest, reply.BadFile,
			"%d metadata parts have no file part; %d files were written", len(waiting), files)
	}
	return reply.OK(w)
}

func readMetadata(part *multipart.Part) (pending, error) {
	b, err := io.ReadAll(io.LimitReader(part, maxMetadata+1))
	if err != nil {
		return pending{}, err
	}
	if len(b) > maxMetadata {
		return pending{}, fmt.Errorf("longer than %d KiB", maxMetadata>>10)
	}
	path, mode, err := metadataOf(b)
	return pending{path, mode}, err
}

// metadataOf decodes the JSON of an upload's metadata part.
func metadataOf(b []byte) (path string, m agent.FileMode, err error) {
	var raw struct {
		Path string `json:"path"`
		agent.FileMode
	}
	if err := json.Unmarshal(b, &raw); err != nil {
		return "", m, err
	}
	if raw.Path == "" {
		return "", m, errors.New("path is missing")
	}
	if _, err := fromDigits(raw.Mode); err != nil {
		return "", m, err
	}
	return raw.Path, raw.FileMode, nil
}

// receive writes one file. It takes a turn only for the parts that need one: giving the
// turn back for each read would cost a fourth of the speed.
func (f *Files) receive(p pending, part io.Reader, out *bufio.Writer) error {
	var (
		path string
		a    attributes
		d    *draft
		err  error
	)
	f.do(func() {
		if path, err = f.resolve(p.path); err != nil {
			return
		}
		if a, err = f.attributes(p.mode); err != nil {
			return
		}
		if d, err = f.newDraft(path); err != nil {
			err = writeFail("write "+path, err)
		}
	})
	if err != nil {
		return err
	}
	defer f.do(d.discard)
	src := &sourceErr{r: part}
	out.Reset(inTurns{d.f, f}) // not *os.File, whose ReadFrom would write each 4 KiB on its own
	_, err = out.ReadFrom(src)
	if src.err != nil {
		return reply.Fail(http.StatusBadRequest, reply.BadContent, "the upload of %s was cut off; nothing was changed: %v", path, src.err)
	}
	if err == nil {
		err = out.Flush()
	}
	if err == nil {
		f.do(func() { err = d.commit(a) })
	}
	if err != nil {
		return writeFail("write "+path, err)
	}
	return nil
}

// sourceErr remembers whether reading failed, as opposed to writing.
type sourceErr struct {
	r   io.Reader
	err error
}

func (s *sourceErr) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// download is GET /files/download: all, a range of bytes, or some lines.
func (f *Files) download(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	if q.Get("path") == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter path is missing")
	}
	path, err := f.resolve(q.Get("path"))
	if err != nil {
		return err
	}
	lines, err := parseLines(q)
	if err != nil {
		return err
	}
	rng := r.Header.Get("Range")
	if lines != nil && rng != "" {
		return reply.Fail(http.StatusBadRequest, reply.BadFile, "Range and offset/limit exclude each other")
	}
	file, err := openRegular(path)
	if err != nil {
		return fsFail("download "+path, err)
	}
	defer file.Close()
	if lines != nil {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		copyLines(w, file, *lines) //nolint:errcheck // the client is gone, or the file shrank
		return nil
	}
	fi, err := file.Stat()
	if err != nil {
		return fsFail("download "+path, err)
	}
	size := fi.Size()
	start, n, partial, err := parseRange(rng, size)
	if err != nil {
		w.Header().Set("Content-Range", "bytes */"+strconv.FormatInt(size, 10))
		return reply.Fail(http.StatusRequestedRangeNotSatisfiable, reply.BadFile, "%v", err)
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", disposition(filepath.Base(path)))
	h.Set("Accept-Ranges", "bytes")
	if size == 0 {
		return sendUnsized(w, file)
	}
	if start > 0 {
		if _, err := file.Seek(start, io.SeekStart); err != nil {
			return fsFail("download "+path, err)
		}
	}
	h.Set("Content-Length", strconv.FormatInt(n, 10))
	status := http.StatusOK
	if partial {
		status = http.StatusPartialContent
		h.Set("Content-Range", contentRange(start, n, size))
	}
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		copyOut(w, file, n) //nolint:errcheck // the length tells the client
	}
	return nil
}

var ioBuffers = sync.Pool{New: func() any { return new([ioBuffer]byte) }}

// copyOut is io.CopyN in large pieces.
func copyOut(w io.Writer, f io.Reader, n int64) error {
	b := ioBuffers.Get().(*[ioBuffer]byte)
	defer ioBuffers.Put(b)
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, io.LimitReader(f, n), b[:])
	return err
}

// sendUnsized sends a file whose size is given as 0: it is empty, or it is in /proc.
func sendUnsized(w http.ResponseWriter, f io.Reader) error {
	b := make([]byte, 64<<10)
	n, err := io.ReadFull(f, b)
	if err != nil {
		w.Header().Set("Content-Length", strconv.Itoa(n))
	}
	w.WriteHeader(http.StatusOK)
	if _, werr := w.Write(b[:n]); err == nil && werr == nil {
		io.Copy(w, f) //nolint:errcheck // chunked: a cut shows
	}
	return nil
}

// parseRange takes one range of RFC 9110 section 14.1.2. No range, or several,
// is the whole file: a server may ignore them.
func parseRange(header string, size int64) (start, n int64, partial bool, err error) {
	if header == "" {
		return 0, size, false, nil
	}
	bad := fmt.Errorf("the range %.64q is malformed, or not within the %d bytes of the file", header, size)
	spec, ok := strings.CutPrefix(header, "bytes=")
	if !ok {
		return 0, 0, false, bad
	}
	if strings.Contains(spec, ",") {
		return 0, size, false, nil
	}
	first, last, ok := strings.Cut(strings.Trim(spec, " \t"), "-")
	if !ok {
		return 0, 0, false, bad
	}
	a, errA := parseOffset(first)
	b, errB := parseOffset(last)
	switch {
	case first == "" && errB == nil && b > 0 && size > 0:
		n = min(b, size)
		return size - n, n, true, nil
	case first == "" || errA != nil || a >= size:
		return 0, 0, false, bad
	case last == "":
		return a, size - a, true, nil
	case errB != nil || b < a:
		return 0, 0, false, bad
	}
	return a, min(b, size-1) - a + 1, true, nil
}

func contentRange(start, n, size int64) string {
	return fmt.Sprintf("bytes %d-%d/%d", start, start+n-1, size)
}

// parseOffset takes digits only: ParseInt would take a sign.
func parseOffset(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	return int64(n), err
}

// disposition offers name in ASCII and, by RFC 5987, in full.
func disposition(name string) string {
	ascii := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || r == '"' || r == '\\' {
			return '_'
		}
		return r
	}, name)
	full := strings.ReplaceAll(url.QueryEscape(name), "+", "%20") // PathEscape leaves =, @ and :, which RFC 5987 does not allow
	return `attachment; filename="` + ascii + `"; filename*=UTF-8''` + full
}

type lineRange struct{ offset, limit int64 } // 1-based; limit 0: to the end

func parseLines(q url.Values) (*lineRange, error) {
	if !q.Has("offset") && !q.Has("limit") {
		return nil, nil
	}
	l := &lineRange{offset: 1}
	for name, to := range map[string]*int64{"offset": &l.offset, "limit": &l.limit} {
		if !q.Has(name) {
			continue
		}
		n, err := strconv.ParseInt(q.Get(name), 10, 64)
		if err != nil || n < 1 {
			return nil, reply.Fail(http.StatusBadRequest, reply.BadFile, "%s is %.32q: want a number, 1 or more", name, q.Get(name))
		}
		*to = n
	}
	return l, nil
}

// copyLines writes the lines of l joined by \n, without the last one's end and
// without \r before an end. A line may be longer than memory.
func copyLines(w io.Writer, r io.Reader, l lineRange) error {
	br := bufio.NewReaderSize(r, 64<<10)
	bw := bufio.NewWriterSize(w, 64<<10)
	fresh := true // nothing of this line was read yet
	cr := false   // a \r was held back: it may belong to the end of the line
	for line := int64(1); l.limit == 0 || line-l.offset < l.limit; {
		chunk, err := br.ReadSlice('\n')
		if line >= l.offset && len(chunk) > 0 {
			body := bytes.TrimSuffix(chunk, []byte("\n"))
			if fresh && line > l.offset {
				bw.WriteByte('\n') //nolint:errcheck // sticky
			}
			if cr && len(body) > 0 {
				bw.WriteByte('\r') //nolint:errcheck // sticky
			}
			fresh, cr = false, bytes.HasSuffix(body, []byte("\r"))
			bw.Write(bytes.TrimSuffix(body, []byte("\r"))) //nolint:errcheck // sticky
		}
		if err == nil {
			line, fresh, cr = line+1, true, false
			continue
		}
		if err != bufio.ErrBufferFull {
			break
		}
	}
	return bw.Flush()
}
