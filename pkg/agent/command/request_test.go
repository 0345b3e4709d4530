package command

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// FuzzCheck: of a request that is accepted the kernel can make a process: one command,
// without NUL, variables with names, and user ids that are none of the kernel's own words.
func FuzzCheck(f *testing.F) {
	f.Add([]byte(`{"command":"ls -l","cwd":"~/x","envs":{"A":"1"},"uid":1000,"gid":1000,"timeout":5000}`))
	f.Add([]byte(`{"argv":["sh","-c","x\u0000"],"background":true,"stdin":true}`))
	f.Add([]byte(`{"argv":[""],"uid":4294967295,"gid":-1,"envs":{"A=B":"\u0000"},"timeout":-9223372036854775808}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var req agent.CommandRequest
		if json.Unmarshal(b, &req) != nil {
			return
		}
		if err := Check(&req); err != nil {
			if len(err.Error()) > 500 {
				t.Fatalf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		words := append([]string{req.Command, req.Cwd}, req.Argv...)
		for k, v := range req.Envs {
			if words = append(words, v); !record.IsVariable(k) {
				t.Fatalf("%q sets %q", b, k)
			}
		}
		for _, w := range words {
			if strings.ContainsRune(w, 0) {
				t.Fatalf("%q has the word %q", b, w)
			}
		}
		for _, id := range []*int64{req.UID, req.GID} {
			if id != nil && (*id < 0 || *id >= 1<<32-1) {
				t.Fatalf("%q has the id %d", b, *id)
			}
		}
		if (req.Command == "") == (len(req.Argv) == 0) || req.Timeout < 0 || req.GID != nil && req.UID == nil {
			t.Fatalf("%q is %+v", b, req)
		}
	})
}
