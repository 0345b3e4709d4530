package store

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The times in what a release writes. A test that starts a daemon on it may be run
// at any time, and must find what was to be kept.
var (
	past   = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	future = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)
)

// releaseID is the ID of a record that a release writes: uaaaaaaaaaaa for "a".
func releaseID(letter rune) string { return "u" + strings.Repeat(string(letter), 11) }

func releaseImage() record.Image {
	digest := func(of string) string { return "sha256:" + strings.Repeat(of, 32) }
	return record.Image{
		Name: "base", Tag: "latest", Digest: digest("ab"), Layers: []string{digest("cd")}, Bytes: 1 << 20, Created: past,
		Config: record.ImageConfig{
			Env: []string{"PATH=/bin"}, Workdir: "/root", User: "nobody", Labels: map[string]string{"maker": "a"},
			Entrypoint: []string{"nice"}, Cmd: []string{"sleep", "1"}, StopSignal: "SIGQUIT", Platform: "linux/s390x",
		},
		Sources: []string{digest("ef")}, Unused: map[string]json.RawMessage{"Shell": json.RawMessage(`"kept"`)},
	}
}

// fullSpec is a spec with a value in every field, or in one of its like.
func fullSpec() record.Spec {
	return record.Spec{
		Name: "lab", Image: releaseImage(), ImageURI: "ubuntu:24.04", ImageNote: "an alias", Snapshot: "snap-" + releaseID('b'),
		Runtime: "runsc", Entrypoint: []string{"sleep", "1"}, Literal: true, ImageCommand: true, Hostname: "build.example",
		StopSignal: "SIGINT",
		Env:        map[string]string{"KEY": "value"}, Labels: map[string]string{"team": "a"}, Timeout: time.Hour, OneShot: true,
		Limits: record.Limits{
			MemoryBytes: 1 << 28, CPUMillis: 500, CPUShares: 512, Pids: 64, DiskBytes: 1 << 30,
			IOReadBps: 1 << 20, IOWriteBps: 2 << 20, IOReadIOPS: 100, IOWriteIOPS: 200, ShmBytes: 1 << 25, LogBytes: 1 << 21,
		},
		ReadOnly: true, Tmpfs: []record.Tmpfs{{Path: "/tmp", Bytes: 1 << 24, Mode: 0o1777, Exec: true}},
		Volumes: []record.VolumeMount{
			{
				Name: "data", Path: "/data", ReadOnly: true, Sub: "a/b", Claim: "owned", Volume: "vol-" + releaseID('b'), Create: true,
				Bytes: 1 << 26, Owned: true,
			},
			{Name: "host", Path: "/srv", Source: "/srv/files"},
		},
		Prestart: []string{"python"},
		Network: record.Network{Mode: record.NetworkRules, Rules: []record.Rule{
			{Allow: true, Prefix: netip.MustParsePrefix("203.0.113.0/24"), Ports: [2]uint16{443, 443}, Proto: "tcp"},
			{Allow: true, Name: "*.example.com"},
			{
				Allow: true, Name: "api.example.com", Ports: [2]uint16{443, 443}, Proto: "tcp",
				Requests: &record.Requests{Methods: []string{"GET"}, Paths: []string{"/v1/*"}},
			},
		}},
		Publish: []record.Publish{{Host: netip.MustParseAddrPort("127.0.0.1:8080"), Port: 80}}, SecureAccess: true,
		Restart: record.Restart{Policy: record.RestartOnFailure, Max: 3},
		Idle:    record.Idle{After: time.Hour, Action: record.IdlePause},
		Ready: record.Probe{
			Command: "true", Port: 80, Interval: time.Second, Timeout: 2 * time.Second, StartPeriod: 3 * time.Second, Retries: 4,
		},
		Request:        record.Request{Key: strings.Repeat("12", 32), Body: strings.Repeat("34", 32), Holder: strings.Repeat("78", 32)},
		ResourceLimits: map[string]string{"cpu": "500m"}, Platform: map[string]string{"os": "linux"},
		Extensions:    map[string]string{"x": "y"},
		NetworkPolicy: []byte(`{"egress":[]}`),
		Security:      record.SecurityStrict,
		Policy:        record.PolicyUse{Name: "build", Version: 1, Pinned: true, Left: true},
		Inspect:       true,
		Memory:        true,
		Pool:          "py",
		Fork:          record.Fork{ID: "fork-" + releaseID('c'), Source: releaseID('d'), Count: 3, Index: 2, Vault: true},
	}
}

// releaseMemory is a memory image with a value in every field.
func releaseMemory() *record.Memory {
	return &record.Memory{
		MemoryImage: *releaseMemoryImage(),
		Spec:        fullSpec(), Token: "TOKEN",
	}
}

