package support

import (
	"bytes"
	"regexp"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A bundle has the log's operations, warnings and errors, and what systemd and the Go
// runtime log about the daemon. Requests, refused flows and looked-up names are left
// out: clients typed them and guests made them.
var (
	ours  = regexp.MustCompile(`^(\S+ \S+ sandboxd\[\d+\]: )?(time=\d\S+ )?level=[A-Z]`)
	inits = regexp.MustCompile(`^\S+ \S+ systemd\[\d+\]: `)
	// The place of a crash: these lines have no value of the program.
	crash = regexp.MustCompile(`^(\S+ \S+ sandboxd\[\d+\]: )?(fatal error: |SIG[A-Z]+: |goroutine \d+ .*\[.*\]:$|\t\S+\.go:\d+)`)
)

// frank are the keys whose values are the daemon's own words, besides step_*.
var frank = map[string]bool{
	"level": true, "msg": true, "op": true, "runtime": true, "dur": true, "start": true, "queued": true, "reason": true, "outcome": true,
	"status": true, "state": true, "stood": true, "bytes": true, "hung_up": true, "actor": true, "lost": true, "count": true, "on": true,
	"link": true, "links": true, "set": true, "table": true, "sandboxes": true, "addresses": true, "flows": true, "route": true,
	"path": true, "group": true, "hint": true, "from": true, "to": true, "kept": true, "stack": true,
}

// ownRequest matches a request id that the daemon chose; others are from clients.
var ownRequest = regexp.MustCompile(`^[0-9a-f]{32}$`)

// quoted matches the quoted parts of an error: names, arguments, values that somebody
// sent.
var quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// openLog keeps the parts of a log that may be shown: whole lines, and in each the
// fields that hold only the daemon's words. It leaves out everything it does not know.
func openLog(text []byte) []byte {
	var out bytes.Buffer
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		switch head := ours.FindString(line); {
		case head != "":
			head = head[:strings.LastIndex(head, "level=")]
			if fields, ok := openFields(line[len(head):]); ok {
				out.WriteString(head + fields + "\n")
			}
		case inits.MatchString(line), crash.MatchString(line):
			out.WriteString(line + "\n")
		}
	}
	return out.Bytes()
}

// openFields is openLog for the fields of a line; it returns false for a line that is
// left out.
func openFields(line string) (string, bool) {
	fields, ok := parseFields(line)
	of := map[string]string{}
	for _, f := range fields {
		of[f.key] = f.value
	}
	if !ok || of["msg"] != "operation" && of["level"] != "WARN" && of["level"] != "ERROR" {
		return "", false
	}
	var out []string
	for _, f := range fields {
		switch {
		case frank[f.key], strings.HasPrefix(f.key, "step_"):
		case f.key == "sandbox" && record.IsID(f.value), f.key == "snapshot" && record.IsSnapshotID(f.value):
		case f.key == "request" && ownRequest.MatchString(f.value):
		case f.key == "err" && (of["outcome"] == "" || of["outcome"] == string(errs.Internal)):
			// An error about a client's mistake quotes the client; this one is about
			// the host.
			f.value = quoted.ReplaceAllString(f.value, strconv.Quote(gone))
		default:
			f.value = gone
		}
		if strings.ContainsAny(f.value, " \"=\n\t") {
			f.value = strconv.Quote(f.value)
		}
		out = append(out, f.key+"="+f.value)
	}
	return strings.Join(out, " "), true
}

type field struct{ key, value string }

// parseFields parses a line of slog's TextHandler. It returns false for any other line,
// such as one that journald cut.
func parseFields(line string) (all []field, ok bool) {
	for line != "" {
		key, rest, found := strings.Cut(line, "=")
		if !found || key == "" || strings.ContainsAny(key, " \"") {
			return nil, false
		}
		value, next, _ := strings.Cut(rest, " ")
		if strings.HasPrefix(rest, `"`) {
			q, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return nil, false
			}
			if value, err = strconv.Unquote(q); err != nil {
				return nil, false
			}
			next = strings.TrimPrefix(rest[len(q):], " ")
		}
		all, line = append(all, field{key, value}), next
	}
	return all, true
}
