package bundle

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aead.dev/minisign"
	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// read opens the bundle with these bytes and extracts it to out, which must not exist if it is
// refused.
func read(t testing.TB, path string, b []byte, key Key) error {
	t.Helper()
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := Open(context.Background(), path, []Key{key})
	if err == nil {
		defer f.Close()
		err = f.Extract(context.Background(), path+".out", all)
	}
	if _, missing := os.Lstat(path + ".out"); (err == nil) != (missing == nil) {
		t.Errorf("%v, and the directory: %v", err, missing)
	}
	if err == nil {
		err = os.RemoveAll(path + ".out")
	}
	if left := tree(t, filepath.Dir(path)); len(left) != 1 {
		t.Errorf("left %q", left)
	}
	return err
}

// TestEveryByte: a bundle of which any byte was changed, is missing or was added is refused.
func TestEveryByte(t *testing.T) {
	by := newSigner(t)
	good, err := os.ReadFile(create(t, by))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "test.bundle")
	if err := read(t, path, good, by.public); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for i, was := range good {
		if _, err := f.WriteAt([]byte{was ^ 1<<(i%8)}, int64(i)); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), path, []Key{by.public}); !known(err) {
			t.Errorf("byte %d was changed: %v", i, err)
		}
		if _, err := f.WriteAt([]byte{was}, int64(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := mustOpen(t, path, by.public).Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := len(good) - 1; i >= 0; i-- {
		if err := f.Truncate(int64(i)); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), path, []Key{by.public}); !known(err) {
			t.Errorf("the first %d bytes: %v", i, err)
		}
	}
	for _, more := range []string{"\x00", "\n", "untrusted comment: x\n", string(good)} {
		refused(t, read(t, path, append(bytes.Clone(good), more...), by.public), errs.Invalid,
			fmt.Sprintf("has %d bytes after its end at %d", len(more), len(good)), path, "copy it again")
	}
}

// known reports whether err is one of those that a bundle may be refused with.
func known(err error) bool {
	switch errs.CodeOf(err) {
	case errs.Invalid, errs.Denied, errs.Unsupported:
		return err != nil && strings.Contains(err.Error(), "is refused: ")
	}
	return false
}

// TestCut: the message says where a copy ends.
func TestCut(t *testing.T) {
	by := newSigner(t)
	made := create(t, by)
	l := mustOpen(t, made, by.public).layout
	good, err := os.ReadFile(made)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "test.bundle")
	for part, end := range map[string]int64{
		"prelude": l.prelude, "verifier": l.prelude + l.verifier, "manifest": l.stream(), "members": l.signed(),
		"signature": l.signed() + l.signature,
	} {
		refused(t, read(t, path, good[:end-1], by.public), errs.Invalid, path,
			fmt.Sprintf("ends after %d of %d bytes, in the %s", end-1, len(good), part), "copy it again")
	}
	refused(t, read(t, path, good[:headerSize-1], by.public), errs.Invalid, "in its header")
	refused(t, read(t, path, nil, by.public), errs.Invalid, "is no bundle")
	refused(t, read(t, path, []byte("#!/bin/sh\necho\n"), by.public), errs.Invalid, "is no bundle")
}

