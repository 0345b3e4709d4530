package egress

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// unwell waits for Err to say what.
func unwell(t *testing.T, e *Engine, what string) {
	t.Helper()
	deadline := time.Now().Add(patient)
	for {
		err := e.Err()
		if err != nil && strings.Contains(err.Error(), what) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it says %v, want something of %q", err, what)
		}
		time.Sleep(time.Millisecond) // what ends says so after it ended
	}
}

// TestErr: an Engine whose parts ended, or hang, says so; one that is closed on
// purpose is not unwell.
func TestErr(t *testing.T) {
	w := newWorld(t)
	for what, deed := range map[string]func(e *Engine){
		"queue":    func(e *Engine) { e.queue.f.SetReadDeadline(time.Now()) }, //nolint:errcheck // shows
		"resolver": func(e *Engine) { e.dns.tcp.Close() },
		"":         func(*Engine) {},
	} {
		e := w.open()
		if err := e.Err(); err != nil {
			t.Fatal(err)
		}
		deed(e)
		if what != "" {
			unwell(t, e, what)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if err := e.Err(); (err != nil) != (what != "") {
			t.Errorf("%q, closed: %v", what, err)
		}
	}
}

// TestOverdue: a guard that does not come round is noticed, one that does is well.
func TestOverdue(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	e.guarding.Lock() // it hangs here
	deadline := time.Now().Add(patient)
	for err := error(nil); err == nil || !strings.Contains(err.Error(), "were not checked for"); err = e.Err() {
		if time.Now().After(deadline) {
			t.Fatalf("it says %v", err)
		}
		e.health.look(time.Now().Add(-2 * guardOverdue)) // again: a round that was at its end says once more that it has
		time.Sleep(time.Millisecond)
	}
	e.guarding.Unlock()
	w.run("iptables", "-N", "WAKE")
	defer w.try("iptables", "-X", "WAKE")
	deadline = time.Now().Add(patient)
	for e.Err() != nil {
		if time.Now().After(deadline) {
			t.Fatal(e.Err())
		}
		time.Sleep(time.Millisecond) // the guard is what is waited for
	}
}

// TestHungSave: an iptables-save that hangs holds up neither the guard for ever
// nor Close.
func TestHungSave(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	dir := t.TempDir()
	hung := filepath.Join(dir, "hung")
	script := "#!/bin/sh\ntouch " + hung + "\nexec sleep 600\n"
	if err := os.WriteFile(filepath.Join(dir, "iptables-save"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	w.run("iptables", "-N", "WAKE")
	defer w.try("iptables", "-X", "WAKE")
	deadline := time.Now().Add(patient)
	for {
		if _, err := os.Stat(hung); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("nobody asked iptables-save")
		}
		time.Sleep(time.Millisecond) // the guard is what is waited for
	}
	start := time.Now()
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took > saveLimit/2 {
		t.Errorf("Close took %v", took)
	}
	os.Setenv("PATH", strings.TrimPrefix(os.Getenv("PATH"), dir+":")) //nolint:errcheck // for the cleanup, which purges
}
