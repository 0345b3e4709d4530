package spec

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// FuzzCreate: a body either becomes a spec within the limits or an error of
// the request; nothing panics.
func FuzzCreate(f *testing.F) {
	f.Add([]byte(`{"image":{"uri":"python"},"entrypoint":["tail","-f","/dev/null"],"timeout":600,"env":{},` +
		`"resourceLimits":{"cpu":"1","memory":"2Gi"},"metadata":{"team":"t1"},"extensions":{},"secureAccess":false}`))
	f.Add([]byte(`{"image":{"uri":"python"},"networkPolicy":{"egress":[{"action":"allow","target":"::ffff:1.2.3.4"}]},` +
		`"extensions":{"sandboxd.idle":"true","sandboxd.allow":"10.0.0.0/8,"}}`))
	f.Add([]byte(`{"image":{"uri":"python"},"resourceLimits":{"cpu":"0.0000001","memory":"9223372036854775807","pids":"+5"}}`))
	o := &Offer{ParseRule: egress.ParseRule, ParsePolicy: egress.FromPolicy, NoVolumes: true}
	o.Complete()
	f.Fuzz(func(t *testing.T, body []byte) {
		var req wire.CreateRequest
		err := Decode(body, &req)
		if err == nil {
			spec, serr := o.Spec(&req)
			err = serr
			if err == nil {
				if spec.MemoryBytes < minMemory || spec.CPUMillis < minMillis || spec.Pids < minPids || len(spec.Labels) > maxLabels ||
					len(spec.Env) > maxEnv || spec.Timeout < 0 {
					t.Fatalf("out of bounds: %+v", spec)
				}
				return
			}
		}
		if c := errs.CodeOf(err); c != errs.Invalid && c != errs.Unsupported {
			t.Fatalf("%s: %v", c, err)
		}
		if len(err.Error()) > 2000 {
			t.Fatalf("the error echoes %d bytes", len(err.Error()))
		}
	})
}

func FuzzLabelFilter(f *testing.F) {
	f.Add("a=b&c=d%26e")
	f.Add("%zz")
	f.Fuzz(func(t *testing.T, q string) {
		m, err := parseLabelFilter(q, nil)
		if err == nil && len(m) > maxLabels {
			t.Fatalf("%d pairs", len(m))
		}
		if _, err := ParseFilter("metadata=" + q); err != nil && errs.CodeOf(err) != errs.Invalid {
			t.Fatal(err)
		}
	})
}

func FuzzResources(f *testing.F) {
	for _, s := range []string{"512Mi", "1", "0.5", "500m", "NaN", "1e9", "-1", "", "9223372036854775807Ti"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseSize(s); err == nil && n < 0 {
			t.Fatalf("size %q is %d", s, n)
		}
		if n, err := parseCPU(s); err == nil && (n < 0 || n > 1e12) {
			t.Fatalf("cpu %q is %d", s, n)
		}
	})
}
