package cli

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

var update = flag.Bool("update", false, "write testdata/json.golden anew")

// shape is what a command prints with -o json.
type shape string

const (
	object shape = "an object"
	array  shape = "an array"
	stream shape = "lines, each a value of its own" // of what has no end, or comes beside other output
)

// jsonCommands are the commands that take -o json, and those that print nothing
// else, each run at least once.
var jsonCommands = []struct {
	args string
	want shape
}{
	{"create base", object},
	{"ps", array},
	{"inspect lab", array},
	{"stats --no-stream", array},
	{"stats --no-stream lab", array},
	{"top -n 1", array},
	{"top -n 2 -d 100ms", stream},
	{"diff lab", array},
	{"diff same", array},
	{"events", stream},
	{"diagnostics logs lab", object},
	{"diagnostics events -s network lab", object},
	{"egress get lab", object},
	{"egress denials lab", object},
	{"egress explain lab pypi.org:443", object},
	{"egress test lab pypi.org:443", object},
	{"network flows lab", object},
	{"network stats --no-stream lab", array},
	{"endpoint lab 80", object},
	{"port lab", array},
	{"image ls", array},
	{"images", array},
	{"image inspect base", array},
	{"image build base", object},
	{"image import -", object},
	{"image load", object},
	{"image pull base", object},
	{"image prune -af", object},
	{"commit lab mine:1", object},
	{"key create ci", object},
	{"key ls", array},
	{"fork -n 2 lab", object},
	{"snapshot create lab", object},
	{"snapshot ls", array},
	{"snapshot inspect before", array},
	{"volume create data", object},
	{"volume ls", array},
	{"volume inspect data", array},
	{"volume prune -af", object},
	{"pool create py --image python", object},
	{"pool ls", array},
	{"pool inspect py", array},
	{"policy ls", array},
	{"policy get build", object},
	{"policy set build --allow pypi.org:443", object},
	{"secret ls lab", object},
	{"secret set --from-file /etc/key lab key", object},
	{"secret bind --credential key --host api.example.com lab api", object},
	{"code context create -l python lab", object},
	{"code context ls lab", array},
	{"command session create lab", object},
	{"command status lab " + commandID, object},
	{"command ls lab", array},
	{"eval lab 1", stream},
	{"system backups ls", array},
	{"system backups now", object},
	{"system backups drill", object},
	{"system backups status", object},
	{"system backups adopt --all", array},
	{"system backups check --all", object},
	{"system backups rm -f sandboxd-a-box-000001-20261127T120000Z.tar.gz", object},
	{"system info", object},
	{"system df", object},
	{"system prune -f", object},
	{"version", object},
}

// measures is the one whose answer is never the same.
const measures = "sandboxctl bench"

// onlyJSON reports whether a command prints JSON without being asked to.
func onlyJSON(cmd *cobra.Command) bool { return strings.HasSuffix(cmd.Short, "as JSON") }

