package api

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fakeVolumes is what keeps volumes; "busy" is in use.
type fakeVolumes struct {
	mu  sync.Mutex
	all []record.VolumeInfo
}

func (f *fakeVolumes) find(name string) (int, error) {
	at := slices.IndexFunc(f.all, func(v record.VolumeInfo) bool { return v.Name == name })
	if at < 0 {
		return at, errs.Wire(errs.New(errs.NotFound, "there is no volume"), "VOLUME::PVC_NOT_FOUND")
	}
	return at, nil
}

func (f *fakeVolumes) Create(_ context.Context, name string, bytes int64) (v record.VolumeInfo, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.find(name); err == nil {
		return v, errs.New(errs.Exists, "there is a volume")
	}
	v.Volume = record.Volume{ID: record.NewVolumeID('t'), Name: name, State: record.VolumeReady, Bytes: bytes, Created: time.Now()}
	f.all = append(f.all, v)
	return v, nil
}

func (f *fakeVolumes) Get(_ context.Context, name string) (record.VolumeInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(name)
	if err != nil {
		return record.VolumeInfo{}, err
	}
	return f.all[at], nil
}

func (f *fakeVolumes) List(context.Context) ([]record.VolumeInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.all), nil
}

func (f *fakeVolumes) Usage(string) (int64, error) { return 5, nil }

func (f *fakeVolumes) Delete(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(name)
	if err == nil && len(f.all[at].UsedBy) > 0 {
		err = errs.New(errs.WrongState, "in use by %s", f.all[at].UsedBy[0])
	}
	if err == nil {
		f.all = slices.Delete(f.all, at, at+1)
	}
	return err
}

func (f *fakeVolumes) Prune(context.Context) (names []string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = slices.DeleteFunc(f.all, func(v record.VolumeInfo) bool {
		if len(v.UsedBy) == 0 {
			names = append(names, v.Name)
		}
		return len(v.UsedBy) == 0
	})
	return names, nil
}

// volumesBody is a creation with these volumes.
func volumesBody(more, volumes string) string {
	return `{"image":{"uri":"python"},"entrypoint":["x"],"volumes":[` + volumes + `]` + more + `}`
}

// TestVolumesOfACreation: what SDKs send is what is mounted. The Python SDK sends nulls;
// the document is of OpenAPI 3.1 and says that as in 3.0, so the request is lenient.
func TestVolumesOfACreation(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.VolumeBytes = 10 << 30 })
	a := w.do("POST", "/v1/sandboxes", volumesBody("", `
		{"name":"data","pvc":{"claimName":"my-data","createIfNotExists":true,"deleteOnSandboxTermination":false,
			"storageClass":null,"storage":null,"accessModes":null},"mountPath":"/data/","readOnly":false},
		{"name":"part","pvc":{"claimName":"other","createIfNotExists":false,"deleteOnSandboxTermination":true,
			"storage":"1.5Gi","accessModes":["ReadWriteOnce"]},"mountPath":"/data/part","readOnly":true,"subPath":"a/./b/"},
		{"name":"host","host":{"path":"/srv//shared/"},"mountPath":"/mnt/h","subPath":null}`), "X-Lenient", "1")
	if a.StatusCode != 202 {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	var sb wire.Sandbox
	if err := json.Unmarshal(a.body, &sb); err != nil {
		t.Fatal(err)
	}
	want := []record.VolumeMount{
		{Name: "data", Path: "/data", Claim: "my-data", Create: true, Bytes: 10 << 30},
		{Name: "part", Path: "/data/part", ReadOnly: true, Sub: "a/b", Claim: "other", Bytes: 3 << 29, Owned: true},
		{Name: "host", Path: "/mnt/h", Source: "/srv/shared"},
	}
	if got := w.recs[sb.ID].Spec.Volumes; !slices.Equal(got, want) {
		t.Errorf("mounted are\n%+v\nwant\n%+v", got, want)
	}
	if got := record.Outer(want); !slices.Equal(got, []int{-1, 0, -1}) {
		t.Errorf("they lie in %v", got)
	}
	a = w.do("GET", "/v1/sandboxes/"+sb.ID+"/inspect", "")
	for _, want := range []string{`"pvc":{"claimName":"my-data"}`, `"host":{"path":"/srv/shared"}`, `"readOnly":true,"subPath":"a/b"`} {
		if !strings.Contains(string(a.body), want) {
			t.Errorf("inspect lacks %s: %s", want, a.body)
		}
	}
}

