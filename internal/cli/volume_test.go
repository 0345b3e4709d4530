package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

func TestMounts(t *testing.T) {
	pvc := func(name, path string) wire.VolumeMount {
		return wire.VolumeMount{MountPath: path, PVC: &wire.PVC{ClaimName: name}}
	}
	for args, want := range map[string]wire.VolumeMount{
		"-v data:/data":    pvc("data", "/data"),
		"-v data:/data:rw": pvc("data", "/data"),
		"-v data:/data:ro": {MountPath: "/data", ReadOnly: true, PVC: &wire.PVC{ClaimName: "data"}},
		"-v /srv/x:/data:ro": {
			MountPath: "/data", ReadOnly: true,
			Host: &wire.HostPath{Path: "/srv/x"},
		},
		"--volume data:/data":                                    pvc("data", "/data"),
		"--mount source=data,target=/data":                       pvc("data", "/data"),
		"--mount type=volume,src=data,dst=/data":                 pvc("data", "/data"),
		"--mount type=bind,src=/s,dst=/d,readonly":               {MountPath: "/d", ReadOnly: true, Host: &wire.HostPath{Path: "/s"}},
		"--mount src=a,dst=/d,readonly=false,volume-subpath=x/y": {MountPath: "/d", SubPath: "x/y", PVC: &wire.PVC{ClaimName: "a"}},
	} {
		d := newDaemon(t)
		want.Name = "volume-1"
		if r := d.run(t, append(append([]string{"create"}, strings.Fields(args)...), "python")...); r.code != 0 ||
			!reflect.DeepEqual(d.create.Volumes, []wire.VolumeMount{want}) {
			t.Errorf("%s: %+v, asked for %+v, want %+v", args, r, d.create.Volumes, want)
		}
	}
	d := newDaemon(t)
	for args, want := range map[string]string{
		"-v /data":                             "want NAME:/PATH",
		"-v data":                              "want NAME:/PATH",
		"-v :/data":                            "want NAME:/PATH",
		"-v a:b:ro:x":                          "want NAME:/PATH",
		"-v ./data:/data":                      "absolute path",
		"-v ~/data:/data":                      "absolute path",
		"-v data:/data:nocopy":                 "nocopy",
		"--mount data:/data":                   "is unknown",
		"--mount src=data":                     "a target",
		"--mount type=tmpfs,src=x,dst=/x":      "type=volume or type=bind",
		"--mount src=data,dst=/d,readonly=may": "readonly=false",
		"--mount src=data,dst=/d,uid=7":        "uid=7",
	} {
		if r := d.run(t, append(append([]string{"create"}, strings.Fields(args)...), "python")...); r.code != 125 ||
			!strings.Contains(r.errout, want) {
			t.Errorf("%s: %+v, want %q", args, r, want)
		}
	}
	if got := d.asked(); len(got) > 0 {
		t.Errorf("the daemon was asked %q", got)
	}
	if r := d.run(t, "run", "-v", "a:/a", "-v", "b:/b", "python", "true"); r.code != 0 || len(d.create.Volumes) != 2 ||
		d.create.Volumes[1].Name != "volume-2" {
		t.Errorf("run: %+v, %+v", r, d.create.Volumes)
	}
}

func TestVolumeCommands(t *testing.T) {
	used := int64(5 << 20)
	data := wire.Volume{
		Name: "data", ID: "vol-taaaaaaaaaaa", SizeBytes: 1 << 30, UsedBytes: &used, UsedBy: []string{testID},
		CreatedAt: time.Now().Add(-time.Hour),
	}
	var size string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reply := func(status int, v any) {
			w.WriteHeader(status)
			json.NewEncoder(w).Encode(v) //nolint:errcheck // the test sees what is missing
		}
		switch r.Method + " " + strings.TrimPrefix(r.URL.Path, "/v1") {
		case "POST /volumes":
			var req wire.VolumeRequest
			json.NewDecoder(r.Body).Decode(&req) //nolint:errcheck // the test sees what is missing
			size = req.Size
			reply(201, wire.Volume{Name: req.Name})
		case "GET /volumes":
			reply(200, wire.VolumeList{Items: []wire.Volume{data, {Name: "e\x1bvil"}}})
		case "GET /volumes/data":
			reply(200, data)
		case "DELETE /volumes/spare":
			w.WriteHeader(204)
		case "POST /volumes/prune":
			gone := []string{}
			if r.URL.Query().Get("all") == "true" {
				gone = append(gone, "spare")
			}
			reply(200, wire.VolumePruneReport{Volumes: gone})
		default:
			reply(409, wire.Error{Code: "VOLUME::IN_USE", Message: "volume data is in use"})
		}
	}))
	t.Cleanup(s.Close)
	d := &daemon{url: s.URL}
	t.Setenv("COMPLETION_LIMIT", "30s")
	for args, want := range map[string]result{
		"volume create x":            {0, "x\n", ""},
		"volume create x --size 20g": {0, "x\n", ""},
		"volume ls -q":               {0, "data\ne\\x1bvil\n", ""},
		"volume rm spare":            {0, "spare\n", ""},
		"volume rm data":             {125, "", "in use"},
		"volume prune":               {0, "", "no volume was removed: all volumes have names"},
		"volume prune -f":            {0, "", "no volume was removed: all volumes have names"},
		"volume prune -a":            {125, "", "use -f to confirm"},
		"volume prune -af":           {0, "spare\n", ""},
		"volume inspect none":        {125, "[]\n", "in use"},
		"__complete volume rm da":    {0, "data\n:4\n", "Completion ended"},
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != want.code || r.out != want.out || !strings.Contains(r.errout, want.errout) ||
			want.errout == "" && r.errout != "" {
			t.Errorf("%s: %+v, want %+v", args, r, want)
		}
	}
	d.run(t, "volume", "create", "x", "--size", "20g")
	if size != "20Gi" {
		t.Errorf("docker's 20g became %q", size)
	}
	if r := d.run(t, "volume", "ls"); !strings.Contains(r.out, "SANDBOXES") || !strings.Contains(r.out, "5MiB") ||
		!strings.Contains(r.out, "no limit") {
		t.Errorf("ls prints\n%s", r.out)
	}
	for _, args := range []string{"volume ls -o json", "volume inspect data"} {
		var list []wire.Volume
		if r := d.run(t, strings.Fields(args)...); json.Unmarshal([]byte(r.out), &list) != nil || list[0].Name != "data" ||
			*list[0].UsedBytes != used || list[0].UsedBy[0] != testID {
			t.Errorf("%s: %+v", args, r)
		}
	}
}
