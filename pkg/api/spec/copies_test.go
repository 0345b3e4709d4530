package spec

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// copyOffer is what the host of these tests offers.
func copyOffer() *Offer {
	o := &Offer{ParseRule: policy.ParseRule, ParsePolicy: policy.FromJSON, NormalName: policy.NormalName}
	o.Complete()
	return o
}

// copied is the specification of a sandbox, with a value of its own in every field.
func copied() record.Spec {
	return record.Spec{
		Name: "origin", Hostname: "build", Image: record.Image{Name: "base"}, ImageURI: "ubuntu", ImageNote: "an alias",
		Snapshot: "snap-taaaaaaaaaaa", Memory: true, Runtime: "runc", Security: record.SecurityStrict, Entrypoint: []string{"serve all"},
		Literal: true, ImageCommand: true, Env: map[string]string{"A": "1", "B": "2"}, Labels: map[string]string{"team": "a", "x": "y"},
		Timeout: time.Hour, OneShot: true,
		Limits: record.Limits{
			MemoryBytes: 1 << 28, CPUMillis: 500, CPUShares: 512, Pids: 64, DiskBytes: 1 << 30, IOReadBps: 1 << 20, IOWriteBps: 2 << 20,
			IOReadIOPS: 100, IOWriteIOPS: 200, ShmBytes: 1 << 25, LogBytes: 1 << 21,
		},
		ReadOnly: true, Tmpfs: []record.Tmpfs{{Path: "/x", Bytes: 1 << 24}},
		Volumes:  []record.VolumeMount{{Name: "v", Claim: "data", Path: "/data"}},
		Prestart: []string{"python"},
		Network:  record.Network{Mode: record.NetworkOpen}, NetworkPolicy: []byte(`{"defaultAction":"allow"}`),
		Policy: record.PolicyUse{Name: "build", Version: 3}, Inspect: true,
		Publish:      []record.Publish{{Host: netip.MustParseAddrPort("127.0.0.1:8080"), Port: 80}},
		SecureAccess: true, Restart: record.Restart{Policy: record.RestartAlways}, Ready: record.Probe{Port: 80},
		Idle:    record.Idle{After: time.Minute, Action: record.IdlePause},
		Request: record.Request{Key: "k"}, ResourceLimits: map[string]string{"memory": "256Mi", "cpu": "0.5"},
		Platform: map[string]string{"os": "linux"}, Extensions: map[string]string{"other": "x"},
		Pool: "py", StopSignal: "SIGQUIT",
		Fork: record.Fork{ID: "fork-x", Source: "t", Count: 1, Index: 1, Vault: true},
	}
}

// fieldsOf are the fields of a specification. Those of its limits are named limits.X.
func fieldsOf(s record.Spec) map[string]any {
	all := map[string]any{}
	v := reflect.ValueOf(s)
	for i := range v.NumField() {
		all[v.Type().Field(i).Name] = v.Field(i).Interface()
	}
	delete(all, "Limits")
	l := reflect.ValueOf(s.Limits)
	for i := range l.NumField() {
		all["limits."+l.Type().Field(i).Name] = l.Field(i).Interface()
	}
	return all
}

// takes holds a copy to take over from its source what is in taken, and nothing else: other is
// what it would be without one.
func takes(t *testing.T, got, source, other record.Spec, taken ...string) {
	t.Helper()
	was, without := fieldsOf(source), fieldsOf(other)
	for name, is := range fieldsOf(got) {
		want, from := without[name], "nothing"
		if slices.Contains(taken, name) || strings.HasPrefix(name, "limits.") {
			want, from = was[name], "the source"
		}
		if reflect.ValueOf(was[name]).IsZero() {
			t.Errorf("the source has no %s: this proves nothing", name)
		}
		if !reflect.DeepEqual(is, want) {
			t.Errorf("%s is %v; from %s it has %v", name, is, from, want)
		}
	}
}

// restored is what a sandbox that begins with the memory of another one has of it.
var restored = []string{"Runtime", "Security", "Entrypoint", "Literal", "StopSignal", "ReadOnly", "Tmpfs", "Prestart", "Volumes", "Inspect"}

func TestForkedTakesOver(t *testing.T) {
	o := copyOffer()
	for _, mode := range []string{wire.ForkMemory, wire.ForkFiles} {
		source := copied()
		before := fieldsOf(source)
		req := &wire.ForkRequest{Count: 1, Mode: mode, Timeout: new(int64(120))}
		copies, memory, err := o.Forked(req, &record.Record{Spec: source}, true)
		if err != nil || len(copies) != 1 || memory != (mode == wire.ForkMemory) {
			t.Fatalf("%s: %d copies, %v, %v", mode, len(copies), memory, err)
		}
		other := record.Spec{Timeout: 2 * time.Minute, Memory: memory} // the snapshot, and what is of the fork, come later
		takes(t, copies[0], source, other, slices.Concat(restored, []string{
			"Env", "Labels", "Network", "NetworkPolicy", "Policy", "SecureAccess", "Restart", "Ready", "Idle", "Platform", "ResourceLimits",
		})...)
		if !reflect.DeepEqual(fieldsOf(source), before) {
			t.Errorf("%s: the source was changed", mode)
		}
	}
}

