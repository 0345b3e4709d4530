package network

import (
	"encoding/json"
	"testing"
)

// TestRuleOf: what the flags take is split, and all of it is sent.
func TestRuleOf(t *testing.T) {
	for text, want := range map[string]string{
		"1.2.3.4":                `{"action":"allow","target":"1.2.3.4"}`,
		"203.0.113.0/24":         `{"action":"allow","target":"203.0.113.0/24"}`,
		"203.0.113.0/24:443":     `{"action":"allow","target":"203.0.113.0/24","ports":[443]}`,
		"203.0.113.0/24:443/tcp": `{"action":"allow","target":"203.0.113.0/24","ports":[443],"protocol":"tcp"}`,
		"1.2.3.4:8000-8100/udp":  `{"action":"allow","target":"1.2.3.4","ports":["8000-8100"],"protocol":"udp"}`,
		"1.2.3.4/icmp":           `{"action":"allow","target":"1.2.3.4","protocol":"icmp"}`,
		"1.2.3.4:":               `{"action":"allow","target":"1.2.3.4","ports":[""]}`,
		"1.2.3.4:http":           `{"action":"allow","target":"1.2.3.4","ports":["http"]}`,
		"1.2.3.4/":               `{"action":"allow","target":"1.2.3.4/"}`,
		"2001:db8::1":            `{"action":"allow","target":"2001:db8::1"}`,
		"pypi.org":               `{"action":"allow","target":"pypi.org"}`,
	} {
		b, err := json.Marshal(ruleOf("allow", text))
		if got := string(b); err != nil || got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
