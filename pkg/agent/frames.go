package agent

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// MaxFrame bounds the payload of a frame, in bytes.
const MaxFrame = 1 << 20

// FrameHeader is the length of a frame's header, in bytes.
const FrameHeader = 5

// The streams of frames.
const (
	FrameControl = 0
	FrameStdout  = 1
	FrameStderr  = 2
	FrameEnd     = 3
)

// FrameInit is the JSON of the first control frame.
type FrameInit struct {
	ID string `json:"id"`
	// Resumes: a client whose connection breaks may come back, by GET
	// /command/{id}/frames, and standard input may be sent in parts.
	Resumes bool `json:"resumes,omitempty"`
	// Stdout and Stderr are the numbers of the bytes with which the streams go on, for a
	// client that came back.
	Stdout int64 `json:"stdout,omitempty"`
	Stderr int64 `json:"stderr,omitempty"`
}

// FrameExit is the JSON of the exit frame.
type FrameExit struct {
	ExitCode      int    `json:"exit_code"`        // 128+n after signal n; 126, 127: could not start
	Signal        string `json:"signal,omitempty"` // "SIGKILL"
	TimedOut      bool   `json:"timed_out,omitempty"`
	Error         string `json:"error,omitempty"`          // why it could not start
	Reason        string `json:"reason,omitempty"`         // Reason…
	Hint          string `json:"hint,omitempty"`           // which limit was met, for people
	ExecutionTime int64  `json:"execution_time,omitempty"` // ms
}

// AppendFrame appends one frame to dst. Payload must not exceed MaxFrame.
func AppendFrame(dst []byte, stream byte, payload []byte) []byte {
	return append(AppendFrameHeader(dst, stream, len(payload)), payload...)
}

// AppendFrameHeader appends the header of a frame with a payload of size bytes.
func AppendFrameHeader(dst []byte, stream byte, size int) []byte {
	return binary.BigEndian.AppendUint32(append(dst, stream), uint32(size))
}

// FrameReader splits a body into frames. It holds at most one frame and allocates no
// more than has arrived, whatever length a header gives.
type FrameReader struct {
	r    io.Reader
	buf  []byte
	init bool
	done bool
}

// NewFrameReader reads frames from r; give it a buffered reader if reads from r are
// expensive.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: r} }

// Next returns the next frame; payload is valid until the following call. It returns
// io.EOF at the end of a complete body. Any other error, such as io.ErrUnexpectedEOF,
// means that the body was cut off or is not a body of frames.
func (f *FrameReader) Next() (stream byte, payload []byte, err error) {
	var h [FrameHeader]byte
	if _, err := io.ReadFull(f.r, h[:]); err != nil {
		if err == io.EOF && !f.init {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	stream = h[0]
	n := int(binary.BigEndian.Uint32(h[1:]))
	switch {
	case stream > FrameEnd:
		return 0, nil, fmt.Errorf("read frame: unknown stream %d", stream)
	case n > MaxFrame:
		return 0, nil, fmt.Errorf("read frame: %d bytes, at most %d are allowed", n, MaxFrame)
	case !f.init && stream != FrameControl:
		return 0, nil, fmt.Errorf("read frame: the first frame has stream %d instead of %d", stream, FrameControl)
	case f.done:
		return 0, nil, errors.New("read frame: another frame follows the exit frame")
	}
	f.init = true
	f.done = stream == FrameEnd
	if err := f.fill(n); err != nil {
		return 0, nil, err
	}
	return stream, f.buf[:n], nil
}

// fill reads n bytes into buf, which grows with what arrives.
func (f *FrameReader) fill(n int) error {
	for have := 0; have < n; {
		if have == len(f.buf) {
			f.buf = append(f.buf, make([]byte, min(n-have, max(32<<10, len(f.buf))))...)
		}
		m, err := io.ReadFull(f.r, f.buf[have:min(n, len(f.buf))])
		have += m
		if err != nil {
			return io.ErrUnexpectedEOF
		}
	}
	return nil
}

// ParseInit decodes the first control frame.
func ParseInit(payload []byte) (FrameInit, error) {
	var i FrameInit
	if err := json.Unmarshal(payload, &i); err != nil {
		return i, fmt.Errorf("decode init frame: %w", err)
	}
	if !IsCommandID(i.ID) {
		return i, errors.New("decode init frame: it has no valid command id")
	}
	if i.Stdout < 0 || i.Stderr < 0 {
		return i, errors.New("decode init frame: a number of bytes is negative")
	}
	return i, nil
}

// ParseExit decodes an exit frame. Its numbers are in range afterwards.
func ParseExit(payload []byte) (FrameExit, error) {
	var e FrameExit
	if err := json.Unmarshal(payload, &e); err != nil {
		return FrameExit{}, fmt.Errorf("decode exit frame: %w", err)
	}
	if e.ExitCode < 0 || e.ExitCode > 255 || e.ExecutionTime < 0 {
		return FrameExit{}, fmt.Errorf("decode exit frame: invalid exit code %d", e.ExitCode)
	}
	e.Signal, e.Error = printable(e.Signal, 32), printable(e.Error, 4<<10)
	e.Reason, e.Hint = printable(e.Reason, 32), printable(e.Hint, 1<<10)
	return e, nil
}

// IsCommandID reports whether s has the form of a command's id: 32 lower-case
// hexadecimal digits, or EntrypointID.
func IsCommandID(s string) bool {
	if s == EntrypointID {
		return true
	}
	if len(s) != 32 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
