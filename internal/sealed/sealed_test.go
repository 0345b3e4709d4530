package sealed

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// keyOf opens a key file with these keys, 64 hex digits each.
func keyOf(t testing.TB, keys ...string) *Key {
	t.Helper()
	file := newFile(t)
	if err := os.WriteFile(file, []byte(strings.Join(keys, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	return mustOpen(t, file)
}

func mustOpen(t testing.TB, file string) *Key {
	t.Helper()
	k, err := Open("", file, true)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// newFile names a key file in a directory of its own, which has nothing else.
func newFile(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "sandboxd.key")
}

// Keys of these tests.
var (
	keyA = strings.Repeat("a1", keySize)
	keyB = strings.Repeat("b2", keySize)
)

const purpose = "vault/daaaaaaaaaaa"

// reference opens what was sealed with one key, by RFC 5869 and SP 800-38D in plain lines.
func reference(keyHex, purpose string, sealed []byte) (secret []byte, ok bool) {
	key, _ := hex.DecodeString(keyHex)
	mac := func(key []byte, parts ...string) []byte {
		h := hmac.New(sha256.New, key)
		for _, p := range parts {
			h.Write([]byte(p))
		}
		return h.Sum(nil)
	}
	id := mac(mac(make([]byte, 32), string(key)), "sandboxd sealed: id of the key", "\x01")[:8]
	if len(sealed) < 1+8+24+16 || sealed[0] != 1 || !bytes.Equal(sealed[1:9], id) {
		return nil, false
	}
	block, _ := aes.NewCipher(mac(mac(sealed[9:33], string(key)), "sandboxd sealed 1: AES-256-GCM", "\x01"))
	gcm, _ := cipher.NewGCM(block)
	secret, err := gcm.Open(nil, make([]byte, 12), sealed[33:], []byte(string(sealed[:9])+purpose))
	return secret, err == nil
}

func TestRoundTrip(t *testing.T) {
	k := keyOf(t, keyA, keyB)
	for _, secret := range []string{"", "x", strings.Repeat("a secret of some length ", 1000)} {
		for _, purpose := range []string{"", purpose, "vault/\x00"} {
			sealed := k.Seal(purpose, []byte(secret))
			if len(sealed) != len(secret)+Overhead || len(secret) > 1 && bytes.Contains(sealed, []byte(secret[:8])) {
				t.Errorf("%d bytes were sealed as %d", len(secret), len(sealed))
			}
			if got, err := k.Unseal(purpose, sealed); err != nil || string(got) != secret {
				t.Errorf("%d bytes for %q: %v", len(secret), purpose, err)
			}
			if got, ok := reference(keyA, purpose, sealed); !ok || string(got) != secret {
				t.Errorf("%d bytes for %q: the reference does not open them", len(secret), purpose)
			}
			if id, err := KeyID(sealed); err != nil || id != k.ID() {
				t.Errorf("key %s, %v; want %s", id, err, k.ID())
			}
			if bytes.Equal(sealed, k.Seal(purpose, []byte(secret))) {
				t.Error("the same secret was sealed as the same bytes twice")
			}
		}
	}
}

// TestFormat: what a release has sealed must open for ever. Python's cryptography has
// made these bytes.
func TestFormat(t *testing.T) {
	const want = "0142a54db1230ab4f0000102030405060708090a0b0c0d0e0f1011121314151617" +
		"3224595f144a0fcd1ea6e940ed2eafc78e05005c18ff22a722"
	k := keyOf(t, keyA)
	var salt [saltSize]byte
	for i := range salt {
		salt[i] = byte(i)
	}
	if got := hex.EncodeToString(k.seal(purpose, []byte("TOKEN=abc"), salt)); got != want {
		t.Errorf("sealed as\n%s, was\n%s", got, want)
	}
	sealed, err := hex.DecodeString(want)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := k.Unseal(purpose, sealed); err != nil || string(got) != "TOKEN=abc" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestTamper changes each bit, cuts at each byte, and adds one.
func TestTamper(t *testing.T) {
	k := keyOf(t, keyA, keyB)
	sealed := k.Seal(purpose, []byte("a secret"))
	fails := func(what string, b []byte, want ...error) {
		t.Helper()
		got, err := k.Unseal(purpose, b)
		for _, w := range want {
			if got == nil && errors.Is(err, w) && strings.Contains(err.Error(), purpose) {
				return
			}
		}
		t.Errorf("%s: %q, %v; want one of %v", what, got, err, want)
	}
	for at := range sealed {
		for bit := range 8 {
			bad := bytes.Clone(sealed)
			bad[at] ^= 1 << bit
			want := []error{ErrDamaged}
			switch {
			case at == 0:
				want = []error{ErrNewer, ErrDamaged}
			case at <= idSize:
				want = []error{ErrOtherKey}
			}
			fails(fmt.Sprintf("bit %d of byte %d", bit, at), bad, want...)
		}
		fails(fmt.Sprintf("%d of %d bytes", at, len(sealed)), sealed[:at], ErrDamaged)
	}
	fails("one byte more", append(bytes.Clone(sealed), 0), ErrDamaged)
	fails("nothing", nil, ErrDamaged)
	other := bytes.Clone(sealed) // it says that the other key of this host sealed it
	id, _ := hex.DecodeString(k.IDs()[1])
	copy(other[1:], id)
	fails("the ID of another key that is here", other, ErrDamaged)
}

// TestPurpose: what was sealed for one sandbox does not open as that of another.
func TestPurpose(t *testing.T) {
	k := keyOf(t, keyA)
	sealed := k.Seal(purpose, []byte("a secret"))
	for _, other := range []string{"", "vault/dbbbbbbbbbbb", purpose + "/", purpose[:len(purpose)-1], "\x00" + purpose} {
		got, err := k.Unseal(other, sealed)
		if got != nil || !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "something else") {
			t.Errorf("%q: %q, %v", other, got, err)
		}
	}
}

// TestOtherKey: the error says which key is missing, which are there and what to do.
func TestOtherKey(t *testing.T) {
	a, b := keyOf(t, keyA), keyOf(t, keyB)
	_, err := b.Unseal(purpose, a.Seal(purpose, []byte("a secret")))
	if !errors.Is(err, ErrOtherKey) || errors.Is(err, ErrDamaged) {
		t.Errorf("%v", err)
	}
	for _, want := range []string{purpose, "key " + a.ID(), b.From() + " has " + b.ID(), "add the line"} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%v; want %q in it", err, want)
		}
	}
	if strings.Contains(fmt.Sprint(err), keyB) {
		t.Errorf("it has the key: %v", err)
	}
}

func TestReseal(t *testing.T) {
	old, both, now := keyOf(t, keyA), keyOf(t, keyB, keyA), keyOf(t, keyB)
	sealed := old.Seal(purpose, []byte("a secret"))
	anew, changed, err := both.Reseal(purpose, sealed)
	if err != nil || !changed {
		t.Fatalf("%v, %v", changed, err)
	}
	if got, err := now.Unseal(purpose, anew); err != nil || string(got) != "a secret" {
		t.Errorf("%q, %v", got, err)
	}
	if same, changed, err := both.Reseal(purpose, anew); err != nil || changed || !bytes.Equal(same, anew) {
		t.Errorf("once more: %v, %v", changed, err)
	}
	if _, changed, err := now.Reseal(purpose, sealed); changed || !errors.Is(err, ErrOtherKey) {
		t.Errorf("without the old key: %v, %v", changed, err)
	}
	if _, changed, err := both.Reseal("vault/other", sealed); changed || !errors.Is(err, ErrDamaged) {
		t.Errorf("for something else: %v, %v", changed, err)
	}
}

// TestPrinted: whatever prints a key, or what has one, prints its ID at most.
func TestPrinted(t *testing.T) {
	k := keyOf(t, keyA, keyB)
	type has struct {
		Key    *Key
		Value  Key
		hidden *Key
		value  Key
	}
	h := has{k, *k, k, *k}
	var out strings.Builder
	for _, v := range []any{k, *k, h, &h, []*Key{k}, map[string]Key{"k": *k}, error(fmt.Errorf("with %v", k))} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%b", "%t", "%p"} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
		if b, err := json.Marshal(v); err == nil {
			out.Write(append(b, '\n'))
		}
		slog.New(slog.NewTextHandler(&out, nil)).Info("text", "key", v)
		slog.New(slog.NewJSONHandler(&out, nil)).Info("json", "key", v)
	}
	fmt.Fprintln(&out, k, Key{}, new(Key), h.hidden, h.value)
	text := out.String() + strings.ToLower(out.String()) // of which the second has no byte that is not UTF-8
	for n := range 2 {
		key := k.keys.at(n)
		for what, form := range map[string]string{
			"raw": string(key[:4]), "hex": hex.EncodeToString(key[:4]), "a list": fmt.Sprint(key[:4])[1:15],
			"Go": fmt.Sprintf("%#v", key[:4])[7:20],
		} {
			if strings.Contains(text, form) {
				t.Errorf("key %d is printed, %s", n, what)
			}
		}
	}
	if !strings.Contains(text, "sealed.key("+k.ID()+")") {
		t.Errorf("the ID is not printed in\n%s", text)
	}
	runtime.KeepAlive(k)
}