func TestVolumesRefused(t *testing.T) {
	w := newWorld(t)
	pvc := `"pvc":{"claimName":"c"}`
	one := func(fields string) string { return volumesBody("", `{`+fields+`}`) }
	at := func(path string) string { return one(`"name":"v",` + pvc + `,"mountPath":` + path) }
	sub := func(path string) string { return one(`"name":"v",` + pvc + `,"mountPath":"/v","subPath":` + path) }
	host := func(path string) string { return one(`"name":"v","mountPath":"/v","host":{"path":` + path + `}`) }
	claim := func(fields string) string { return one(`"name":"v","mountPath":"/v","pvc":{` + fields + `}`) }
	long := func(n int) string { return `"/` + strings.Repeat("x", n) + `"` }
	for name, c := range map[string]struct{ body, code, says string }{
		"no name":      {one(pvc + `,"mountPath":"/v"`), "INVALID_NAME", "1 to 63"},
		"name upper":   {one(`"name":"V",` + pvc + `,"mountPath":"/v"`), "INVALID_NAME", "1 to 63"},
		"name long":    {one(`"name":"` + strings.Repeat("v", 64) + `",` + pvc + `,"mountPath":"/v"`), "INVALID_NAME", "1 to 63"},
		"name newline": {one(`"name":"v\n",` + pvc + `,"mountPath":"/v"`), "INVALID_NAME", "1 to 63"},
		"name twice": {
			volumesBody("", `{"name":"v",`+pvc+`,"mountPath":"/v"},{"name":"v",`+pvc+`,"mountPath":"/w"}`),
			"DUPLICATE_NAME", "is used twice",
		},
		"no backend":      {one(`"name":"v","mountPath":"/v"`), "INVALID_BACKEND", "0 backends"},
		"unknown backend": {one(`"name":"v","mountPath":"/v","nfs":{"server":"x"}`), "INVALID_BACKEND", "0 backends"},
		"two backends":    {one(`"name":"v","mountPath":"/v","host":{"path":"/srv"},` + pvc), "INVALID_BACKEND", "2 backends"},
		"ossfs": {
			one(
				`"name":"v","mountPath":"/v","ossfs":{"bucket":"b-1","endpoint":"e",` +
					`"accessKeyId":"secret-id","accessKeySecret":"secret-key"}`),
			"UNSUPPORTED_BACKEND", "buckets",
		},
		"no path":         {one(`"name":"v",` + pvc), "INVALID_MOUNT_PATH", "absolute"},
		"relative":        {at(`"v"`), "INVALID_MOUNT_PATH", "absolute"},
		"windows":         {at(`"C:\\v"`), "INVALID_MOUNT_PATH", "absolute"},
		"dots":            {at(`"/v/../proc"`), "INVALID_MOUNT_PATH", "without .."},
		"NUL":             {at(`"/v\u0000"`), "INVALID_MOUNT_PATH", "absolute"},
		"4096 characters": {at(long(4095)), "INVALID_MOUNT_PATH", "at most 1024"},
		"root":            {at(`"/"`), "INVALID_MOUNT_PATH", "its own files"},
		"root, thrice":    {at(`"/./."`), "INVALID_MOUNT_PATH", "its own files"},
		"proc":            {at(`"/proc"`), "INVALID_MOUNT_PATH", "its own files"},
		"below proc":      {at(`"//proc//self/"`), "INVALID_MOUNT_PATH", "its own files"},
		"sys":             {at(`"/sys/fs/cgroup"`), "INVALID_MOUNT_PATH", "its own files"},
		"dev":             {at(`"/dev/shm"`), "INVALID_MOUNT_PATH", "its own files"},
		"the agent":       {at(`"/opt/opensandbox/sandbox-agent"`), "INVALID_MOUNT_PATH", "its own files"},
		"above the agent": {at(`"/opt"`), "INVALID_MOUNT_PATH", "its own files"},
		"the agent's own": {at(`"/.sandboxd"`), "INVALID_MOUNT_PATH", "its own files"},
		"hosts":           {at(`"/etc/hosts"`), "INVALID_MOUNT_PATH", "its own files"},
		"above hosts":     {at(`"/etc"`), "INVALID_MOUNT_PATH", "its own files"},
		"path twice": {
			volumesBody("", `{"name":"v",`+pvc+`,"mountPath":"/v"},{"name":"w",`+pvc+`,"mountPath":"/v/"}`),
			"INVALID_MOUNT_PATH", "hide the other",
		},
		"over a tmpfs": {
			volumesBody(`,"extensions":{"sandboxd.tmpfs":"/v/cache"}`, `{"name":"v",`+pvc+`,"mountPath":"/v"}`),
			"INVALID_MOUNT_PATH", "the tmpfs at",
		},
		"on a tmpfs": {
			volumesBody(`,"extensions":{"sandboxd.tmpfs":"/v"}`, `{"name":"v",`+pvc+`,"mountPath":"/v"}`),
			"INVALID_MOUNT_PATH", "the tmpfs at",
		},
		"sub dots":         {sub(`"a/../../b"`), "INVALID_SUB_PATH", "without .."},
		"sub absolute":     {sub(`"/a"`), "INVALID_SUB_PATH", "relative"},
		"sub NUL":          {sub(`"a\u0000"`), "INVALID_SUB_PATH", "relative"},
		"sub long":         {sub(`"` + strings.Repeat("x/", 2001) + `"`), "INVALID_SUB_PATH", "4000"},
		"host empty":       {host(`""`), "INVALID_HOST_PATH", "absolute"},
		"host relative":    {host(`"srv"`), "INVALID_HOST_PATH", "absolute"},
		"host windows":     {host(`"C:\\data"`), "INVALID_HOST_PATH", "absolute"},
		"host dots":        {host(`"/srv/../etc"`), "INVALID_HOST_PATH", "without .."},
		"host NUL":         {host(`"/srv\u0000"`), "INVALID_HOST_PATH", "absolute"},
		"host long":        {host(long(4096)), "INVALID_HOST_PATH", "4000"},
		"claim empty":      {claim(``), "INVALID_PVC_NAME", "1 to 253"},
		"claim upper":      {claim(`"claimName":"Data"`), "INVALID_PVC_NAME", "1 to 253"},
		"claim slash":      {claim(`"claimName":"a/b"`), "INVALID_PVC_NAME", "1 to 253"},
		"claim long":       {claim(`"claimName":"` + strings.Repeat("a", 254) + `"`), "INVALID_PVC_NAME", "1 to 253"},
		"claim of a route": {claim(`"claimName":"prune"`), "INVALID_PVC_NAME", "prune"},
		"claim two ways": {
			volumesBody("",
				`{"name":"v",`+pvc+`,"mountPath":"/v"},{"name":"w","mountPath":"/w","pvc":{"claimName":"c","storage":"1Gi"}}`),
			"INVALID_BACKEND", "different options",
		},
		"gVisor, twice": {
			volumesBody("",
				`{"name":"v",`+pvc+`,"mountPath":"/v"},{"name":"w",`+pvc+`,"mountPath":"/v/x","readOnly":true}`), "INVALID_MOUNT_PATH",
			"twice",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			a := w.do("POST", "/v1/sandboxes", c.body)
			var e wire.Error
			if err := json.Unmarshal(a.body, &e); err != nil || a.StatusCode != 400 || e.Code != "VOLUME::"+c.code ||
				!strings.Contains(e.Message, c.says) {
				t.Errorf("%d %s, want %s: %s", a.StatusCode, a.body, c.code, c.says)
			}
			if strings.Contains(string(a.body)+w.log.String(), "secret-") {
				t.Error("a secret is told")
			}
		})
	}
	w.t = t
	for name, body := range map[string]string{
		"storage":       claim(`"claimName":"c","storage":"much"`),
		"storage small": claim(`"claimName":"c","storage":"1Mi"`),
		"storage huge":  claim(`"claimName":"c","storage":"9999999.5Ei"`),
		"storage dots":  claim(`"claimName":"c","storage":"1.2.3Gi"`),
		"wrong type":    one(`"name":"v","mountPath":7,` + pvc),
		"no list":       `{"image":{"uri":"python"},"entrypoint":["x"],"volumes":{"name":"v"}}`,
		"33 of them": volumesBody("", strings.Join(func() (all []string) {
			for i := range 33 {
				all = append(all, fmt.Sprintf(`{"name":"v%d",%s,"mountPath":"/v%d"}`, i, pvc, i))
			}
			return all
		}(), ",")),
	} {
		if a := w.do("POST", "/v1/sandboxes", body); a.StatusCode != 400 {
			t.Errorf("%s: %d %s", name, a.StatusCode, a.body)
		}
	}
	if len(w.recs) > 0 {
		t.Errorf("%d sandboxes were made", len(w.recs))
	}
	w = newWorld(t, func(c *Config) { c.NoDisk = true })
	if a := w.do("POST", "/v1/sandboxes", claim(`"claimName":"c","storage":"1Gi"`)); a.StatusCode != 400 ||
		!strings.Contains(string(a.body), "plain directory") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := w.do("POST", "/v1/sandboxes", claim(`"claimName":"c"`)); a.StatusCode != 202 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	runc := volumesBody(`,"extensions":{"sandboxd.runtime":"runc"}`,
		`{"name":"v",`+pvc+`,"mountPath":"/v"},{"name":"w",`+pvc+`,"mountPath":"/v/x","readOnly":true}`)
	if a := w.do("POST", "/v1/sandboxes", runc); a.StatusCode != 202 {
		t.Errorf("twice on runc: %d %s", a.StatusCode, a.body)
	}
}

