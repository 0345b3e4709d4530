package interpreter

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
	"testing/iotest"
)

// FuzzChannel: of what code writes to the channel of its driver only whole lines count
// that begin with the secret, in whatever pieces they come.
func FuzzChannel(f *testing.F) {
	f.Add([]byte("\ns3cret{\"type\":\"ready\"}\n\ns3cret{\"type\":\"result\",\"results\":{\"text/plain\":\"1\"},\"ack\":1}\n"))
	f.Add([]byte("s3cret{\"type\":\"done\",\"error\":{\"ename\":\"E\",\"traceback\":[\"x\"]}}"))
	f.Add([]byte("xs3cret{}\ns3crets3cret{}\ns3cret null\ns3cret{\"status\":1e3}\n"))
	f.Add(append(append([]byte("s3cret"), bytes.Repeat([]byte(" "), 9000)...), "{\"type\":\"done\"}\ns3cret{\"ack\":2}\n"...))
	const secret = "s3cret"
	f.Fuzz(func(t *testing.T, b []byte) {
		var want []frame
		lines := bytes.SplitAfter(b, []byte("\n"))
		for _, line := range lines[:len(lines)-1] { // the last has no end
			var fr frame
			if text, ok := bytes.CutPrefix(line, []byte(secret)); ok && len(text) <= maxFrame && json.Unmarshal(text, &fr) == nil {
				want = append(want, fr)
			}
		}
		for _, r := range []interface{ Read([]byte) (int, error) }{bytes.NewReader(b), iotest.OneByteReader(bytes.NewReader(b))} {
			var got []frame
			readFrames(r, secret, func(fr frame) { got = append(got, fr) })
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("%q is read as %+v, want %+v", b, got, want)
			}
		}
	})
}

// TestChannelIsBounded: a line without an end is neither kept nor the end of the reading.
func TestChannelIsBounded(t *testing.T) {
	long := append([]byte("s3cret"), bytes.Repeat([]byte("["), maxFrame+1)...)
	n := 0
	readFrames(bytes.NewReader(append(long, "\ns3cret{\"type\":\"done\"}\n"...)), "s3cret", func(frame) { n++ })
	if n != 1 {
		t.Errorf("%d frames behind a long line, want 1", n)
	}
}
