package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestBootstrapRoundTrip(t *testing.T) {
	b := Bootstrap{
		Protocol: Protocol, Token: "secret", Env: map[string]string{"A": "ä\nb"}, Entrypoint: []string{"tail", "-f"},
		User: "nobody:nogroup",
	}
	f, err := b.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write([]byte("x")); err == nil {
		t.Error("the bootstrap file is not sealed")
	}
	got, err := ReadBootstrap(f)
	if err != nil {
		t.Fatal(err)
	}
	if got.Token != "secret" || got.Env["A"] != "ä\nb" || got.User != b.User {
		t.Errorf("got %+v", got)
	}
}

func TestBootstrapRefuses(t *testing.T) {
	for name, in := range map[string]string{
		"nothing":   "",
		"garbage":   "hello\n",
		"no token":  `{"protocol":1}` + "\n",
		"protocol":  `{"protocol":9,"token":"t"}` + "\n",
		"cut":       `{"protocol":1,"tok`,
		"too long":  strings.Repeat(" ", MaxBootstrap+1),
		"wrong env": `{"protocol":1,"token":"t","env":[1]}` + "\n",
	} {
		if _, err := ReadBootstrap(strings.NewReader(in)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	big := Bootstrap{Env: map[string]string{"A": strings.Repeat("a", MaxBootstrap)}}
	if _, err := big.File(); err == nil {
		t.Error("a bootstrap that PID 1 would refuse was written")
	}
}

func TestObituary(t *testing.T) {
	good, _ := json.Marshal(Obituary{ExitCode: 137, Signal: "SIGKILL", Message: "a\x1b[2Jb\u009bc"})
	o, err := ParseObituary(good)
	if err != nil || o.ExitCode != 137 || o.Message != "a [2Jb c" {
		t.Errorf("got %+v, %v", o, err)
	}
	for _, signal := range []string{"SIGQUIT", "signal 37"} { // that of RTMIN+3 has no name
		b, _ := json.Marshal(Obituary{ExitCode: 165, Signal: signal})
		if o, err := ParseObituary(b); err != nil || o.Signal != signal {
			t.Errorf("%s: %+v, %v", signal, o, err)
		}
	}
	for _, bad := range []string{
		`{"exitCode":1,"signal":"signal 1000"}`, `{"exitCode":1,"signal":"signal"}`,
		"", "{", "[]", `{"exitCode":-1}`, `{"exitCode":256}`, `{"exitCode":1e9}`, `{"signal":"rm -rf"}`,
		`{"message":"` + strings.Repeat("x", MaxObituary) + `"}`,
	} {
		if o, err := ParseObituary([]byte(bad)); err == nil {
			t.Errorf("%.40q: accepted as %+v", bad, o)
		}
	}
}

func TestFrames(t *testing.T) {
	id := strings.Repeat("ab", 16)
	big := bytes.Repeat([]byte{0, 0xff, '\n'}, MaxFrame/3)
	body := AppendFrame(nil, FrameControl, []byte(`{"id":"`+id+`"}`))
	body = AppendFrame(body, FrameStdout, big)
	body = AppendFrame(body, FrameControl, nil)
	body = AppendFrame(body, FrameStderr, []byte("e"))
	body = AppendFrame(body, FrameEnd, []byte(`{"exit_code":7}`))
	f := NewFrameReader(bytes.NewReader(body))
	_, p, err := f.Next()
	if i, e := ParseInit(p); err != nil || e != nil || i.ID != id {
		t.Fatal(i, err, e)
	}
	if s, p, err := f.Next(); s != FrameStdout || !bytes.Equal(p, big) || err != nil {
		t.Fatal(s, len(p), err)
	}
	for _, want := range []byte{FrameControl, FrameStderr} {
		if s, _, err := f.Next(); s != want || err != nil {
			t.Fatal(s, err)
		}
	}
	_, p, err = f.Next()
	if x, e := ParseExit(p); err != nil || e != nil || x.ExitCode != 7 {
		t.Fatal(x, err, e)
	}
	if _, _, err := f.Next(); err != io.EOF {
		t.Fatal(err)
	}

	for cut := range 60 { // wherever the connection breaks, it is no good end
		f := NewFrameReader(bytes.NewReader(body[:cut]))
		var err error
		for err == nil {
			_, _, err = f.Next()
		}
		if cut != FrameHeader+41 && err == io.EOF {
			t.Errorf("cut after %d bytes: %v", cut, err)
		}
	}
	for name, in := range map[string][]byte{
		"huge":            {0, 0xff, 0xff, 0xff, 0xff},
		"unknown stream":  {4, 0, 0, 0, 0},
		"first is output": {1, 0, 0, 0, 0},
		"after the end":   {0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 1, 0, 0, 0, 0},
	} {
		f := NewFrameReader(bytes.NewReader(in))
		var err error
		for err == nil {
			_, _, err = f.Next()
		}
		if errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAmount(t *testing.T) {
	for n, want := range map[int64]string{64 << 20: "64Mi", 1 << 30: "1Gi", 1536 << 20: "1536Mi", 1000: "1000 bytes", 3 << 40: "3Ti"} {
		if got := amount(n); got != want {
			t.Errorf("%d is %s, want %s", n, got, want)
		}
	}
}