// TestKeys: only a signature of a given key counts, and the message names both keys.
func TestKeys(t *testing.T) {
	by, other := newSigner(t), newSigner(t)
	path := create(t, by)
	_, err := Open(t.Context(), path, []Key{other.public})
	refused(t, err, errs.Denied, path, keyName(by.secret.ID()), keyName(other.secret.ID()), "test.pub", "--key")
	_, err = Open(t.Context(), path, nil)
	refused(t, err, errs.Denied)

	// A key that only says that it is the right one. An ID is no secret.
	text := []byte(other.public.key.String())
	forged := Key{From: "forged.pub"}
	if err := forged.key.UnmarshalText(text); err != nil {
		t.Fatal(err)
	}
	raw := withID(t, forged.key, by.public.key)
	_, err = Open(t.Context(), path, []Key{{From: "forged.pub", key: raw}})
	refused(t, err, errs.Denied, "did not sign these bytes", "forged.pub")

	for text, words := range map[string][]string{
		filepath.Join(t.TempDir(), "none.pub"):                           {"none.pub", "--key"},
		put(t, filepath.Join(t.TempDir(), "bad.pub"), "nonsense", 0o644): {"bad.pub", "minisign -G"},
		"": {"public key"},
	} {
		if _, err := ReadKey(text); err == nil {
			t.Errorf("%q is a key", text)
		} else {
			for _, w := range words {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("no %q in %v", w, err)
				}
			}
		}
	}
	b, err := by.public.key.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	file := put(t, filepath.Join(t.TempDir(), "ok.pub"), string(b)+"\n", 0o644)
	for _, text := range []string{file, by.public.key.String()} {
		if k, err := ReadKey(text); err != nil || !k.key.Equal(by.public.key) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// withID returns key with the ID of another.
func withID(t *testing.T, key, id minisign.PublicKey) (forged minisign.PublicKey) {
	t.Helper()
	a, b := decode(t, key.String()), decode(t, id.String())
	copy(a[2:10], b[2:10])
	if err := forged.UnmarshalText([]byte(encode(a))); err != nil {
		t.Fatal(err)
	}
	return forged
}

// forge makes a bundle of any parts, signed by a key that is trusted.
func forge(by signer, l layout, manifest, members []byte) []byte {
	comment := "sandboxd " + l.version + " linux/" + l.architecture + " forged"
	begin := append([]byte("exit\n"), verifier...)
	l.prelude, l.verifier = headerSize+5, int64(len(verifier))
	l.manifest, l.members, l.signature = int64(len(manifest)), int64(len(members)), signatureSize(comment)
	b := bytes.Join([][]byte{l.header(), begin, manifest, members, {'\n'}}, nil)
	r := minisign.NewReader(bytes.NewReader(b))
	if _, err := io.Copy(io.Discard, r); err != nil {
		panic(err)
	}
	return append(b, sign(r, by.secret, comment)...)
}

var release = layout{version: "1.2.3", architecture: "amd64"}

func squeeze(t testing.TB, b []byte, options ...zstd.EOption) []byte {
	t.Helper()
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out, append(options, zstd.WithEncoderConcurrency(1))...)
	if err == nil {
		_, err = z.Write(b)
	}
	if err == nil {
		err = z.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// one returns the manifest of one member with this content, and what change makes of it.
func one(t testing.TB, content string, change func(m *Manifest, f *Member)) []byte {
	t.Helper()
	sum := sha256.Sum256([]byte(content))
	m := &Manifest{Format: 1, Version: "1.2.3", OS: "linux", Architecture: "amd64", Members: []Member{
		{Name: "a", Kind: File, Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:]), Mode: "0644"},
	}}
	if change != nil {
		change(m, &m.Members[0])
	}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestManifest: a manifest that breaks a rule is refused, also if it is signed.
func TestManifest(t *testing.T) {
	by := newSigner(t)
	path := filepath.Join(t.TempDir(), "test.bundle")
	try := func(manifest []byte) error {
		return read(t, path, forge(by, release, manifest, squeeze(t, []byte("text"))), by.public)
	}
	if err := try(one(t, "text", nil)); err != nil {
		t.Fatal(err)
	}
	// What a later release may add.
	if err := try(bytes.Replace(one(t, "text", nil), []byte("{"), []byte(`{"later":1,`), 1)); err != nil {
		t.Error(err)
	}
	named := func(name string) func(*Manifest, *Member) { return func(_ *Manifest, f *Member) { f.Name = name } }
	second := func(name string) func(*Manifest, *Member) {
		return func(m *Manifest, f *Member) {
			f.Size = 0
			other := *f
			other.Name = name
			m.Members = append(m.Members, other)
		}
	}
	for word, change := range map[string]func(*Manifest, *Member){
		`"../etc/passwd" climbs`:              named("../etc/passwd"),
		`"a/../b" climbs`:                     named("a/../b"),
		`".." climbs`:                         named(".."),
		`"/etc/passwd" is absolute`:           named("/etc/passwd"),
		`"" is empty`:                         named(""),
		`"a\x00b" has other characters`:       named("a\x00b"),
		`"a\\..\\b" has other characters`:     named(`a\..\b`),
		`"a\nb" has other characters`:         named("a\nb"),
		`"é" has other characters`:            named("é"),
		`"a b" has other characters`:          named("a b"),
		`"./a" has an element`:                named("./a"),
		`"a//b" has an element`:               named("a//b"),
		`"a/" has an element`:                 named("a/"),
		`"-rf" has an element`:                named("-rf"),
		`".ssh" has an element`:               named(".ssh"),
		"has an element longer than 255":      named(strings.Repeat("x", 256)),
		"is longer than 512":                  named(strings.Repeat("x/", 256) + "x"),
		`"a" and "a" have one name`:           second("a"),
		`"a" and "A" have one name`:           second("A"),
		`"a" is a directory of the member`:    second("a/b"),
		"are not sorted":                      second("Z"),
		"has the size -1":                     func(_ *Manifest, f *Member) { f.Size = -1 },
		"has the size 4611686018427387904":    func(_ *Manifest, f *Member) { f.Size = 1 << 62 },
		`has the SHA-256 "0"`:                 func(_ *Manifest, f *Member) { f.SHA256 = "0" },
		`has the mode "4755"`:                 func(_ *Manifest, f *Member) { f.Mode = "4755" },
		`has the kind "A B"`:                  func(_ *Manifest, f *Member) { f.Kind = "A B" },
		`is the package "", version ""`:       func(_ *Manifest, f *Member) { f.Kind = Package },
		`is no package, and has`:              func(_ *Manifest, f *Member) { f.Version = "1" },
		"is no semantic version":              func(m *Manifest, _ *Member) { m.Version = "1" },
		`commit "x" is no hash`:               func(m *Manifest, _ *Member) { m.Commit = "x" },
		`system ""`:                           func(m *Manifest, _ *Member) { m.OS = "" },
		"name different releases":             func(m *Manifest, _ *Member) { m.Version = "1.2.4" },
		"header (1.2.3 amd64), manifest (1.2": func(m *Manifest, _ *Member) { m.Architecture = "arm64" },
		"it has 4097 members, more than 4096": func(m *Manifest, f *Member) { m.Members = make([]Member, 4097) },
	} {
		refused(t, try(one(t, "text", change)), errs.Invalid, word, path, "broken program")
	}
	for _, text := range []string{"{}}", "[]", "nul", `{"format":"1"}`, "{\"format\":1"} {
		refused(t, try([]byte(text)), errs.Invalid, "manifest cannot be read")
	}
	for _, format := range []int{-1, 0, 2, 1 << 30} {
		refused(t, try(one(t, "text", func(m *Manifest, _ *Member) { m.Format, m.Members = format, nil })), errs.Unsupported,
			fmt.Sprintf("has format %d and this sandboxd reads format 1", format))
	}
	huge := append(one(t, "text", nil), bytes.Repeat([]byte{' '}, maxManifest)...)
	refused(t, try(huge), errs.Invalid, "its header was changed")
	other := bytes.Replace(forge(by, release, one(t, "text", nil), nil), []byte("format 1"), []byte("format 2"), 1)
	refused(t, read(t, path, other, by.public), errs.Unsupported, "it has format 2")
}

// TestMembers: a stream that does not have what the manifest says is refused, also if it is signed.
func TestMembers(t *testing.T) {
	by := newSigner(t)
	path := filepath.Join(t.TempDir(), "test.bundle")
	sized := func(n int64) func(*Manifest, *Member) { return func(_ *Manifest, f *Member) { f.Size = n } }
	whole := squeeze(t, []byte("text"))
	for name, c := range map[string]struct {
		manifest, members []byte
		words             string
	}{
		"shorter than it says": {one(t, "text", sized(5)), whole, "the member a has 4 bytes and should have 5"},
		"longer than it says":  {one(t, "tex", nil), whole, "holds more than the members"},
		"says that it is huge": {one(t, "text", sized(1<<40)), whole, "has 4 bytes and should have 1099511627776"},
		"a lie of both":        {one(t, "text", sized(3)), whole, "has the SHA-256"},
		"another content":      {one(t, "texT", nil), whole, "has the SHA-256"},
		"a bomb":               {one(t, "", nil), squeeze(t, make([]byte, 1<<26)), "holds more than the members"},
		"a bomb in frames":     {one(t, "text", nil), append(whole, bytes.Repeat(squeeze(t, make([]byte, 1<<16)), 8)...), "holds more"},
		"no stream":            {one(t, "text", nil), nil, "has 0 bytes and should have 4"},
		"no zstd":              {one(t, "text", nil), []byte("text"), "cannot be decompressed"},
		"a stream that is cut": {one(t, "text", nil), whole[:len(whole)-1], "cannot be decompressed"},
		"garbage at the end":   {one(t, "text", nil), append(bytes.Clone(whole), "garbage"...), "cannot be decompressed"},
		"a window of 64 MiB": {
			one(t, "text", nil), squeeze(t, make([]byte, 1<<26), zstd.WithWindowSize(1<<26), zstd.WithSingleSegment(false)),
			"cannot be decompressed",
		},
		"no members": {one(t, "", func(m *Manifest, _ *Member) { m.Members = nil }), whole, "holds more than the members"},
	} {
		err := read(t, path, forge(by, release, c.manifest, c.members), by.public)
		if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.words) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v; want %q", name, err, c.words)
		}
	}
}

