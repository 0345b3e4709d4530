package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"
)

// TestEscrow: each recipient alone opens the key, a file is never replaced, and what is refused leaves none.
func TestEscrow(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(conf, fmt.Appendf(nil, "state_dir = %q\n", state), 0o600); err != nil {
		t.Fatal(err)
	}
	var ids []*age.X25519Identity
	for range 2 {
		id, err := age.GenerateX25519Identity()
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	to := []string{ids[0].Recipient().String(), ids[1].Recipient().String()}
	run := func(args ...string) error {
		cmd := command()
		cmd.SetOut(io.Discard)
		cmd.SetArgs(append([]string{"escrow", "--config", conf}, args...))
		return cmd.Execute()
	}
	refused := func(want string, args ...string) {
		t.Helper()
		if err := run(args...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
	file := filepath.Join(dir, "sandboxd.key.age")
	refused("the daemon makes it", "-o", file, to[0])
	key := filepath.Join(state, "sandboxd.key")
	text := strings.Repeat("ab", 32) + "\n"
	if err := os.WriteFile(key, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	refused("can be read by others", "-o", file, to[0])
	if err := os.Chmod(key, 0o600); err != nil {
		t.Fatal(err)
	}
	refused("at least one public key", "-o", file)
	refused("is no public key of age", "-o", file, to[0], ids[1].String())
	if _, err := os.Lstat(file); !os.IsNotExist(err) {
		t.Fatalf("what was refused left %s: %v", file, err)
	}
	if err := run("-o", file, to[0], to[1]); err != nil {
		t.Fatal(err)
	}
	closed, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		r, err := age.Decrypt(bytes.NewReader(closed), id)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(r); err != nil || string(b) != text {
			t.Errorf("it opens to %q, %v", b, err)
		}
	}
	refused("is there already", "-o", file, to[0])
	if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, closed) {
		t.Errorf("the file that was there changed: %v", err)
	}
}