// TestForkedStates: what a request states wins over what the source has, and the source is left
// as it is: records are shared.
func TestForkedStates(t *testing.T) {
	source := copied()
	before := fieldsOf(copied())
	req := &wire.ForkRequest{Count: 2, Overrides: &wire.ForkOverrides{
		ResourceLimits: map[string]string{
			"memory": "128Mi", "cpu": "2", "pids": "77", "disk": "2Gi", "cpuShares": "100", "ioReadBps": "3145728", "ioWriteBps": "max",
			"ioReadIops": "70", "ioWriteIops": "80", "shm": "16Mi", "logSize": "4Mi",
		},
		Env: map[string]*string{"A": new("other"), "C": new("3")}, Metadata: map[string]string{"team": "b", "more": "z"},
		NetworkPolicy: []byte(`{"defaultAction":"deny","egress":[{"action":"allow","target":"203.0.113.9"}]}`),
		Extensions: map[string]string{
			wire.ExtName: "try", wire.ExtTimeout: "90s", wire.ExtReadOnly: "false", wire.ExtTmpfs: "/y:size=1m", wire.ExtRestart: "no",
			wire.ExtReadyPort: "81", wire.ExtHostname: "host", wire.ExtOneShot: "true",
			wire.ExtStopSignal: "INT",
		},
	}}
	copies, memory, err := copyOffer().Forked(req, &record.Record{Spec: source}, false)
	if err != nil || len(copies) != 2 || memory {
		t.Fatalf("%d copies, %v", len(copies), err)
	}
	for i, c := range copies {
		if want := []string{"try-1", "try-2"}[i]; c.Name != want {
			t.Errorf("copy %d has the name %q", i+1, c.Name)
		}
		for name, is := range fieldsOf(c) {
			want, stated := map[string]any{
				"limits.MemoryBytes": int64(128 << 20), "limits.CPUMillis": int64(2000), "limits.Pids": int64(77),
				"limits.DiskBytes": int64(2 << 30), "limits.CPUShares": int64(100), "limits.IOReadBps": int64(3 << 20),
				"limits.IOWriteBps": int64(0), "limits.IOReadIOPS": int64(70), "limits.IOWriteIOPS": int64(80),
				"limits.ShmBytes": int64(16 << 20), "limits.LogBytes": int64(4 << 20),
				"Env":    map[string]string{"A": "other", "B": "2", "C": "3"},
				"Labels": map[string]string{"team": "b", "x": "y", "more": "z"}, "Timeout": 90 * time.Second, "ReadOnly": false,
				"Restart": record.Restart{Policy: record.RestartNo}, "Hostname": "host", "OneShot": true, "StopSignal": "INT",
				"Policy": record.PolicyUse{}, "Extensions": req.Overrides.Extensions,
			}[name]
			if stated && !reflect.DeepEqual(is, want) {
				t.Errorf("copy %d: %s is %v, want %v", i+1, name, is, want)
			}
			if strings.HasPrefix(name, "limits.") && !stated {
				t.Errorf("%s is not stated in this test", name)
			}
		}
		if c.Network.Mode != record.NetworkRules || len(c.Network.Rules) == 0 || c.Ready.Port != 81 || len(c.Tmpfs) != 1 ||
			c.Tmpfs[0].Path != "/y" || c.ResourceLimits["cpu"] != "2" || string(c.NetworkPolicy) != string(req.Overrides.NetworkPolicy) {
			t.Errorf("copy %d is %+v", i+1, c)
		}
	}
	if after := fieldsOf(source); !reflect.DeepEqual(after, before) {
		t.Errorf("the source was changed:\n%v\n%v", after, before)
	}
	for _, key := range []string{wire.ExtNetwork, wire.ExtAllow, wire.ExtRules, wire.ExtPolicy} { // each replaces the whole policy
		value := map[string]string{
			wire.ExtNetwork: "none", wire.ExtAllow: "203.0.113.9", wire.ExtRules: "deny=203.0.113.9", wire.ExtPolicy: "other",
		}[key]
		copies, _, err := copyOffer().Forked(&wire.ForkRequest{
			Count: 1, Timeout: new(int64(60)), Overrides: &wire.ForkOverrides{Extensions: map[string]string{key: value}},
		}, &record.Record{Spec: copied()}, false)
		if err != nil || copies[0].Network.Mode == record.NetworkOpen || copies[0].Policy.Name == "build" ||
			copies[0].NetworkPolicy != nil {
			t.Errorf("%s: %+v, %v", key, copies, err)
		}
	}
}

