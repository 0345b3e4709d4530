package api

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The keys of resourceLimits.
const (
	keyMemory    = "memory"
	keyCPU       = "cpu"
	keyPids      = "pids"
	keyDisk      = "disk"
	keyShares    = "cpuShares"
	keyReadBps   = "ioReadBps"
	keyWriteBps  = "ioWriteBps"
	keyReadIOPS  = "ioReadIops"
	keyWriteIOPS = "ioWriteIops"
	keyShm       = "shm"
	keyLog       = "logSize"
)

// bad are amounts that no limit takes, whatever it counts.
var bad = []string{"-1", "0", "NaN", "Inf", "+5", "1e9", "", " 1Mi", "lots", "0x10", "1.5", "99999999999999999999", strings.Repeat("9", 65)}

// TestBadLimits: what can never be is refused, in a create and in an update,
// with the name of the key.
func TestBadLimits(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	try := func(key, v string) {
		t.Helper()
		limits, err := json.Marshal(map[string]map[string]string{"resourceLimits": {key: v}})
		if err != nil {
			t.Fatal(err)
		}
		create := strings.Replace(string(limits), "{", `{"image":{"uri":"python"},"entrypoint":["x"],`, 1)
		for _, a := range []answer{w.do("POST", "/v1/sandboxes", create), w.do("PATCH", "/v1/sandboxes/"+sb.ID+"/limits", string(limits))} {
			if a.StatusCode != 400 || !strings.Contains(string(a.body), "resourceLimits."+key) {
				t.Errorf("%s=%q: %d %s", key, v, a.StatusCode, a.body)
			}
		}
	}
	for _, key := range []string{
		keyMemory, keyDisk, keyPids, keyShares, keyReadBps, keyWriteBps, keyReadIOPS, keyWriteIOPS, keyShm,
		keyLog,
	} {
		for _, v := range bad {
			try(key, v)
		}
		try(key, "9223372036854775807") // a number, but of nothing on earth
	}
	for key, vs := range map[string][]string{
		keyMemory: {"63Mi"}, keyPids: {"15", "4194305"}, keyShares: {"1", "262145", "512m"},
		keyReadBps: {"63Ki", "2Ti", "MAX"}, keyWriteIOPS: {"9", "10k"}, keyShm: {"63Ki"}, keyLog: {"63Ki", "257Mi"},
		keyMemory + " ": {"1Gi"}, "inodes": {"1000"}, "cpushares": {"10"},
	} {
		for _, v := range vs {
			try(key, v)
		}
	}
	// Amounts are said as they are written.
	for _, c := range [][3]string{
		{keyMemory, "63Mi", `\"63Mi\" is too small; the minimum is 64Mi`},
		{keyMemory, "90Ti", "(at most 1Ti)"},
		{keyDisk, "65Ti", "(at most 64Ti)"},
		{keyCPU, "5m", "the minimum is 10m"},
		{keyLog, "1Gi", "(at most 256Mi)"},
		{keyReadBps, "1Ki", "the minimum is 64Ki a second"},
		{keyShm, "65Gi", "resourceLimits.shm of 65Gi is more than the memory limit of 512Mi"},
	} {
		a := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{"`+c[0]+`":"`+c[1]+`"}}`)
		if a.StatusCode != 400 || !strings.Contains(string(a.body), c[2]) {
			t.Errorf("%s %s: %d %s", c[0], c[1], a.StatusCode, a.body)
		}
	}
	if r := w.recs[sb.ID]; len(w.recs) != 1 || r.Spec.Pids != 256 {
		t.Errorf("after all that was refused: %d sandboxes, %+v", len(w.recs), r.Spec.Limits)
	}
}

// TestLimits: all of them at once, there and back.
func TestLimits(t *testing.T) {
	w := newWorld(t)
	a := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],
		"resourceLimits":{"memory":"256Mi","cpuShares":"2048","ioReadBps":"10Mi","ioWriteBps":"1M","ioReadIops":"100",
			"ioWriteIops":"max","shm":"128Mi","logSize":"1Mi"},
		"extensions":{"sandboxd.readonly":"true","sandboxd.tmpfs":"/tmp;/run:size=8m,mode=755,noexec;/work:rw,exec"}}`)
	i := a.sandbox(t).Sandboxd
	got := fmt.Sprint(i.CPUShares, i.IOReadBps, i.IOWriteBps, i.IOReadIOPS, i.IOWriteIOPS, i.ShmBytes, i.LogBytes, i.ReadOnly, i.Tmpfs)
	if want := "2048 10485760 1000000 100 0 134217728 1048576 true [{/tmp 134217728 1777 false} {/run 8388608 755 false} {/work " +
		"134217728 " +
		"1777 true}]"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if a := w.do("POST", "/v1/sandboxes",
		`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{"memory":"64Mi","shm":"65Mi"}}`); a.StatusCode != 400 {
		t.Errorf("more shm than memory: %s", a.Status)
	}
}

