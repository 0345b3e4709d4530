package record

import (
	"encoding/json"
	"syscall"
	"testing"
)

func TestSignal(t *testing.T) {
	for name, want := range map[string]syscall.Signal{
		"SIGQUIT": 3, "QUIT": 3, "quit": 3, "sigQuit": 3, "3": 3, "64": 64, "WINCH": syscall.SIGWINCH, "SIGRTMIN": 34, "RTMIN": 34,
		"SIGRTMIN+3": 37, "rtmin+15": 49, "RTMIN+30": 64, "RTMAX": 64, "SIGRTMAX-14": 50, "SIGKILL": 9,
		"": 0, "0": 0, "65": 0, "-1": 0, "SIG": 0, "SIGSIGQUIT": 0, "RTMIN-1": 0, "RTMAX+1": 0, "RTMIN+31": 0, "RTMIN+": 0, "RTMIN++3": 0,
		"RTMIN+-3": 0, "RTMINX3": 0, "QUIT ": 0, "SIGNONE": 0,
	} {
		if got := Signal(name); got != want {
			t.Errorf("%q is %d, want %d", name, got, want)
		}
	}
}

// TestStopWith: the client's signal wins over the image's. A record of an earlier release, which
// has neither, and a word that is no signal mean SIGTERM, as for docker.
func TestStopWith(t *testing.T) {
	for text, want := range map[string]syscall.Signal{
		`{}`:                                syscall.SIGTERM,
		`{"image":{"config":{"user":"x"}}}`: syscall.SIGTERM,
		`{"image":{"config":{"stopSignal":"SIGQUIT"}}}`:                    syscall.SIGQUIT,
		`{"image":{"config":{"stopSignal":"RTMIN+3"}}}`:                    37,
		`{"image":{"config":{"stopSignal":"SIGNONE"}}}`:                    syscall.SIGTERM,
		`{"image":{"config":{"stopSignal":"SIGQUIT"}},"stopSignal":"INT"}`: syscall.SIGINT,
		`{"stopSignal":"10"}`:                                              syscall.SIGUSR1,
	} {
		var s Spec
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			t.Fatal(err)
		}
		if got := s.StopWith(); got != want {
			t.Errorf("%s is stopped with %d, want %d", text, got, want)
		}
	}
}
