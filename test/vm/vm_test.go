//go:build vm

// Package vm runs the stories that STORIES names as tests, so that they are counted with
// the other tests. scripts/test-vm.sh makes the machines; it needs no Go.
package vm

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestStory(t *testing.T) {
	stories := strings.Fields(os.Getenv("STORIES"))
	if len(stories) == 0 {
		t.Fatal("STORIES is empty: name those of this directory to be told")
	}
	script, err := filepath.Abs("../../scripts/test-vm.sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, story := range stories {
		t.Run(story, func(t *testing.T) {
			out, err := exec.Command(script, story).CombinedOutput()
			t.Logf("%s", out)
			if err != nil {
				lines := strings.Split(strings.TrimSpace(string(out)), "\n")
				t.Errorf("%s, %v: %s", story, err, strings.Join(lines[max(0, len(lines)-4):], " | "))
			}
		})
	}
}
