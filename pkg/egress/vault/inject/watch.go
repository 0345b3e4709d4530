package inject

import (
	"bytes"
	"io"
)

// A watch is a reader that looks for values in the body of an answer while it is read.
//
// The guest may choose the text of an answer, and sees when each byte of it comes. So what is held
// back must not tell how much of a value it has: it depends on places, and never on what a needle
// has there. Without hide nothing is held back. With it these bytes are, until more come:
//
//	… bytes that are sent on │ those behind the last end of a line, and fewer than the longest needle
//
// or, if a needle has an end of a line in it, as many as the longest needle but one. The search goes
// over each byte once for each needle. Memory is for a chunk and twice the longest needle.
type watch struct {
	src     io.ReadCloser
	needles []needle
	found   func(*needle)
	hide    bool
	// end is called at the end of src.
	end func()

	longest int
	lines   bool // no needle has an end of a line

	raw   []byte // as it has come: what may be read, and before it what a needle may begin in
	show  []byte // raw with "*" for values; with hide only
	next  []int  // of each needle: where in raw it may begin next
	sent  int    // of show was read
	ready int    // of show may be read
	room  int    // how much is read at once: more of a source that has more
	err   error
}

func newWatch(src io.ReadCloser, needles []needle, hide bool, found func(*needle), end func()) *watch {
	w := &watch{src: src, needles: needles, hide: hide, found: found, end: end, lines: true, room: chunk / 8}
	w.next = make([]int, len(needles))
	for _, n := range needles {
		w.longest = max(w.longest, len(n.text))
		w.lines = w.lines && !bytes.Contains(n.text, []byte("\n"))
	}
	return w
}

// Read returns what has come, but for what is held back.
func (w *watch) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for w.sent == w.ready {
		if w.err != nil {
			return 0, w.err
		}
		w.fill()
	}
	from := w.raw
	if w.hide {
		from = w.show
	}
	n := copy(p, from[w.sent:w.ready])
	w.sent += n
	return n, nil
}

// fill reads once from the source. What came before an error may be read before it.
func (w *watch) fill() {
	w.makeRoom()
	had := len(w.raw)
	n, err := w.src.Read(w.raw[had : had+w.room])
	w.raw = w.raw[:had+n]
	if w.hide {
		w.show = append(w.show, w.raw[had:]...)
	}
	if n == w.room {
		w.room = min(2*w.room, chunk)
	}
	w.look(had)
	w.ready = len(w.raw)
	if w.err = err; err == io.EOF {
		w.end()
	}
	if w.hide && err == nil {
		held := max(0, w.longest-1)
		if w.lines {
			held = min(held, len(w.raw)-1-bytes.LastIndexByte(w.raw, '\n'))
		}
		w.ready = max(w.sent, len(w.raw)-held)
	}
}

// makeRoom makes room in raw for one read, and forgets what no needle can begin in any more.
func (w *watch) makeRoom() {
	if cap(w.raw)-len(w.raw) >= w.room {
		return
	}
	cut := max(0, min(w.sent, len(w.raw)-w.longest))
	if had := len(w.raw) - cut; cap(w.raw) < had+w.longest+w.room {
		w.raw = append(make([]byte, 0, had+w.longest+w.room), w.raw[cut:]...)
	} else {
		w.raw = w.raw[:copy(w.raw, w.raw[cut:])]
	}
	if w.hide {
		w.show = w.show[:copy(w.show, w.show[cut:])]
	}
	w.sent, w.ready = w.sent-cut, w.ready-cut
	for i := range w.next {
		w.next[i] = max(0, w.next[i]-cut)
	}
}

// look looks for needles that end at or behind had.
func (w *watch) look(had int) {
	for i := range w.needles {
		n := &w.needles[i]
		for {
			from := max(w.next[i], had-len(n.text)+1)
			if from >= len(w.raw) {
				break
			}
			at := bytes.Index(w.raw[from:], n.text)
			if at < 0 {
				break
			}
			w.next[i] = from + at + len(n.text)
			w.found(n)
			if w.hide {
				stars(w.show[from+at : w.next[i]])
			}
		}
	}
}

// stars writes "*" over b.
func stars(b []byte) {
	for i := range b {
		b[i] = '*'
	}
}

// Close closes the source.
func (w *watch) Close() error { return w.src.Close() }
