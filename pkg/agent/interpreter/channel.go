package interpreter

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
)

// maxFrame bounds a frame of a driver, in bytes. The largest frame is a result of 3
// MiB, in JSON.
const maxFrame = 8 << 20

// A frame is a message of a driver: a line with the context's secret and this struct as
// JSON.
type frame struct {
	Type    string            `json:"type"`              // ready result done
	Results map[string]string `json:"results,omitempty"` // of result: formats by MIME type
	Ack     int               `json:"ack,omitempty"`     // of result: the driver waits for this number in a line
	Error   *Error            `json:"error,omitempty"`   // of done: the code failed
	Status  int               `json:"status,omitempty"`  // of done: the exit status of a shell; of settled: the number answered
}

// Error says how code failed, in the words of its language.
type Error struct {
	Name      string   `json:"ename"`
	Value     string   `json:"evalue"`
	Traceback []string `json:"traceback"`
}

// readFrames calls f with each frame that r carries, until r ends. It skips lines that
// do not begin with secret, that are too long or that are no JSON: code may find the
// descriptor and write to it, which must neither end the reading nor fill memory.
func readFrames(r io.Reader, secret string, f func(frame)) {
	b := bufio.NewReaderSize(r, 4<<10)
	prefix := []byte(secret)
	for {
		line, err := readLine(b, prefix)
		if err != nil {
			return
		}
		var fr frame
		if line != nil && json.Unmarshal(line, &fr) == nil {
			f(fr)
		}
	}
}

// readLine returns what follows prefix in the next line, or nil if the line does
// not begin with it or exceeds maxFrame.
func readLine(b *bufio.Reader, prefix []byte) ([]byte, error) {
	var line []byte
	for first, keep := true, true; ; first = false {
		part, err := b.ReadSlice('\n')
		if first {
			part, keep = bytes.CutPrefix(part, prefix)
		}
		if keep && len(line)+len(part) > maxFrame {
			keep, line = false, nil
		}
		if keep {
			line = append(line, part...)
		}
		switch {
		case err == nil && !keep:
			return nil, nil
		case err == nil:
			return line, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
	}
}
