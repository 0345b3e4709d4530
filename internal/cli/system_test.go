package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// newSystemDaemon plays a daemon that knows its host; what is sent of a backup
// is up to backup.
func newSystemDaemon(t *testing.T, backup http.HandlerFunc, strays ...string) *daemon {
	t.Helper()
	mux := http.NewServeMux()
	answer := func(path string, v any) {
		mux.HandleFunc("GET /v1/system/"+path, func(w http.ResponseWriter, _ *http.Request) {
			json.NewEncoder(w).Encode(v) //nolint:errcheck // the test sees what is missing
		})
	}
	answer("info", wire.SystemInfo{
		Version: wire.Version{Version: "v1", Go: "go1.26", Instance: "a", Runtimes: []string{"runsc", "runc"}}, Started: time.Now(),
		Cgroups:       "unified",
		CPU:           "Fast",
		CPUs:          2,
		DrainingSince: new(time.Now()),
		Pool:          "btrfs\x1b[2J", Sandboxes: map[string]int{"Running": 2, "Failed": 1}, NoSweep: "the state was restored",
		Strays: strays,
	})
	answer("df", wire.DiskUsage{
		Images:    []wire.ImageDisk{{Name: "base", Tag: "latest", Bytes: 100 << 20, Sandboxes: 2}},
		Sandboxes: []wire.Disk{{ID: testID, Name: "lab", State: "Running", Bytes: 3 << 20, LimitBytes: 1 << 30}},
		Snapshots: []wire.Disk{{ID: "snap-" + testID, Name: "before", State: "Ready", Bytes: 7 << 20}}, Lost: 2, ReclaimableBytes: 5 << 20,
		Volumes:  []wire.VolumeDisk{{Name: "data", Bytes: 11 << 20, Sandboxes: 1}, {Name: "old", Bytes: 5 << 20, LimitBytes: 2 << 30}},
		Deleting: &wire.Deleting{Sandboxes: 2, Since: time.Now().Add(-3 * time.Minute), Bytes: 9 << 20},
		Prepared: wire.PreparedSlots{Slots: 4, Bytes: 64 << 10},
		Pool:     wire.Space{FreeBytes: 3 << 30, TotalBytes: 4 << 30, ReadyBytes: 1 << 29},
	})
	at := time.Date(2026, 11, 22, 7, 30, 0, 0, time.UTC)
	answer("backups", wire.BackupList{Items: []wire.Backup{
		{Name: "sandboxd-a-box-000001-20261122T073000Z.tar.gz", TakenAt: at, Bytes: 3 << 20, Verified: true, Whose: "own"},
		{Name: "sandboxd-a-box-000002-20261123T073000Z.tar.gz", TakenAt: at.AddDate(0, 0, 1), Bytes: 1 << 20, Whose: "unknown"},
	}})
	answer("backups/status", wire.BackupStatus{
		Target: "/srv/backups", Owner: "a-box-abcdefghijkl2345", Unknown: 3, RemovalRefused: "denied", EverySeconds: 86400,
		Data: &wire.BackupData{Packs: 65, LeftOut: 2}, Backup: wire.BackupRun{
			LastGood: &at, Name: "sandboxd-a-box-000001-20261122T073000Z.tar.gz",
			FailingSince: &at, LastTried: &at, Error: "it is\nfull\x1b",
		},
	})
	mux.HandleFunc("POST /v1/system/backups/adopt", func(w http.ResponseWriter, r *http.Request) {
		var req wire.AdoptBackups
		json.NewDecoder(r.Body).Decode(&req) //nolint:errcheck // the test sees what is missing
		all := wire.BackupList{Items: []wire.Backup{{Name: strings.Join(req.Names, "+")}}}
		json.NewEncoder(w).Encode(all) //nolint:errcheck // likewise
	})
	mux.HandleFunc("POST /v1/system/backups/check", func(w http.ResponseWriter, r *http.Request) {
		var req wire.CheckBackups
		json.NewDecoder(r.Body).Decode(&req) //nolint:errcheck // the test sees what is missing
		report := wire.BackupCheck{Backups: 2, Of: 2, Packs: 7, Bytes: 3 << 20, Sealed: 1}
		all := []wire.BackupCheckLine{{Progress: &wire.BackupCheck{Of: 2}}}
		if req.All {
			report.Damaged = 1
			all = append(all, wire.BackupCheckLine{Damage: &wire.BackupDamage{
				Backup: "sandboxd-a-box-000001", Tree: "volume vol-x data", File: "d/e\x1bf", Problem: "the pack is bad",
			}})
		}
		for _, l := range append(all, wire.BackupCheckLine{Report: &report}) {
			json.NewEncoder(w).Encode(l) //nolint:errcheck // likewise
		}
	})
	mux.HandleFunc("POST /v1/system/backups/remove", func(w http.ResponseWriter, r *http.Request) {
		var req wire.RemoveBackups
		json.NewDecoder(r.Body).Decode(&req) //nolint:errcheck // likewise
		out := wire.RemovedBackups{PacksKept: "a list is damaged"}
		for _, name := range req.Names {
			out.Items = append(out.Items, wire.Backup{Name: name})
		}
		json.NewEncoder(w).Encode(out) //nolint:errcheck // likewise
	})
	mux.HandleFunc("GET /v1/system/backup", backup)
	mux.HandleFunc("POST /v1/system/prune", func(w http.ResponseWriter, r *http.Request) {
		json.NewEncoder(w).Encode(wire.SystemPruneReport{ //nolint:errcheck // the test sees what is missing
			Sandboxes: []string{testID}, Images: []string{r.URL.Query().Encode()}, Layers: []string{"sha256:00"}, BytesReclaimed: 3 << 20,
		})
	})
	mux.HandleFunc("/v1/system/drain", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return &daemon{url: s.URL}
}

func TestSystem(t *testing.T) {
	// Restored, and the host holds nothing else: there is nothing to say of strays.
	if r := newSystemDaemon(t, http.NotFound).run(t, "system", "info"); r.code != 0 ||
		!strings.Contains(r.out, "not swept   the state was restored\n") ||
		strings.Contains(r.out, "unknown") || strings.Contains(r.out, "strays") {
		t.Errorf("%+v", r)
	}
	d := newSystemDaemon(t, http.NotFound, testID)
	for cmd, wants := range map[string][]string{
		"info": {
			"v1 (go1.26), instance a", "cpu         2 CPUs (Fast)\n",
			"1 Failed, 2 Running", "not swept   the state was restored", "draining    since",
			"strays      " + testID + " (", `btrfs\x1b[2J`,
		},
		"df": {
			"TYPE        TOTAL   ACTIVE   SIZE", "Sandboxes   1       1        3MiB ", "Snapshots   1       0        7MiB    7MiB (100%)",
			"Volumes     2       1        16MiB   5MiB (31%)", "old      5MiB    2GiB    0",
			"base:latest   100MiB", "lab    Running   3MiB   1GiB", "before   Ready   7MiB", "disks and snapshots in lost+found: 2",
			"5MiB can be freed", "still taking apart: 2 (9MiB); the first was deleted 3 minutes ago",
			"prepared slots, which wait for a create: 4 (64KiB)", "pool 3GiB free of 4GiB",
			"ready 512MiB of the pool: written once; the first write to the rest is slow",
		},
		"info -o json": {`"strays": [`},
		"df -o json":   {`"lost": 2`},
	} {
		r := d.run(t, append([]string{"system"}, strings.Fields(cmd)...)...)
		if r.code != 0 {
			t.Errorf("%s: %+v", cmd, r)
		}
		for _, want := range wants {
			if !strings.Contains(r.out, want) {
				t.Errorf("%s does not print %q:\n%s", cmd, want, r.out)
			}
		}
	}
}

// TestSystemPrune asks, where somebody can be asked, and prints what docker does.
func TestSystemPrune(t *testing.T) {
	d := newSystemDaemon(t, http.NotFound)
	for args, says := range map[string]string{
		"": "-f", "-f --filter label=a": "until=TIME", "-f --filter until=soon": "soon",
	} {
		if r := d.run(t, append([]string{"system", "prune"}, strings.Fields(args)...)...); r.code != 125 || r.out != "" ||
			!strings.Contains(r.errout, says) {
			t.Errorf("%q: %+v", args, r)
		}
	}
	for args, out := range map[string]string{
		"-f":    "Deleted Sandboxes:\n" + testID + "\n\nDeleted Images:\n\nsha256:00\n\nTotal reclaimed space: 3MiB\n",
		"-f -q": testID + "\n\nsha256:00\n",
		"-aqf":  testID + "\nall=true\nsha256:00\n",
		"-qf --filter until=2026-01-02T03:04:05Z": testID + "\nuntil=2026-01-02T03%3A04%3A05Z\nsha256:00\n",
	} {
		if r := d.run(t, append([]string{"system", "prune"}, strings.Fields(args)...)...); r.code != 0 || r.out != out || r.errout != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
	if r := d.run(t, "system", "prune", "-f", "-q", "--volumes"); r.code != 0 || r.out != testID+"\n\nsha256:00\n" ||
		!strings.Contains(r.errout, "sandboxctl volume prune -a") {
		t.Errorf("--volumes: %+v", r)
	}
	for answer, removed := range map[string]bool{"y\n": true, "Yes\n": true, "n\n": false, "\n": false, "\x04": false} {
		ptmx, tty := openPty(t)
		c := d.cmd("system", "prune", "-a", "--filter", "until=1h")
		var out, errout strings.Builder
		c.Stdin, c.Stdout, c.Stderr = tty, &out, &errout
		if _, err := ptmx.WriteString(answer); err != nil {
			t.Fatal(err)
		}
		err := c.Run()
		tty.Close()
		if (err == nil) != removed || strings.Contains(out.String(), "Total reclaimed space: 3MiB") != removed ||
			strings.Contains(errout.String(), "nothing was removed") == removed {
			t.Errorf("answered %q: %v, %q, %q", answer, err, out.String(), errout.String())
		}
		for _, want := range []string{"sandboxes that have ended", "snapshots that failed", "images that no", "until=1h", "[y/N]"} {
			if !strings.Contains(errout.String(), want) {
				t.Errorf("it does not say %q: %s", want, errout.String())
			}
		}
	}
}

// TestSystemDrain waits for what runs, as long as it is told.
func TestSystemDrain(t *testing.T) {
	d := newSystemDaemon(t, http.NotFound)
	for cmd, code := range map[string]int{
		"drain": 0, "drain --off": 0, "drain --off --wait": 125, "drain --timeout 1s": 125,
		"drain x": 125,
	} {
		if r := d.run(t, append([]string{"system"}, strings.Fields(cmd)...)...); r.code != code || r.out != "" {
			t.Errorf("%s: %+v", cmd, r)
		}
	}
	r := d.run(t, "system", "drain", "--wait", "--timeout", "1ms") // they are counted once at least
	if r.code != 125 || !strings.Contains(r.errout, "2 sandboxes still run") {
		t.Errorf("%+v", r)
	}
}

// TestSystemBackup makes a file of all that comes, or none.
func TestSystemBackup(t *testing.T) {
	d := newSystemDaemon(t, func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("the state")) })
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	if r := d.run(t, "system", "backup", "-o", file); r.code != 0 || strings.TrimSpace(r.out) != file {
		t.Errorf("%+v", r)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "the state" {
		t.Errorf("%q, %v", b, err)
	}
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	if r := d.run(t, "system", "backup", "-o", "-"); r.code != 0 || r.out != "the state" {
		t.Errorf("%+v", r)
	}
	cut := newSystemDaemon(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		w.Write([]byte("the sta"))
	})
	dir := t.TempDir()
	r := cut.run(t, "system", "backup", "-o", filepath.Join(dir, "b"))
	if left, err := os.ReadDir(dir); r.code == 0 || err != nil || len(left) > 0 {
		t.Errorf("cut short: %+v; left %v, %v", r, left, err)
	}
	if r := d.run(t, "system", "backup", "-o", filepath.Join(dir, "no", "b")); r.code == 0 || !strings.Contains(r.errout, "no such file") {
		t.Errorf("%+v", r)
	}
}

