package image

import (
	"encoding/json"
	"path"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// FuzzImageConfig: the config of an image that may be kept starts a program: bounded words
// without NUL, variables with names, a clean directory.
func FuzzImageConfig(f *testing.F) {
	f.Add([]byte(`{"env":["A=1"],"workdir":"/","user":"1:1","entrypoint":["sh"],"cmd":["-c"],"labels":{"a":"b"}}`))
	f.Add([]byte(`{"stopSignal":"SIGRTMIN+3","platform":"linux/arm/v7","workdir":"/"}`))
	f.Add([]byte(`{"env":["=1","A","B=\u0000"],"workdir":"/a/../b","user":"x\ny"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c record.ImageConfig
		if json.Unmarshal(b, &c) != nil {
			return
		}
		if err := checkConfig(&c); err != nil {
			if !errs.Is(err, errs.Invalid) || len(err.Error()) > 4<<10 {
				t.Fatalf("%q: %v", b, err)
			}
			return
		}
		for _, kv := range c.Env {
			if name, _, ok := strings.Cut(kv, "="); !ok || !record.IsVariable(name) || strings.ContainsRune(kv, 0) {
				t.Fatalf("%q sets %q", b, kv)
			}
		}
		if n := (&record.Spec{Image: record.Image{Config: c}}).StopWith(); n < 1 || n > 64 {
			t.Fatalf("%q is stopped with %d", b, n)
		}
		clean := c.Workdir == "/" || c.Workdir[0] == '/' && path.Clean(c.Workdir) == c.Workdir
		if strings.ContainsRune(strings.Join(c.Command(nil), "")+c.User+c.Workdir, 0) || !clean {
			t.Fatalf("%q is %+v", b, c)
		}
	})
}
