package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Where a dying agent writes, relative to the root of the guest. The obituary is
// renamed into place after the output is written, so if there is an obituary, the
// output is complete. The guest could write both: open them with O_NOFOLLOW, as regular
// files, and read no more than the limits.
const (
	StateDir     = "/.sandboxd" // in the guest; 0700 root, made by the agent
	ObituaryFile = ".sandboxd/obituary.json"
	OutputFile   = ".sandboxd/last-output"
	// CrashFile is where the Go runtime writes why it ends the agent. If that is no
	// panic, there is no obituary. Most often the file is empty.
	CrashFile = ".sandboxd/crash"

	MaxObituary   = 4 << 10
	MaxLastOutput = 8 << 10
)

// Obituary says how the entrypoint ended.
type Obituary struct {
	ExitCode int    `json:"exitCode"`          // 0..255; 128+n after signal n; 126, 127: could not start
	Signal   string `json:"signal,omitempty"`  // "SIGKILL", or empty
	Message  string `json:"message,omitempty"` // why it could not start, for people; hostile
	Reason   string `json:"reason,omitempty"`  // Reason…, as the agent has found it
}

// unnamed matches what agents call a real-time signal.
var unnamed = regexp.MustCompile(`^signal [1-9][0-9]?$`)

// ParseObituary decodes an obituary. It fails unless the fields are in range, and cuts
// Message to 1 KiB of printable text. The guest may have written anything there, so the
// fields may be false.
func ParseObituary(b []byte) (Obituary, error) {
	var o Obituary
	if len(b) > MaxObituary {
		return o, fmt.Errorf("obituary has %d bytes, at most %d are read", len(b), MaxObituary)
	}
	if err := json.Unmarshal(b, &o); err != nil {
		return Obituary{}, fmt.Errorf("decode obituary: %w", err)
	}
	if o.ExitCode < 0 || o.ExitCode > 255 {
		return Obituary{}, fmt.Errorf("obituary has exit code %d", o.ExitCode)
	}
	if o.Signal != "" && unix.SignalNum(o.Signal) == 0 && !unnamed.MatchString(o.Signal) {
		return Obituary{}, errors.New("obituary has an unknown signal")
	}
	o.Message, o.Reason = printable(o.Message, 1<<10), printable(o.Reason, 32)
	return o, nil
}

// printable returns at most limit bytes of s, with spaces in place of controls, of what turns the
// direction of text, and of what is not UTF-8.
func printable(s string, limit int) string {
	s = s[:min(len(s), limit)] // half a rune becomes a space below
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return ' '
		}
		return r
	}, s)
}