// TestSystemRestore runs sandboxd, with its exit status, and says so where
// there is none.
func TestSystemRestore(t *testing.T) {
	d := newSystemDaemon(t, http.NotFound)
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if r := d.run(t, "system", "restore", "f"); r.code == 0 || !strings.Contains(r.errout, "sandboxd restore FILE") {
		t.Errorf("%+v", r)
	}
	if err := os.WriteFile(filepath.Join(dir, "sandboxd"), []byte("#!/bin/sh\necho \"$@\"\nexit 7\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if r := d.run(t, "system", "restore", "f", "--config", "c"); r.code != 7 || r.out != "restore f --config c\n" {
		t.Errorf("%+v", r)
	}
	if r := d.run(t, "system", "restore", "--accept"); r.code != 7 || r.out != "restore --accept\n" {
		t.Errorf("%+v", r)
	}
}

// TestBackups prints the backups on the target, and since when and why they fail.
func TestBackups(t *testing.T) {
	d := newSystemDaemon(t, http.NotFound)
	r := d.run(t, "system", "backups", "ls")
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	if r.code != 0 || len(lines) != 3 {
		t.Fatalf("%+v", r)
	}
	for i, want := range []string{"3MiB yes own", "1MiB no unknown"} {
		if got := strings.Join(strings.Fields(lines[i+1]), " "); !strings.HasSuffix(got, want) {
			t.Errorf("%q, want %q at its end", got, want)
		}
	}
	r = d.run(t, "system", "backups", "status")
	for _, want := range []string{
		"/srv/backups\nowner   a-box-abcdefghijkl2345\nbackup  every 24h0m0s; ", "drill   on request; none yet",
		"in 65 packs", "unknown 3 backups", "none is removed: denied",
		"2 volumes and snapshots could not be read", "check   packs", "sandboxd-a-box-000001-", "fails since ", "it is\n", `full\x1b`,
	} {
		if r.code != 0 || !strings.Contains(r.out, want) {
			t.Errorf("%q is missing: %+v", want, r)
		}
	}
	for args, want := range map[string]string{"x y": "x+y", "--all": ""} {
		r := d.run(t, append([]string{"system", "backups", "adopt", "-o", "name"}, strings.Fields(args)...)...)
		if r.code != 0 || strings.TrimSpace(r.out) != want {
			t.Errorf("adopt %s: %+v", args, r)
		}
	}
	for _, args := range []string{"", "--all x"} {
		if r := d.run(t, append([]string{"system", "backups", "adopt"}, strings.Fields(args)...)...); r.code == 0 {
			t.Errorf("adopt %s: %+v", args, r)
		}
	}
}

// TestBackupsCheck fails if a backup is damaged, and names what is.
func TestBackupsCheck(t *testing.T) {
	d := newSystemDaemon(t, http.NotFound)
	for args, want := range map[string]struct {
		code        int
		out, errout string
	}{
		"--all": {
			125, `sandboxd-a-box-000001: volume vol-x data: "d/e\x1bf": the pack is bad` + "\n2 backups of 2 and 7 packs read", "1 backup is damaged",
		},
		"--all -q":                    {125, "sandboxd-a-box-000001\n", "1 backup is damaged"},
		"--all -o json":               {125, `"file": "d/e\u001bf"`, "1 backup is damaged"},
		"sandboxd-a-box-000002":       {0, "0 damaged\n1 compared with checksums alone", ""},
		"-o json sandboxd-a-box":      {0, `"damages": []`, ""},
		"":                            {125, "", "want the names"},
		"--all sandboxd-a-box-000002": {125, "", "want the names"},
	} {
		r := d.run(t, append([]string{"system", "backups", "check"}, strings.Fields(args)...)...)
		if r.code != want.code || !strings.Contains(r.out, want.out) || !strings.Contains(r.errout, want.errout) {
			t.Errorf("check %s: %+v, want %+v", args, r, want)
		}
	}
}

// TestBackupsRm asks, and says which packs stay.
func TestBackupsRm(t *testing.T) {
	d := newSystemDaemon(t, http.NotFound)
	r := d.run(t, "system", "backups", "rm", "-f", "a", "b")
	if r.code != 0 || r.out != "a\nb\n" || !strings.Contains(r.errout, "a list is damaged") {
		t.Errorf("%+v", r)
	}
	if r := d.run(t, "system", "backups", "rm", "a"); r.code == 0 || r.out != "" || !strings.Contains(r.errout, "-f to confirm") {
		t.Errorf("where nobody can be asked: %+v", r)
	}
	if r := d.run(t, "system", "backups", "rm", "-f"); r.code != 125 {
		t.Errorf("without a name: %+v", r)
	}
}
