package store

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A commit is what one transaction did to the file: images of before and after,
// and of the store's contents.
type commit struct {
	what           string
	before, after  []byte
	empty, written string // contents before and after
}

// contents is all a store holds, as text: every bucket there is.
func contents(t testing.TB, db *DB) string {
	t.Helper()
	var b strings.Builder
	if err := db.bolt.View(func(tx *bbolt.Tx) error {
		for err := range tx.Check() {
			t.Errorf("bbolt's own check: %v", err)
		}
		return tx.ForEach(func(name []byte, bucket *bbolt.Bucket) error {
			fmt.Fprintf(&b, "%s, sequence %d:\n", name, bucket.Sequence())
			defer b.WriteString("\n")
			return bucket.ForEach(func(k, v []byte) error {
				_, err := fmt.Fprintf(&b, " %q %q\n", k, v)
				return err
			})
		})
	}); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// withRecords are the buckets whose values are records.
var withRecords = [][]byte{
	bucketBoxes, bucketImages, bucketSnapshots, bucketRequests, bucketKeys, bucketVolumes, bucketPolicies, bucketSecrets,
	bucketPools,
}

// fullest is the step of a day after which every bucket has something in it.
const fullest = "growth"

// day is what production calls in a day of a store: each kind of commit, growth of
// the file and pages of several pages included.
func day(ctx context.Context, db *DB) []step {
	put := func(id string, s record.State, output int) error {
		r, _, err := db.Get(ctx, id)
		if err != nil {
			return err
		}
		r.State, r.LastOutput = s, strings.Repeat("x", output)
		return db.Put(ctx, r)
	}
	mounts := []record.VolumeMount{{Claim: "mine", Volume: "vol-daaaaaaaaaaa", Create: true, Owned: true}}
	large := strings.Repeat("l", page) // so that one page that is lost is not all of a record
	request := record.Request{Key: "asked", Body: large}
	snap := record.Snapshot{ID: "snap-daaaaaaaaaaa", Source: "daaaaaaaaaaa", State: record.SnapshotCreating}
	return []step{
		{"pool", func() error { return db.SetPoolID(ctx, "p1") }},
		{"insert", func() error { // with its name, slot, request and volume
			return db.Insert(ctx, &record.Record{ID: "daaaaaaaaaaa", Spec: record.Spec{Name: "lab", Request: request, Volumes: mounts}})
		}},
		{"volume made", func() error { return db.VolumeMade(ctx, "mine", "vol-daaaaaaaaaaa") }},
		{"run", func() error { return put("daaaaaaaaaaa", record.Running, 0) }},
		{"snapshot", func() error { return db.PutSnapshot(ctx, snap) }},
		{"snapshot ready", func() error {
			snap.State, snap.Message = record.SnapshotReady, large
			return db.PutSnapshot(ctx, snap)
		}},
		{"a large record", func() error { return put("daaaaaaaaaaa", record.Ended, 8<<10) }},
		{"image", func() error {
			return db.PutImage(ctx, record.Image{
				Name: "base", Tag: "latest", Digest: "sha256:1",
				Config: record.ImageConfig{Env: []string{large}},
			}, true)
		}},
		{"key", func() error { return db.AddKey(ctx, record.Key{Name: "ci", Role: record.Operator, Sum: []byte(large)}) }},
		{"volume", func() error {
			return db.AddVolume(ctx, record.Volume{ID: "vol-dbbbbbbbbbbb", Name: "shared", State: record.VolumeReady, Owner: large})
		}},
		{"policy", func() error {
			v := allows(1)
			v.NetworkPolicy = []byte(large)
			_, _, err := db.PutPolicy(ctx, "build", false, v)
			return err
		}},
		{"pool of sandboxes", func() error { return db.AddPool(ctx, record.Pool{Name: "py", Template: []byte(large)}) }},
		{"vault", func() error { return db.PutSecret(ctx, vaultOf("daaaaaaaaaaa", large), record.Secret{}) }},
		{"authority", func() error { return db.PutSecret(ctx, authorityOf("daaaaaaaaaaa", large), record.Secret{}) }},
		{fullest, func() error {
			return db.Insert(ctx, &record.Record{ID: "dbbbbbbbbbbb", LastOutput: strings.Repeat("y", 40<<10)})
		}},
		{"another vault", func() error { return db.PutSecret(ctx, vaultOf("dbbbbbbbbbbb", large), record.Secret{}) }},
		{"vault edited", func() error {
			return db.PutSecret(ctx, vaultOf("dbbbbbbbbbbb", large+"!"), vaultOf("dbbbbbbbbbbb", large))
		}},
		{"vault deleted", func() error { return db.DeleteSecret(ctx, "dbbbbbbbbbbb", record.Vault) }},
		{"deleting", func() error { return put("daaaaaaaaaaa", record.Deleting, 0) }},
		{"delete", func() error { return db.Delete(ctx, "daaaaaaaaaaa") }}, // its volume is condemned, its secrets deleted
		{"volume forgotten", func() error { return db.ForgetVolume(ctx, "mine", "vol-daaaaaaaaaaa") }},
		{"volume condemned", func() error {
			_, err := db.CondemnVolume(ctx, "shared")
			return err
		}},
		{"snapshot deleted", func() error { return db.DeleteSnapshotRecord(ctx, snap.ID) }},
		{"policy edited", func() error {
			_, _, err := db.PutPolicy(ctx, "build", false, allows(2))
			return err
		}},
		{"pool edited", func() error { return db.PutPool(ctx, record.Pool{Name: "py", Warm: "true"}) }},
		{"pool deleted", func() error { return db.DeletePool(ctx, "py") }},
		{"policy deleted", func() error { return db.DeletePolicy(ctx, "build") }},
		{"key removed", func() error { return db.RemoveKey(ctx, "ci") }},
		{"requests forgotten", func() error { return db.ForgetRequests(ctx, time.Unix(1, 0)) }},
		{"image deleted", func() error { return db.DeleteImage(ctx, "base", "latest") }},
	}
}

type step struct {
	what string
	do   func() error
}

// commits plays a day of a store.
func commits(t *testing.T) (all []commit) {
	path := filepath.Join(fast(t), "sandboxd.db")
	db := openTest(t, path, Options{Slots: 8, Reserve: -1})
	// The pages that are in use: bbolt makes the file 8 MiB long at once, which
	// would make thousands of images dear.
	read := func() []byte {
		b, err := os.ReadFile(path)
		if err == nil {
			err = db.bolt.View(func(tx *bbolt.Tx) error { b = b[:min(int64(len(b)), tx.Size())]; return nil })
		}
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, step := range day(t.Context(), db) {
		c := commit{what: step.what, before: read(), empty: contents(t, db)}
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		c.after, c.written = read(), contents(t, db)
		if c.written == c.empty {
			t.Fatalf("%s changes nothing", c.what)
		}
		if strings.Contains(c.written, ":\n\n") && c.what == fullest {
			t.Fatalf("after %s a bucket has nothing in it:\n%s", c.what, c.written)
		}
		all = append(all, c)
	}
	return all
}

// unreadable says what db says it cannot read: bucket and key.
func unreadable(t *testing.T, db *DB) (bad []string) {
	t.Helper()
	ctx := t.Context()
	note := func(bucket []byte, keys []string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			bad = append(bad, fmt.Sprintf("%s %s", bucket, k))
		}
	}
	boxes, err := db.Unreadable(ctx)
	note(bucketBoxes, boxes, err)
	_, images, err := db.ListImages(ctx)
	note(bucketImages, images, err)
	_, snapshots, err := db.SnapshotRecords(ctx)
	note(bucketSnapshots, snapshots, err)
	_, volumes, err := db.Volumes(ctx)
	note(bucketVolumes, volumes, err)
	_, policies, err := db.Policies(ctx)
	note(bucketPolicies, policies, err)
	pools, err := db.UnreadablePools(ctx)
	note(bucketPools, pools, err)
	_, secrets, err := db.Secrets(ctx)
	note(bucketSecrets, secrets, err)
	keys, err := db.Keys(ctx)
	note(bucketKeys, nil, err)
	for _, k := range keys {
		if k.Role == "" { // nothing is known of it but its name
			note(bucketKeys, []string{k.Name}, nil)
		}
	}
	for _, key := range requests(t, db) {
		if _, _, err := db.Made(ctx, key); err != nil {
			note(bucketRequests, []string{key}, nil)
		}
	}
	return bad
}

// requests are the keys of all requests that db knows of.
func requests(t *testing.T, db *DB) (keys []string) {
	t.Helper()
	if err := db.bolt.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketRequests).ForEach(func(key, _ []byte) error {
			keys = append(keys, string(key))
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	return keys
}