// TestJSON: what programs read of each command stays as it is. An answer that ends
// is one value: one thing is an object, a list is an array, also when it is empty.
func TestJSON(t *testing.T) {
	d := &daemon{url: newFixedDaemon(t)}
	var all strings.Builder
	ran := map[string]bool{}
	for _, c := range jsonCommands {
		args := strings.Fields(c.args)
		cmd, _, err := newRoot("unknown").Find(args)
		if err != nil {
			t.Fatal(err)
		}
		ran[cmd.CommandPath()] = true
		if !onlyJSON(cmd) {
			args = append(args, "-o", "json")
		}
		r := d.run(t, args...)
		if r.code != 0 {
			// The stream of events has broken off; a test that fails is an answer, too.
			if c.args != "events" && !strings.HasPrefix(c.args, "egress test") {
				t.Errorf("%s: %+v", c.args, r)
			}
		}
		fmt.Fprintf(&all, "$ sandboxctl %s\n%s", strings.Join(args, " "), strings.ReplaceAll(r.out, runtime.Version(), "GOVERSION"))
		values, lines := 0, strings.Count(r.out, "\n")
		for dec := json.NewDecoder(strings.NewReader(r.out)); ; values++ {
			var v any
			if err := dec.Decode(&v); err == io.EOF {
				break
			} else if err != nil {
				t.Errorf("%s prints no JSON: %v\n%s", c.args, err, r.out)
				break
			}
		}
		begins := map[byte]shape{'{': object, '[': array}[(r.out + " ")[0]]
		if c.want == stream && (values != lines || values < 1) || c.want != stream && (values != 1 || begins != c.want) {
			t.Errorf("%s prints %d values in %d lines, want %s:\n%s", c.args, values, lines, c.want, r.out)
		}
	}
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		f := cmd.Flags().Lookup("output")
		if (f != nil && f.DefValue == "table" || onlyJSON(cmd)) && !ran[cmd.CommandPath()] && cmd.CommandPath() != measures {
			t.Errorf("the JSON of %s is not in the table above", cmd.CommandPath())
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(newRoot("unknown"))

	const file = "testdata/json.golden"
	if *update {
		if err := os.WriteFile(file, []byte(all.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(golden) != all.String() {
		t.Errorf("what is printed is not what %s says (-update writes it anew):\n%s", file, all.String())
	}
}

// newFixedDaemon plays a daemon whose answers are always the same.
func newFixedDaemon(t *testing.T) (url string) {
	at := time.Date(2026, 11, 22, 7, 30, 0, 0, time.UTC)
	sb := wire.Sandbox{
		ID: testID, Status: wire.Status{State: wire.Running}, Image: &wire.Image{URI: "base"}, Entrypoint: []string{"sh"}, CreatedAt: at,
		Sandboxd: &wire.Info{
			Name: "lab", Runtime: "runsc", MemoryBytes: 64 << 20, Network: "rules",
			Ports: []wire.PublishedPort{{HostIP: "127.0.0.1", HostPort: 8000, Port: 80, Protocol: "tcp"}},
		},
	}
	usage := wire.Usage{Time: at, MemoryBytes: 1 << 20, MemoryLimitBytes: 64 << 20, CPUMicros: 5, Pids: new(int64(3)), PidsLimit: 256}
	im := wire.ImageInfo{Name: "base", Tag: "latest", Digest: "sha256:00", Created: at, Bytes: 1 << 20}
	snap := wire.Snapshot{ID: "snap-" + testID, Name: "before", SandboxID: testID, Status: wire.Status{State: "Ready"}, CreatedAt: at}
	vol := wire.Volume{Name: "data", ID: "vol-" + testID, SizeBytes: 1 << 30, CreatedAt: at}
	pol := wire.Policy{
		Name: "build", Version: 2, Source: wire.PolicyOfStore, CreatedAt: at,
		NetworkPolicy: wire.NetworkPolicy{DefaultAction: "deny", Egress: []wire.NetworkRule{
			{Action: "allow", Target: "pypi.org", Ports: []any{443}},
		}},
		Versions: []wire.PolicyVersion{{Version: 1, CreatedAt: at}, {Version: 2, CreatedAt: at}},
		UsedBy:   []wire.PolicyUser{{ID: testID, Name: "lab", Version: 2}},
	}
	pool := wire.Pool{
		Name: "py", Template: json.RawMessage(`{"image":{"uri":"python"}}`), Source: wire.PolicyOfStore, CreatedAt: at,
		CapacitySpec: wire.PoolCapacity{BufferMin: 1, BufferMax: 2, PoolMax: 10},
		Status:       wire.PoolStatus{Total: 3, Allocated: 1, Available: 2, Revision: "0123456789ab", Hits: 5, Misses: 1},
	}
	cc := agent.CodeContext{ID: "c1", Language: "python", Cwd: "/workspace"}
	kept := wire.Backup{
		Name: "sandboxd-a-box-000001-20261122T073000Z.tar.gz", Owner: "a-box", TakenAt: at, Bytes: 4096, Verified: true, Whose: "own",
	}
	version := wire.Version{Version: "v1", Go: "go1.26", Instance: "a", Runtimes: []string{"runsc", "runc"}}
	explained := wire.Explanation{
		Target: "pypi.org:443/tcp", Verdict: wire.VerdictDeny, Rule: "default", By: "policy", Reason: "no rule allows it",
		Allow: "pypi.org:443", Command: "sandboxctl egress patch --allow pypi.org:443 lab",
	}
	secrets := wire.CredentialVault{
		Revision: 2, Credentials: []wire.Credential{
			{Name: "key", SourceType: "file", Revision: 1, Placeholder: "sbxph_of_key", Env: "API_KEY"},
		},
		Bindings: []wire.CredentialBinding{{
			Name: "api", Revision: 2, Auth: wire.CredentialAuthKind{Type: "bearer"},
			Match: wire.CredentialMatch{
				Schemes: []string{"https"}, Hosts: []string{"api.example.com"}, Methods: []string{"GET"}, Paths: []string{"/*"},
			},
		}},
	}
	answers := map[string][]any{ // one a line
		"POST /sandboxes":    {sb},
		"GET /sandboxes":     {wire.List{Items: []wire.Sandbox{sb}, Pagination: wire.Pagination{Page: 1, TotalItems: 1}}},
		"GET /sandboxes/lab": {sb},
		"GET /sandboxes/lab/inspect": {wire.Inspection{
			Sandbox: sb, Env: []string{"PATH"}, Rules: []string{"allow 203.0.113.0/24:443"}, Layers: []string{"sha256:00"}, Slot: 3,
			State: "running", LastOutput: "bye\n",
			Volumes: []wire.VolumeMount{{Name: "data", PVC: &wire.PVC{ClaimName: "data"}, MountPath: "/data"}}, Notes: []string{"note"},
			Host: map[string]string{"address": "10.0.0.2"},
		}},
		"GET /images/base": {wire.ImageInspection{
			ImageInfo: im, Layers: []string{"sha256:00"}, Env: []string{"A=b"},
			Workdir: "/workspace", User: "root", Labels: map[string]string{"team": "a"},
		}},
		"GET /snapshots/before/inspect": {wire.SnapshotInspection{
			Snapshot: snap, Image: "base", ImageDigest: "sha256:00",
			Layers: []string{"sha256:00"}, Bytes: 4096, Memory: &wire.SnapshotMemory{Bytes: 1 << 20, Build: "00", CPU: "a fast one"},
		}},
		"GET /volumes/data": {vol},
		"GET /sandboxes/lab/proxy/44772/command": {[]agent.CommandStatus{
			{ID: commandID, Content: "make test", Running: true, StartedAt: "2026-01-02T03:04:05Z"},
		}},
		"GET /sandboxes/lab/proxy/44772/command/status/" + commandID: {agent.CommandStatus{
			ID: commandID, Content: "make test", ExitCode: new(5), Reason: agent.ReasonExited, StartedAt: "2026-11-22T07:30:00Z",
			FinishedAt: "2026-11-22T07:30:01Z",
		}},
		"GET /stats": {wire.StatsList{Items: []wire.SandboxStats{{
			ID: testID, Name: "lab", Runtime: "runsc",
			State: wire.Running, CreatedAt: at, Usage: usage,
		}}}},
		"GET /sandboxes/lab/stats": {usage},
		"GET /diff":                {wire.Change{Kind: "A", Path: "/a<b"}, wire.Change{Kind: "D", Path: "/c\x1b"}},
		"GET /events": {
			"data: " + encoded(wire.Event{Type: "created", ID: testID, Time: at}),
			"data: " + encoded(wire.Event{Type: "ended", ID: testID, Time: at, Reason: "oom"}),
		},
		"GET /sandboxes/lab/endpoints/80": {wire.Endpoint{
			Endpoint: "127.0.0.1:8080/sandboxes/lab/proxy/80",
			Headers:  map[string]string{"X": "y"},
		}},
		"GET /sandboxes/lab/network/flows": {wire.NetworkFlows{
			Since: &at, Other: &wire.Connections{Denied: 9, FirstSeen: at, LastSeen: at},
			Flows: []wire.Flow{
				{
					Destination: "pypi.org", Port: 443, Protocol: "tcp",
					Connections: wire.Connections{Allowed: 3, FirstSeen: at, LastSeen: at},
				},
				{Destination: "203.0.113.9", Protocol: "icmp", Connections: wire.Connections{Denied: 1, FirstSeen: at, LastSeen: at}},
			},
		}},
		"GET /sandboxes/lab/network/stats": {wire.NetworkStats{
			Time: at, Since: &at, RxBytes: 2048, TxBytes: 1024, RxPackets: 20, TxPackets: 10, Allowed: 3, Denied: 10,
		}},
		"GET /sandboxes/lab/networkpolicy": {wire.PolicyStatus{
			Status: "ok", Mode: "enforcing", EnforcementMode: "dns+nft",
			Policy: &wire.NetworkPolicy{
				DefaultAction: "deny", Egress: []wire.NetworkRule{{
					Action: "allow", Target: "203.0.113.0/24", Ports: []any{443, "8000-8100"},
					Protocol: "tcp",
				}},
			},
		}},
		"GET /sandboxes/lab/network/denials": {wire.Denials{
			Items: []wire.Denial{{
				Time: at, First: at, Times: 3, Protocol: "tcp", Name: "pypi.org", Address: "203.0.113.7", Port: 443, Rule: "default",
				By: "proxy", Reason: "no rule allows it", Allow: "pypi.org:443",
			}},
			Total: 3, Since: at,
		}},
		"GET /sandboxes/lab/network/explain": {explained},
		"POST /sandboxes/lab/network/test": {wire.NetworkTest{
			Target: "pypi.org:443/tcp", Step: "resolve", Took: 1.25, Error: "no such host", Explanation: explained,
		}},
		"GET /sandboxes/lab/diagnostics/logs": {wire.Diagnostic{
			SandboxID: testID, Kind: "logs", Scope: "all", Delivery: "inline", ContentType: "text/plain; charset=utf-8", Content: "up\n",
			ContentLength: 3, Warnings: []string{"w"},
		}},
		"GET /sandboxes/lab/diagnostics/events": {wire.Diagnostic{
			SandboxID: testID, Kind: "events", Scope: "network", Delivery: "inline",
			ContentType: "text/plain; charset=utf-8",
		}},
		"GET /images":                {wire.ImageList{Items: []wire.ImageInfo{im}}},
		"POST /images/build":         {wire.BuildLine{Line: "building"}, wire.BuildLine{Image: &im}},
		"POST /images":               {wire.ImportLine{Image: &im}},
		"POST /sandboxes/lab/commit": {im},
		"POST /images/pull":          {wire.ImportLine{Image: &im}},
		"POST /images/prune":         {wire.PruneReport{Images: []string{"old:1"}, Layers: []string{}, BytesReclaimed: 3}},
		"POST /keys": {wire.NewKey{
			Key:    wire.Key{Name: "ci", Role: "operator", CreatedAt: &at},
			Secret: "secret",
		}},
		"GET /policies": {wire.PolicyList{Items: []wire.PolicySummary{{
			Name: "build", Version: 2, DefaultAction: "deny", Rules: 1, Source: wire.PolicyOfStore, UsedBy: pol.UsedBy, CreatedAt: at,
			EditedAt: at,
		}}}},
		"GET /policies/build": {pol},
		"POST /pools":         {pool},
		"GET /pools":          {wire.PoolList{Items: []wire.Pool{pool}}},
		"GET /pools/py":       {pool},
		"PUT /policies/build": {wire.PolicyEdit{
			Policy: pol, Changed: true, Moved: pol.UsedBy, Pending: []wire.PolicyUser{}, Failed: []wire.PolicyUser{},
		}},
		"GET /keys":                     {wire.KeyList{Items: []wire.Key{{Name: "ci", Role: "operator", CreatedAt: &at}}}},
		"POST /sandboxes/lab/snapshots": {snap},
		"POST /sandboxes/lab/fork": {wire.Fork{
			ID: "fork-" + testID, SandboxID: testID, Mode: wire.ForkFiles, Count: 2, Status: wire.Status{State: wire.ForkReady},
			CreatedAt: at,
			Sandboxes: []wire.ForkChild{{ID: "t1", Name: "try-1", State: wire.Running}, {ID: "t2", Name: "try-2", State: wire.Running}},
		}},
		"GET /snapshots": {wire.SnapshotList{
			Items:      []wire.Snapshot{snap},
			Pagination: wire.Pagination{Page: 1, TotalItems: 1},
		}},
		"POST /volumes":       {vol},
		"GET /volumes":        {wire.VolumeList{Items: []wire.Volume{}}},
		"POST /volumes/prune": {wire.VolumePruneReport{Volumes: []string{"spare"}}},
		"POST /sandboxes/lab/proxy/44772/code/context": {cc},
		"GET /sandboxes/lab/proxy/44772/code/contexts": {[]agent.CodeContext{cc}},
		"POST /sandboxes/lab/proxy/44772/session":      {agent.SessionCreated{SessionID: commandID}},
		"POST /sandboxes/lab/proxy/44772/code": {
			agent.Event{Type: "init", Text: "c1"},
			agent.Event{Type: "result", Results: map[string]string{"text/plain": "1"}},
			agent.Event{Type: "execution_complete"},
		},
		"GET /system/info": {wire.SystemInfo{
			Version: version, Started: at, Cgroups: "unified", Pool: "btrfs",
			Sandboxes: map[string]int{"Running": 2},
		}},
		"GET /system/backups":        {wire.BackupList{Items: []wire.Backup{kept}}},
		"POST /system/backups":       {kept},
		"POST /system/backups/drill": {wire.BackupDrill{Backup: kept, Sandboxes: 3, TookMillis: 40}},
		"POST /system/backups/adopt": {wire.BackupList{Items: []wire.Backup{kept}}},
		"POST /system/backups/check": {
			wire.BackupCheckLine{Progress: &wire.BackupCheck{Backups: 1, Of: 2}},
			wire.BackupCheckLine{Report: &wire.BackupCheck{Backups: 2, Of: 2, Packs: 7, Bytes: 100 << 20}},
		},
		"POST /system/backups/remove": {wire.RemovedBackups{Items: []wire.Backup{kept}, Packs: 2, Bytes: 40 << 20}},
		"GET /system/backups/status": {wire.BackupStatus{
			Target: "/srv/backups", EverySeconds: 86400, Keep: 14,
			Backup: wire.BackupRun{LastGood: &at, Name: kept.Name, Bytes: 4096, FailingSince: &at, LastTried: &at, Error: "it is full"},
			Data:   &wire.BackupData{Bytes: 1 << 30, SentBytes: 1 << 20, Packs: 65, LeftOut: 1, Check: wire.BackupRun{LastGood: &at}},
		}},
		"GET /system/df": {wire.DiskUsage{Images: []wire.ImageDisk{{Name: "base", Tag: "latest", Bytes: 1}}, Lost: 2}},
		"POST /system/prune": {wire.SystemPruneReport{
			Sandboxes: []string{testID}, Snapshots: []string{}, Images: []string{"old:1"}, Layers: []string{}, Volumes: []string{},
			BytesReclaimed: 3,
		}},
		"GET /version": {version},

		"GET /sandboxes/lab/credential-vault":   {secrets},
		"PATCH /sandboxes/lab/credential-vault": {secrets},
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked := r.Method + " " + strings.Replace(strings.TrimPrefix(r.URL.Path, "/v1"), testID, "lab", 1)
		lines, ok := answers[asked]
		if !ok {
			t.Errorf("nobody answers %s", asked)
		}
		if r.URL.Query().Get("of") == "same" {
			lines = nil
		}
		io.Copy(io.Discard, r.Body) //nolint:errcheck // a client that left is seen by its output
		for _, l := range lines {
			if text, ok := l.(string); ok {
				fmt.Fprintf(w, "%s\n\n", text)
			} else {
				fmt.Fprintln(w, encoded(l))
			}
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func encoded(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}