func TestBadTmpfs(t *testing.T) {
	w := newWorld(t)
	for _, v := range []string{
		"", ";", "/tmp;", "tmp", "./tmp", "/", "//", "/tmp/", "/tmp/..", "/a/../b", "/a//b", "/\x00", "/proc", "/proc/sys", "/sys/fs",
		"/dev", "/dev/shm",
		"/opt", "/opt/opensandbox", "/opt/opensandbox/x", "/.sandboxd", "/etc", "/etc/hosts", "/tmp;/tmp", "/tmp;/tmp/x", "/a/b;/a",
		"/tmp:size", "/tmp:size=", "/tmp:size=0", "/tmp:size=-1", "/tmp:size=NaN", "/tmp:size=1", "/tmp:size=3g", "/tmp:size=50%",
		"/tmp:mode=9", "/tmp:mode=4755", "/tmp:mode=-1",
		"/tmp:suid", "/tmp:dev", "/tmp:ro", "/tmp:,", "/tmp:size=1m,,exec", "/tmp:uid=0", "/tmp:huge=always", "/" +
			strings.Repeat("x", 2000),
		strings.TrimSuffix(strings.Repeat("/t%;", 17), ";"),
	} {
		for i := 0; strings.Contains(v, "%;") || strings.HasSuffix(v, "t%"); i++ {
			v = strings.Replace(v, "t%", fmt.Sprint("t", i), 1)
		}
		body, err := json.Marshal(map[string]any{
			"image": map[string]string{"uri": "python"}, "entrypoint": []string{"x"}, "resourceLimits": map[string]string{},
			"extensions": map[string]string{"sandboxd.tmpfs": v},
		})
		if err != nil {
			t.Fatal(err)
		}
		if a := w.do("POST", "/v1/sandboxes", string(body)); a.StatusCode != 400 || !strings.Contains(string(a.body), "sandboxd.tmpfs") {
			t.Errorf("%.60q: %d %s", v, a.StatusCode, a.body)
		}
	}
}

// TestHostCanNot: what this host cannot limit is refused by name.
func TestHostCanNot(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.NoIO, c.NoDisk = true, true })
	sb := w.create()
	for key, v := range map[string]string{keyReadBps: "1Mi", keyWriteIOPS: "max", keyDisk: "1Gi"} {
		body := fmt.Sprintf(`{"resourceLimits":{%q:%q}}`, key, v)
		if a := w.do("PATCH", "/v1/sandboxes/"+sb.ID+"/limits", body); a.StatusCode != 400 ||
			!strings.Contains(string(a.body), "API_NOT_SUPPORTED") {
			t.Errorf("%s: %d %s", body, a.StatusCode, a.body)
		}
	}
}

func TestUpdate(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Notes = func(record.Record) []string { return []string{"a note"} }
	})
	at := "/v1/sandboxes/" + w.create().ID + "/limits"
	a := w.do("PATCH", at, `{"resourceLimits":{"memory":"1Gi","ioReadBps":"1Mi"}}`)
	if i := a.sandbox(t).Sandboxd; a.StatusCode != 200 || i.MemoryBytes != 1<<30 || i.IOReadBps != 1<<20 || i.Pids != 256 ||
		!strings.Contains(string(a.body), "a note") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if i := w.do("PATCH", at, `{"resourceLimits":{"ioReadBps":"max"}}`).sandbox(t).Sandboxd; i.IOReadBps != 0 || i.MemoryBytes != 1<<30 {
		t.Errorf("after max: %+v", i)
	}
	for _, body := range []string{
		``, `{}`, `{"resourceLimits":{}}`, `{"resourceLimits":null}`, `{"resourceLimits":{"memory":1}}`,
		`{"resourceLimits":{"shm":"1Mi"}}`, `{"resourceLimits":{"logSize":"1Mi"}}`, `[]`,
	} {
		if a := w.do("PATCH", at, body); a.StatusCode != 400 {
			t.Errorf("%s: %d %s", body, a.StatusCode, a.body)
		}
	}
	if a := w.do("PATCH", "/v1/sandboxes/nope/limits", `{"resourceLimits":{"memory":"1Gi"}}`); a.StatusCode != 404 {
		t.Errorf("unknown: %s", a.Status)
	}
	w.fail = errs.New(errs.WrongState, "it uses more")
	if a := w.do("PATCH", at, `{"resourceLimits":{"memory":"64Mi"}}`); a.StatusCode != 409 {
		t.Errorf("below use: %s", a.Status)
	}
}