// releaseMemoryImage is one with a value in every field.
func releaseMemoryImage() *record.MemoryImage {
	return &record.MemoryImage{
		Files: []record.MemoryFile{{Name: "checkpoint.img", Bytes: 1 << 10, Sum: 7}, {Name: "pages.img", Bytes: 1 << 20, Sum: 1<<32 - 1}},
		Needs: record.MemoryNeeds{
			Build: strings.Repeat("9a", 32), Agent: strings.Repeat("9b", 32), CPU: "a fast one", Features: []string{"avx", "sse"},
		},
	}
}

// releasePolicy is a policy with a value in every field.
func releasePolicy() record.PolicyVersion {
	return record.PolicyVersion{Made: past, Network: fullSpec().Network, NetworkPolicy: []byte(`{"egress":[]}`)}
}

// fullRecord is a record with a value in every field: the seventh, which ended.
func fullRecord() record.Record {
	code := 3
	r := record.Record{
		ID: releaseID('g'), State: record.Ended, Token: "TOKEN", BootID: "a-boot-long-ago", Userspace: "a-user-space",
		Created: past, Expires: future,
		Prepared: true, Updated: past.Add(time.Second), Started: past.Add(time.Second),
		Restarts: 3, QuickRestarts: 2, // as many as there may be, so that a daemon does not start it
		Reason: record.Exited, Message: "exited with 3", ExitCode: &code, LastOutput: "bye\n",
		Changed: future, // retain_ended must not end it before a test looks
		Spec:    fullSpec(),
		Pool:    record.PoolUse{Name: "py", Revision: "012345abcdef", Miss: "another image"}, MemberToken: "OTHER",
	}
	r.Spec.Name, r.Spec.Request.Key = "kept", strings.Repeat("56", 32)
	r.Spec.Volumes[0].Claim, r.Spec.Volumes[0].Volume = "owned-too", "vol-"+r.ID
	return r
}

// releaseStates are all states of a sandbox, in the order of the IDs that a
// release writes.
var releaseStates = []record.State{
	record.Creating, record.Running, record.Pausing, record.Paused, record.Resuming, record.Stopping, record.Ended, record.Deleting,
	record.Starting, record.Prepared, record.Hibernating, record.Hibernated, record.Waking,
}

// fillStore writes a sandbox, a snapshot, a volume in every state and a value in
// every field.
func fillStore(t *testing.T, db *DB) {
	t.Helper()
	ctx, image := t.Context(), releaseImage()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(db.SetPoolID(ctx, "00112233445566778899aabbccddeeff"))
	must(db.PutImage(ctx, image, true))
	for i, s := range []record.SnapshotState{
		record.SnapshotCreating, record.SnapshotReady, record.SnapshotFailed,
		record.SnapshotDeleting,
	} {
		snap := record.Snapshot{
			ID: "snap-" + releaseID('a'+rune(i)), Name: "before", Source: releaseID('b'), State: s, Image: image,
			Created: past, Changed: future, Security: record.SecurityStrict,
		}
		switch s {
		case record.SnapshotReady:
			snap.Bytes, snap.Memory = 1<<20, releaseMemory()
		case record.SnapshotFailed:
			snap.Message = "the disk is full"
		case record.SnapshotDeleting: // a daemon that starts deletes a temporary one in any state
			snap.Temporary = true
		}
		must(db.PutSnapshot(ctx, snap))
	}
	for i, s := range []record.VolumeState{record.VolumeReady, record.VolumeDeleting} {
		must(db.AddVolume(ctx, record.Volume{
			ID: "vol-" + releaseID('x'+rune(i)), Name: "volume-" + string(s), State: s, Bytes: 1 << 20,
			Created: past,
		}))
	}
	must(db.VolumeMade(ctx, "volume-ready", "vol-"+releaseID('x')))
	must(second(db.PutPolicy(ctx, "build", true, releasePolicy())))
	must(db.AddPool(ctx, record.Pool{
		Name: "py", Fixed: true, Created: past, Template: []byte(`{"image":{"uri":"base"}}`), Warm: "true", Ready: "true", MaxAge: time.Hour,
		Capacity: record.Capacity{BufferMin: 1, BufferMax: 2, PoolMin: 1, PoolMax: 3},
	}))
	must(db.AddKey(ctx, record.Key{
		Name: "ci", Role: record.Operator, Sum: []byte(strings.Repeat("s", 32)), Created: past,
		Expires: future,
	}))
	for i, s := range releaseStates {
		r := record.Record{
			ID: releaseID('a' + rune(i)), State: s, Token: "TOKEN", BootID: "a-boot-long-ago", Created: past,
			Changed: past.Add(time.Minute),
			Spec: record.Spec{
				Image: image, Runtime: "runc", Limits: record.Limits{MemoryBytes: 1 << 28, CPUMillis: 1000, Pids: 256},
				Network: record.Network{Mode: record.NetworkNone},
			},
		}
		switch s {
		case record.Running:
			r.Spec = fullSpec()
			r.Spec.Restart = record.Restart{}
		case record.Ended:
			r = fullRecord()
		case record.Hibernated:
			r.Spec.Runtime, r.Hibernation = "runsc", releaseMemoryImage()
		}
		must(db.Insert(ctx, &r))
	}
	must(db.PutSecret(ctx, vaultOf(releaseID('b'), "sealed"), record.Secret{}))
	must(db.PutSecret(ctx, authorityOf(releaseID('b'), "sealed"), record.Secret{}))
	must(db.Delete(ctx, releaseID('a'))) // a slot that was given back
	r := record.Record{
		ID: releaseID('a'), State: record.Creating, BootID: "a-boot-long-ago", Created: past, Changed: past,
		Spec: record.Spec{Image: image, Runtime: "runc"},
	}
	must(db.Insert(ctx, &r))
}