func TestVolumeRoutes(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.VolumeBytes = 1 << 30 })
	want := func(method, path, body string, status int, says string) {
		t.Helper()
		if a := w.do(method, path, body); a.StatusCode != status || !strings.Contains(string(a.body), says) {
			t.Errorf("%s %s %s: %d %s, want %d, %q", method, path, body, a.StatusCode, a.body, status, says)
		}
	}
	want("GET", "/v1/volumes", "", 200, `{"items":[]}`)
	want("POST", "/v1/volumes", `{"name":"data"}`, 201, `"sizeBytes":1073741824,"usedBytes":5,"usedBy":[]`)
	want("POST", "/v1/volumes", `{"name":"data"}`, 409, "there is a volume")
	want("POST", "/v1/volumes", `{"name":"big","size":"2Gi"}`, 201, `"sizeBytes":2147483648`)
	want("POST", "/v1/volumes", `{"name":"Big"}`, 400, "VOLUME::INVALID_PVC_NAME")
	want("POST", "/v1/volumes", `{"name":"../etc"}`, 400, "VOLUME::INVALID_PVC_NAME")
	want("POST", "/v1/volumes", `{"name":"x","size":"1"}`, 400, "16Mi")
	want("POST", "/v1/volumes", `{}`, 400, "VOLUME::INVALID_PVC_NAME")
	want("POST", "/v1/volumes", `[]`, 400, "JSON object")
	want("GET", "/v1/volumes/data", "", 200, `"name":"data"`)
	want("GET", "/v1/volumes/none", "", 404, "VOLUME::PVC_NOT_FOUND")
	want("DELETE", "/v1/volumes/"+strings.Repeat("x", 5000), "", 404, "VOLUME::PVC_NOT_FOUND")
	w.volumes.all[1].UsedBy = []string{"tabcdefghijk"}
	want("DELETE", "/v1/volumes/big", "", 409, "tabcdefghijk")
	want("POST", "/v1/volumes/prune?all=true", "", 200, `{"volumes":["data"]}`)
	want("POST", "/v1/volumes/prune?all=true", "", 200, `{"volumes":[]}`)
	w.volumes.all[0].UsedBy = nil
	want("DELETE", "/v1/volumes/big", "", 204, "")
	want("DELETE", "/v1/volumes/big", "", 404, "there is no volume")
	want("PUT", "/v1/volumes/big", "", 405, "GET, DELETE")
}
