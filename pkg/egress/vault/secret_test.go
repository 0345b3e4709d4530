package vault

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// holders are what a value may be printed as a part of. hidden cannot be called by fmt.
type (
	holder struct{ S Secret }
	hidden struct{ s Secret }
	deep   struct {
		p *hidden
		m map[string]Secret
		l []Secret
		i any
	}
)

// TestSecretNowhere prints a value, and what holds it, in all the ways that Go has.
func TestSecretNowhere(t *testing.T) {
	const value = "hUnter2-value"
	s := NewSecret(value)
	v := create1(t, `{"credentials":[`+credential("c", value)+`],"bindings":[{"name":"b","match":{"hosts":["a.example.com"]},
		"auth":{"type":"bearer","credential":"c"}}]}`)
	forms := []string{
		value, fmt.Sprintf("%x", value), fmt.Sprintf("%X", value), fmt.Sprintf("% x", value), strings.Trim(fmt.Sprint([]byte(value)), "[]"),
	}
	seen := 0
	look := func(how, out string) {
		t.Helper()
		seen++
		for _, form := range forms {
			if strings.Contains(out, form) {
				t.Errorf("%s: %s", how, out)
			}
		}
	}
	all := []any{
		s, &s,
		holder{s},
		&holder{s},
		hidden{s},
		&hidden{s},
		deep{&hidden{s}, map[string]Secret{"k": s}, []Secret{s}, s},
		[]any{s, hidden{s}},
		map[string]any{"k": hidden{s}},
		v, *v, v.Credential("c"), *v.Credential("c"), v.Credential("c").Source, v.State(), v.Bindings(),
	}
	for _, a := range all {
		name := fmt.Sprintf("%T", a)
		for verb := range strings.SplitSeq("v +v #v s q x X d o b c U e f g t p T w +q #x #q -20s 020d", " ") {
			look(name+" %"+verb, fmt.Sprintf("%"+verb, a))
		}
		look(name+" error", fmt.Errorf("it is %v and %+v", a, a).Error())
		look(name+" joined", errors.Join(fmt.Errorf("%s", a), errors.New("x")).Error())
		if b, err := json.Marshal(a); err == nil {
			look(name+" json", string(b))
		}
		if b, err := xml.Marshal(a); err == nil {
			look(name+" xml", string(b))
		}
		var buf bytes.Buffer
		if gob.NewEncoder(&buf).Encode(a) == nil {
			look(name+" gob", buf.String())
		}
		var log bytes.Buffer
		for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
			slog.New(h).Info("x", "a", a, slog.Any("b", a), slog.Group("g", "c", a))
		}
		look(name+" slog", log.String())
	}
	if b, err := yaml.Marshal(holder{s}); err != nil || string(b) != "s: '[redacted]'\n" {
		t.Errorf("yaml: %s, %v", b, err)
	}
	if seen < 300 {
		t.Fatalf("only %d ways were looked at", seen)
	}
	if got := fmt.Sprintf("%v %+v %#v %s %d", s, s, s, holder{s}, s); got != "[redacted] [redacted] [redacted] {[redacted]} [redacted]" {
		t.Error(got)
	}
	if b, err := json.Marshal(map[string]any{"s": s}); string(b) != `{"s":"[redacted]"}` || err != nil {
		t.Error(string(b), err)
	}
	if s.Reveal() != value || (Secret{}).Reveal() != "" {
		t.Error("Reveal gives another value")
	}
}

// TestErrorsQuoteNothing breaks the JSON of a vault at each byte, in the same way with two values:
// the errors are the same, so they say nothing of a value.
func TestErrorsQuoteNothing(t *testing.T) {
	of := func(value string) string {
		return `{"credentials":[{"name":"c","source":{"type":"inline","value":"` + value + `"}},` + credential("d", "\n") + `],"bindings":[` +
			`{"name":"b","match":{"hosts":["a.example.com"]},"auth":{"type":"basic","credential":"c"}}]}`
	}
	one, two := of("ZQXJKV-ZQXJKV"), of("WYUHBG+WYUHBG")
	tried := 0
	for i := range len(one) {
		for _, with := range []string{"", `"`, `\`, "}", "1", "\x00", `":`, `,"`, "\xff"} {
			for _, broken := range []func(s string) string{
				func(s string) string { return s[:i] + with + s[i:] },
				func(s string) string { return s[:i] + with },
				func(s string) string { return s[:i] + with + s[i+1:] },
			} {
				_, err1 := Create([]byte(broken(one)))
				_, err2 := Create([]byte(broken(two)))
				if fmt.Sprintf("%v %#v", err1, errors.Unwrap(err1)) != fmt.Sprintf("%v %#v", err2, errors.Unwrap(err2)) {
					t.Fatalf("%s\n%v\n%v", broken(one), err1, err2)
				}
				tried++
			}
		}
	}
	if tried < 1000 {
		t.Fatalf("%d were tried", tried)
	}
}