// TestMemory asks the kernel what it does with the page of keys (proc_pid_smaps(5)).
func TestMemory(t *testing.T) {
	// A process of its own: the keys of other tests, which the garbage collector has not
	// freed yet, count against the limit of locked memory.
	if os.Getenv("SEALED_TEST_MEMORY") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestMemory$", "-test.v")
		cmd.Env = append(os.Environ(), "SEALED_TEST_MEMORY=yes")
		if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("--- PASS: TestMemory")) {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	k := keyOf(t, keyA)
	if err := k.Unlocked(); err != nil {
		t.Fatal(err)
	}
	flags := strings.Fields(mapping(t, k, "VmFlags:"))
	for _, want := range []string{"lo", "dd", "rd"} { // locked, not dumped, readable
		if !contains(flags, want) {
			t.Errorf("the page has the flags %v, without %s", flags, want)
		}
	}
	if contains(flags, "wr") {
		t.Errorf("the page can be written: %v", flags)
	}
	runtime.KeepAlive(k)
}

// TestUnlocked: where no memory may be locked, the key says so and is good all the same.
func TestUnlocked(t *testing.T) {
	done, file := make(chan struct{}), newFile(t)
	go func() { // the thread, without its capability, ends with this goroutine
		defer close(done)
		runtime.LockOSThread()
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		if err := unix.Capget(&header, &caps[0]); err != nil {
			t.Error(err)
			return
		}
		caps[0].Effective &^= 1 << unix.CAP_IPC_LOCK
		none := unix.Rlimit{}
		var was unix.Rlimit
		err := errors.Join(unix.Capset(&header, &caps[0]), unix.Getrlimit(unix.RLIMIT_MEMLOCK, &was))
		none.Max = was.Max
		if err = errors.Join(err, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &none)); err != nil {
			t.Error(err)
			return
		}
		defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &was) //nolint:errcheck // as it was
		k, err := Open("", file, true)
		if err != nil {
			t.Error(err)
			return
		}
		if err := k.Unlocked(); !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ENOMEM) {
			t.Errorf("unlocked: %v", err)
		}
		if got, err := k.Unseal(purpose, k.Seal(purpose, []byte("a secret"))); err != nil || string(got) != "a secret" {
			t.Errorf("%q, %v", got, err)
		}
	}()
	<-done
}

