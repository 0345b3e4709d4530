package proc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestAccounts(t *testing.T) {
	dir := t.TempDir()
	a := &Accounts{Passwd: dir + "/passwd", Group: dir + "/group"}
	if id, err := a.Resolve(""); err != nil || id.UID != 0 || id.Home != "/" {
		t.Errorf("an image without accounts: %+v, %v", id, err)
	}
	write := func(name, text string) {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("passwd", "# comment\nroot:x:0:0:root:/root:/bin/sh\napp:x:1000:100:App:/home/app:/bin/sh\nbad:x:no:no::/:\nshort:x\n"+
		"1000000:x:7:7::/n:\n")
	write("group", "root:x:0:\nusers:x:100:\ndocker:x:999:app,other\nvideo:x:44:other\n100:x:4:\n")
	for spec, want := range map[string]Identity{
		"app":          {UID: 1000, GID: 100, Groups: []uint32{999}, Name: "app", Home: "/home/app"},
		"1000":         {UID: 1000, GID: 100, Groups: []uint32{999}, Name: "app", Home: "/home/app"},
		"app:docker":   {UID: 1000, GID: 999, Name: "app", Home: "/home/app"},
		"app:55":       {UID: 1000, GID: 55, Name: "app", Home: "/home/app"},
		"4242":         {UID: 4242, GID: 0, Home: "/"},
		"4242:users":   {UID: 4242, GID: 100, Home: "/"},
		":users":       {UID: 0, GID: 100, Name: "root", Home: "/root"},
		"1000000":      {UID: 1000000, GID: 0, Home: "/"}, // as docker: digits are a number, whatever names there are
		"001000":       {UID: 1000, GID: 100, Groups: []uint32{999}, Name: "app", Home: "/home/app"},
		"app:0999":     {UID: 1000, GID: 999, Name: "app", Home: "/home/app"},
		"app:100":      {UID: 1000, GID: 100, Name: "app", Home: "/home/app"},
		"":             {UID: 0, GID: 0, Name: "root", Home: "/root"},
		"root:":        {UID: 0, GID: 0, Name: "root", Home: "/root"},
		"nobody":       {},
		"bad":          {},
		"app:nogroup":  {},
		"4294967295":   {},
		"-1":           {},
		"app:app:app":  {},
		"99999999999":  {},
		"app\x00":      {},
		"app:99999999": {UID: 1000, GID: 99999999, Name: "app", Home: "/home/app"},
	} {
		id, err := a.Resolve(spec)
		if bad := want.Home == ""; bad != (err != nil) {
			t.Errorf("%q: %+v, %v", spec, id, err)
		} else if !bad && (id.UID != want.UID || id.GID != want.GID || id.Name != want.Name || id.Home != want.Home ||
			len(id.Groups) != len(want.Groups)) {
			t.Errorf("%q: %+v, want %+v", spec, id, want)
		}
	}
	if a.UserName(1000) != "app" || a.UserName(5) != "5" || a.GroupName(999) != "docker" {
		t.Error("names")
	}
	write("passwd", "new:x:1000:1000::/:/bin/sh\nmore:x:5:5::/:\n")
	if a.UserName(1000) != "new" {
		t.Error("a changed passwd is not read again")
	}
}

// TestAccountsAreNoFiles: a guest may make anything of /etc/passwd, and that
// must not hold up what runs in its sandbox.
func TestAccountsAreNoFiles(t *testing.T) {
	dir := t.TempDir()
	a := &Accounts{Passwd: dir + "/passwd", Group: dir + "/group"}
	if err := errors.Join(syscall.Mkfifo(a.Passwd, 0o644), os.Mkdir(a.Group, 0o755)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		id, err := a.Resolve("")
		if err == nil && (id.UID != 0 || id.Home != "/") {
			err = fmt.Errorf("%+v", id)
		}
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a FIFO as passwd is waited for")
	}
}

// FuzzAccounts: whatever an image has for accounts, a user is who the first line of that
// name or number says, and never the number that means "none" to the kernel.
func FuzzAccounts(f *testing.F) {
	f.Add("root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:\n", "root:x:0:\nstaff:x:50:ann,root\n", "ann:staff")
	f.Add("a:::::\n#b:x:1:1:::\n4294967295:x:4294967295:1:::\n", "a:b\n", "4294967295")
	f.Add("1000:x:0:0::/:\nb:x:1000:0::/:\n", "7:x:1:\n", "01000:7")
	f.Add("1000:x:0:0::/:\nx:y:+1:-1::/:\n", "", "1000:")
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, passwd, group, spec string) {
		a := &Accounts{Passwd: filepath.Join(dir, "passwd"), Group: filepath.Join(dir, "group")}
		for path, text := range map[string]string{a.Passwd: passwd, a.Group: group} {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		id, err := a.Resolve(spec)
		if err != nil {
			if len(err.Error()) > 4*len(spec)+200 {
				t.Fatalf("%d bytes of error for %q", len(err.Error()), spec)
			}
			return
		}
		const none = 1<<32 - 1
		if id.UID == none || id.GID == none || slices.Contains(id.Groups, none) || id.Home == "" ||
			strings.ContainsAny(id.Name+id.Home, ":\n") {
			t.Fatalf("%q is %+v", spec, id)
		}
		user, _, _ := strings.Cut(spec, ":")
		if id.Name == "" || user == "" {
			return
		}
		n, err := strconv.ParseUint(user, 10, 64)
		named, numbered, isNumber := -1, -1, err == nil
		for i, line := range strings.Split(passwd, "\n") {
			row := strings.Split(strings.TrimSpace(line), ":")
			if len(row) < 6 || row[0] == "" || row[0][0] == '#' {
				continue
			}
			if named < 0 && row[0] == user {
				named = i
			}
			if numbered < 0 && isNumber && row[2] == strconv.FormatUint(n, 10) {
				numbered = i
			}
		}
		if isNumber {
			named = numbered
		}
		if named < 0 {
			if !isNumber || n != 0 || id.UID != 0 {
				t.Fatalf("%q is %+v, and no line says so", spec, id)
			}
			return
		}
		row := strings.Split(strings.TrimSpace(strings.Split(passwd, "\n")[named]), ":")
		if uid, err := strconv.ParseUint(row[2], 10, 32); err != nil || uint32(uid) != id.UID || row[0] != id.Name {
			t.Fatalf("%q is %+v, want %q", spec, id, row)
		}
	})
}
