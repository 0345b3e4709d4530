package e2e_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
)

// startsLate lets a start of a version in its soak fail because a port is taken, and another one follow when the
// configuration has a key that the version of before does not know. Neither is a crash.
func (s *service) startsLate(version, before string) {
	s.t.Helper()
	if err := s.stop(); err != nil {
		s.t.Fatal(err)
	}
	taken, err := net.Listen("tcp", s.TCP)
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := exec.Command("sh", s.path("restart")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "address already in use") {
		s.t.Errorf("a start on a port that is taken: %v: %s", err, out)
	}
	if err := taken.Close(); err != nil {
		s.t.Fatal(err)
	}
	s.restart()
	s.armed(version, before)

	program := s.root.Program(before, "sandboxd")
	text := fmt.Sprintf("#!/bin/sh\necho 'unknown key: the unit asked %s' >&2\nexit 1\n", before)
	if err := errors.Join(os.Rename(program, program+".whole"), os.WriteFile(program, []byte(text), 0o755)); err != nil {
		s.t.Fatal(err)
	}
	s.restart()
	s.armed(version, before)
	if log, err := os.ReadFile(s.path("log")); err != nil || !strings.Contains(string(log), "the unit asked "+before) {
		s.t.Errorf("the program of before was not asked: %v", err)
	}
	if err := os.Rename(program+".whole", program); err != nil {
		s.t.Fatal(err)
	}
}