func second(_, _ record.Policy, err error) error { return err }

// writeRelease writes a store as of this release, and what is in it.
func writeRelease(t *testing.T, dir string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o755), os.Mkdir(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "sandboxd.db")
	db := openTest(t, path, Options{Slots: 32, Reserve: -1})
	fillStore(t, db)
	text := indented(t, contentsOf(t, db))
	closeTest(t, db)
	err := errors.Join(
		os.WriteFile(filepath.Join(dir, "contents.json"), text, 0o644),
		os.Chmod(path, 0o644), // git keeps no other mode
		os.Truncate(path, usedBytes(t, path)),
	)
	if err != nil {
		t.Fatal(err)
	}
}

// usedBytes is how much of a store's file is in use: bbolt makes it 8 MiB long.
func usedBytes(t *testing.T, path string) int64 {
	t.Helper()
	b, err := open(path, time.Second, true)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close() //nolint:errcheck // read only
	tx, err := b.Begin(false)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() //nolint:errcheck // read only
	return tx.Size()
}

// TestRelease writes a release as of now and opens it. A field without a value in
// it is one whose loss no upgrade would show, and fails here; so does one that the
// file does not keep, and a state that nothing in it has.
func TestRelease(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "release")
	writeRelease(t, dir)
	path, want := readRelease(t, dir)
	put, got := fullRecord(), *want.Records[slices.Index(releaseStates, record.Ended)]
	put.Slot = got.Slot
	if !reflect.DeepEqual(got, put) {
		t.Errorf("read\n%+v\nput\n%+v", got, put)
	}
	seen := fields{}
	for _, v := range []any{
		want.Records, want.Images, want.Snapshots, want.Requests, want.Keys, want.Volumes, want.Policies, want.Secrets, want.Pools,
	} {
		seen.add(reflect.ValueOf(v))
	}
	for _, name := range seen.empty() {
		t.Errorf("%s has no value in anything that a release writes; give it one in fullSpec, fullRecord or fillStore, with which a "+
			"daemon can start", name)
	}
	text := string(indented(t, want))
	for _, state := range states(t) {
		if !strings.Contains(text, fmt.Sprintf(`"state": %s`, state)) {
			t.Errorf("nothing that a release writes has the state %s; add it to releaseStates or fillStore", state)
		}
	}
	upgrades(t, path, want)
}

// fields says of the fields of structs whether any value of theirs was not zero.
type fields map[string]bool

// add looks at v and all that it holds.
func (f fields) add(v reflect.Value) {
	if _, ok := v.Interface().(encoding.TextMarshaler); ok {
		return // a time, an address
	}
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			f.add(v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			f.add(v.Index(i))
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			f.add(v.MapIndex(key))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			name := v.Type().String() + "." + v.Type().Field(i).Name
			f[name] = f[name] || !v.Field(i).IsZero()
			f.add(v.Field(i))
		}
	}
}

func (f fields) empty() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if !f[name] {
			names = append(names, name)
		}
	}
	return names
}

// states are the values, quoted, of all states that package record knows.
func states(t *testing.T) (values []string) {
	t.Helper()
	files, err := filepath.Glob("../sandbox/record/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range files {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			if typ, ok := spec.Type.(*ast.Ident); ok && strings.HasSuffix(typ.Name, "State") {
				for _, v := range spec.Values {
					values = append(values, v.(*ast.BasicLit).Value)
				}
			}
			return true
		})
	}
	if len(values) < len(releaseStates) {
		t.Fatalf("package record has the states %v only", values)
	}
	return values
}