// TestForkedOfLittle: a source without maps has copies with those of the request.
func TestForkedOfLittle(t *testing.T) {
	over := &wire.ForkOverrides{
		Env: map[string]*string{"A": new("1")}, Metadata: map[string]string{"a": "b"}, ResourceLimits: map[string]string{"pids": "50"},
	}
	source := record.Spec{Runtime: "runsc", Entrypoint: []string{"x"}}
	req := &wire.ForkRequest{Count: 1, Timeout: new(int64(60)), Overrides: over}
	copies, _, err := copyOffer().Forked(req, &record.Record{Spec: source}, true)
	if err != nil || copies[0].Name != "" || !maps.Equal(copies[0].Env, map[string]string{"A": "1"}) ||
		!maps.Equal(copies[0].Labels, over.Metadata) || !maps.Equal(copies[0].ResourceLimits, over.ResourceLimits) ||
		copies[0].Pids != 50 || copies[0].Security != record.SecurityDefault || copies[0].Extensions != nil {
		t.Errorf("%+v, %v", copies, err)
	}
}

// TestBegan: with the memory of a snapshot, a sandbox has what its programs must find; with the
// files alone, it has the image.
func TestBegan(t *testing.T) {
	source := copied()
	snap := &record.Snapshot{
		ID: "snap-tbbbbbbbbbbb", Image: record.Image{Name: "python"}, Security: record.SecurityStrict, Memory: &record.Memory{Spec: source},
	}
	o := copyOffer()
	create := func(change func(*wire.CreateRequest)) (record.Spec, record.Spec) {
		t.Helper()
		req := &wire.CreateRequest{SnapshotID: snap.ID, Extensions: map[string]string{wire.ExtMemory: "true"}}
		change(req)
		s, err := o.Spec(req)
		if err != nil {
			t.Fatal(err)
		}
		without := s
		Began(&s, req, snap)
		return s, without
	}
	got, other := create(func(*wire.CreateRequest) {})
	other.Snapshot, other.Image = snap.ID, snap.Image
	takes(t, got, source, other, restored...)

	// What is stated wins. The Manager refuses what cannot be.
	got, _ = create(func(r *wire.CreateRequest) {
		r.Extensions = map[string]string{
			wire.ExtMemory: "true", wire.ExtRuntime: "runsc", wire.ExtReadOnly: "false", wire.ExtTmpfs: "/y", wire.ExtPrestart: "bash",
			wire.ExtSecurity: "default",
		}
		r.Entrypoint, r.ResourceLimits = []string{"mine"}, map[string]string{"memory": "128Mi", "ioReadBps": "max"}
		r.CredentialProxy = &wire.CredentialProxy{Enabled: false}
	})
	if got.Runtime != "runsc" || got.ReadOnly || got.Tmpfs[0].Path != "/y" || got.Prestart[0] != "bash" ||
		got.Security != record.SecurityDefault || got.Entrypoint[0] != "mine" || got.Literal || got.MemoryBytes != 128<<20 ||
		got.IOReadBps != 0 || got.Pids != source.Pids || got.Inspect {
		t.Errorf("%+v", got)
	}

	// An SDK sends its default with every creation, and means none by it. What only looks like it is
	// an entrypoint.
	got, other = create(func(r *wire.CreateRequest) { r.Entrypoint = []string{"tail", "-f", "/dev/null"} })
	other.Snapshot, other.Image = snap.ID, snap.Image
	takes(t, got, source, other, restored...)
	for _, stated := range [][]string{{"tail -f /dev/null"}, {"tail", "-f", "/dev/null", "/dev/zero"}, {"tail", "-F", "/dev/null"}} {
		if got, _ = create(func(r *wire.CreateRequest) { r.Entrypoint = stated }); !slices.Equal(got.Entrypoint, stated) {
			t.Errorf("%q became %q", stated, got.Entrypoint)
		}
	}

	// The files alone, and a snapshot that has nothing else.
	got, _ = create(func(r *wire.CreateRequest) { r.Extensions = nil })
	if got.Memory || got.Runtime != "runsc" || got.Entrypoint[0] != "tail" || got.Image.Name != "python" ||
		got.Security != record.SecurityStrict {
		t.Errorf("%+v", got)
	}
	snap.Memory = nil
	if got, _ = create(func(*wire.CreateRequest) {}); !got.Memory || got.Runtime != "runsc" || got.Entrypoint != nil {
		t.Errorf("%+v", got)
	}
}
