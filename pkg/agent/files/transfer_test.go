package files

import (
	"bufio"
	"bytes"
	"mime"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// FuzzMetadata: a mode that is accepted is one of chmod's, and is shown as it was sent.
func FuzzMetadata(f *testing.F) {
	f.Add([]byte(`{"path":"/a","owner":null,"mode":644}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		path, m, err := metadataOf(b)
		if err != nil {
			return
		}
		mode, err := fromDigits(m.Mode)
		if path == "" || err != nil || mode > 0o7777 || digits(mode) != m.Mode {
			t.Fatalf("%q %+v %o", path, m, mode)
		}
	})
}

// FuzzDownload: a range lies within the file, and net/http reads it as the same; a client
// finds the name of the file in the header as it is.
func FuzzDownload(f *testing.F) {
	f.Add("bytes=0-", int64(5), "a.txt")
	f.Add("bytes=-3", int64(5), `it's "b" \ c`)
	f.Add("bytes=4-9223372036854775807", int64(5), "12:30 a@b=c.log")
	f.Add("bytes= 1-2 ,3-4", int64(5), "\u00e4\xff\n")
	f.Add("bytes=\f-1", int64(6), "a;b,c%20")
	f.Fuzz(func(t *testing.T, header string, size int64, name string) {
		checkDisposition(t, name)
		if size &= 1<<20 - 1; strings.ContainsAny(header, "\r\n") {
			return
		}
		start, n, partial, err := parseRange(header, size)
		if err != nil {
			return
		}
		if start < 0 || n < 0 || start+n > size || partial && n == 0 || !partial && n != size {
			t.Fatalf("%q of %d bytes: %d from %d on", header, size, n, start)
		}
		if !partial {
			return
		}
		r := httptest.NewRequest(http.MethodHead, "/", nil)
		r.Header.Set("Range", header)
		w := httptest.NewRecorder()
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(make([]byte, size)))
		if want := contentRange(start, n, size); w.Code != http.StatusPartialContent || w.Header().Get("Content-Range") != want {
			t.Fatalf("%q of %d bytes is %q, net/http says %d %q", header, size, want, w.Code, w.Header().Get("Content-Range"))
		}
	})
}

func checkDisposition(t *testing.T, name string) {
	t.Helper()
	if name == "" || strings.ContainsAny(name, "/\x00") {
		return // no file has such a name
	}
	h := disposition(name)
	kind, params, err := mime.ParseMediaType(h)
	if err != nil || kind != "attachment" || params["filename"] != name {
		t.Fatalf("%q is %s, which is read as %q, %v", name, h, params["filename"], err)
	}
	if strings.IndexFunc(h, func(r rune) bool { return r < ' ' || r > '~' }) >= 0 {
		t.Fatalf("%q is %q", name, h)
	}
}

// FuzzCopyLines: the lines are those that a scanner finds, also where they are longer
// than a buffer.
func FuzzCopyLines(f *testing.F) {
	f.Add([]byte("a\r\nb\n\nc\r"), uint8(2), uint8(3), uint8(0))
	f.Add([]byte("x\r\r\n\r\ny\n"), uint8(1), uint8(0), uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, offset, limit, long uint8) {
		if long > 0 { // up to the end of the buffer, and over it
			b = append(bytes.Repeat([]byte("."), 64<<10-int(long)), b...)
		}
		sc := bufio.NewScanner(bytes.NewReader(b))
		sc.Buffer(nil, 1<<20)
		var want []string
		for n := 1; sc.Scan(); n++ {
			if n >= max(1, int(offset)) && (limit == 0 || n < max(1, int(offset))+int(limit)) {
				want = append(want, sc.Text())
			}
		}
		var out bytes.Buffer
		if err := copyLines(&out, bytes.NewReader(b), lineRange{max(1, int64(offset)), int64(limit)}); err != nil {
			t.Fatal(err)
		}
		if out.String() != strings.Join(want, "\n") {
			t.Fatalf("%d lines from %d on of %.200q are %.200q, want %.200q", limit, offset, b, out.String(), want)
		}
	})
}
