package proc

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"
)

func TestAccounts(t *testing.T) {
	dir := t.TempDir()
	a := &Accounts{Passwd: dir + "/passwd", Group: dir + "/group"}
	if id, err := a.Resolve(""); err != nil || id.UID != 0 || id.Home != "/root" {
		t.Errorf("an image without accounts: %+v, %v", id, err)
	}
	write := func(name, text string) {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("passwd", "# comment\nroot:x:0:0:root:/root:/bin/sh\napp:x:1000:100:App:/home/app:/bin/sh\nbad:x:no:no::/:\nshort:x\n"+
		"1000000:x:7:7::/n:\n")
	write("group", "root:x:0:\nusers:x:100:\ndocker:x:999:app,other\nvideo:x:44:other\n")
	for spec, want := range map[string]Identity{
		"app":          {UID: 1000, GID: 100, Groups: []uint32{999}, Name: "app", Home: "/home/app"},
		"1000":         {UID: 1000, GID: 100, Groups: []uint32{999}, Name: "app", Home: "/home/app"},
		"app:docker":   {UID: 1000, GID: 999, Name: "app", Home: "/home/app"},
		"app:55":       {UID: 1000, GID: 55, Name: "app", Home: "/home/app"},
		"4242":         {UID: 4242, GID: 0, Home: "/"},
		"4242:users":   {UID: 4242, GID: 100, Home: "/"},
		":users":       {UID: 0, GID: 100, Name: "root", Home: "/root"},
		"1000000":      {UID: 7, GID: 7, Name: "1000000", Home: "/n"},
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
		if err == nil && (id.UID != 0 || id.Home != "/root") {
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