func contains(all []string, s string) bool {
	return strings.Contains(" "+strings.Join(all, " ")+" ", " "+s+" ")
}

// mapping is the line of /proc/self/smaps, of the mapping that has the page of k, that
// begins with a word.
func mapping(t *testing.T, k *Key, word string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	page, inside := uintptr(unsafe.Pointer(unsafe.SliceData(k.keys.bytes()))), false
	for line := range strings.Lines(string(b)) {
		var from, to uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); n == 2 {
			inside = from <= page && page < to
		}
		if after, ok := strings.CutPrefix(line, word); ok && inside {
			return after
		}
	}
	t.Fatalf("no %s of a mapping that has %x", word, page)
	return ""
}

// FuzzOpen: a second reader of the format, reference, opens what Unseal opens, and that
// is only what seal has made for that purpose.
func FuzzOpen(f *testing.F) {
	k := keyOf(f, keyA, keyB)
	old := keyOf(f, keyB)
	made := map[string]bool{}
	for n, secret := range []string{"", "a secret", strings.Repeat("long ", 100)} {
		for i, k := range []*Key{k, old} {
			sealed := k.seal(purpose, []byte(secret), [saltSize]byte{byte(n), byte(i)})
			made[purpose+"\x00"+string(sealed)] = true
			f.Add(purpose, sealed, uint16(n*20), byte(1))
			f.Add("vault/dbbbbbbbbbbb", sealed, uint16(0), byte(0x80))
			f.Add(purpose, sealed[:len(sealed)-1], uint16(len(sealed)), byte(0))
		}
	}
	f.Add("", []byte{}, uint16(0), byte(0))
	f.Add(purpose, bytes.Repeat([]byte{version}, Overhead), uint16(9), byte(3))
	f.Fuzz(func(t *testing.T, purpose string, b []byte, at uint16, flip byte) {
		before := bytes.Clone(b)
		got, err := k.Unseal(purpose, b)
		want, ok := reference(keyA, purpose, b)
		if !ok {
			want, ok = reference(keyB, purpose, b)
		}
		if ok != (err == nil) || !bytes.Equal(got, want) || !bytes.Equal(before, b) {
			t.Fatalf("%q, %v; the reference says %q, %v", got, err, want, ok)
		}
		if ok && !made[purpose+"\x00"+string(b)] {
			t.Fatal("it opened what nobody has sealed")
		}
		if err != nil && !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrOtherKey) && !errors.Is(err, ErrNewer) {
			t.Fatalf("an error without a cause: %v", err)
		}
		// The same bytes as a secret, which a changed byte makes unreadable.
		sealed := k.seal(purpose, b, [saltSize]byte{0xff})
		if got, err := k.Unseal(purpose, sealed); err != nil || !bytes.Equal(got, b) {
			t.Fatalf("round trip: %q, %v", got, err)
		}
		if flip != 0 {
			sealed[int(at)%len(sealed)] ^= flip
			if got, err := k.Unseal(purpose, sealed); err == nil {
				t.Fatalf("byte %d may be another: %q", int(at)%len(sealed), got)
			}
		}
	})
}

func BenchmarkSeal(b *testing.B) {
	k, secret := keyOf(b, keyA), make([]byte, 4<<10)
	b.SetBytes(int64(len(secret)))
	b.ReportAllocs()
	for b.Loop() {
		k.Seal(purpose, secret)
	}
}

func BenchmarkUnseal(b *testing.B) {
	k := keyOf(b, keyA)
	sealed := k.Seal(purpose, make([]byte, 4<<10))
	b.SetBytes(4 << 10)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := k.Unseal(purpose, sealed); err != nil {
			b.Fatal(err)
		}
	}
}