// TestSwapped: a file that changes after its signature was checked gives nothing else than what was
// signed.
func TestSwapped(t *testing.T) {
	by := newSigner(t)
	path := create(t, by)
	b := mustOpen(t, path, by.public)
	evil := forge(by, release, one(t, "evil", nil), squeeze(t, bytes.Repeat([]byte("evil"), 10_000)))
	if err := os.WriteFile(path, evil, 0o644); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "out")
	refused(t, b.Extract(t.Context(), out, all), errs.Invalid, path)
	refused(t, b.Check(t.Context()), errs.Invalid, path)
	if found := tree(t, filepath.Dir(out)); len(found) > 0 {
		t.Errorf("left %q", found)
	}
}

// TestInterrupted: reading ends with the context, and an error of the reader is its own.
func TestInterrupted(t *testing.T) {
	by := newSigner(t)
	path := create(t, by)
	b := mustOpen(t, path, by.public)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, path, []Key{by.public}); err == nil || errs.CodeOf(err) != errs.Internal {
		t.Errorf("opened: %v", err)
	}
	if err := b.Check(ctx); err == nil || errs.CodeOf(err) != errs.Internal {
		t.Errorf("checked: %v", err)
	}
	full := fmt.Errorf("no space left")
	if err := b.Each(t.Context(), func(Member, io.Reader) error { return full }); err != full {
		t.Errorf("an error of the caller became %v", err)
	}
	if _, err := Open(t.Context(), "/dev/zero", []Key{by.public}); !errs.Is(err, errs.Invalid) {
		t.Errorf("a device: %v", err)
	}
	if _, err := Open(t.Context(), t.TempDir(), []Key{by.public}); !errs.Is(err, errs.Invalid) {
		t.Errorf("a directory: %v", err)
	}
}
