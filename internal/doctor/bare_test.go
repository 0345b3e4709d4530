package doctor

import (
	"fmt"
	"strings"
	"testing"
)

// TestBare: a host without sandboxd lacks programs of other packages and features of its kernel, and
// nothing that the packages bring.
func TestBare(t *testing.T) {
	h := newTree(t, map[string]string{"/proc/sys/kernel/osrelease": "5.4.0\n"})
	h.isRoot, h.cfg.LibexecDir = true, "/nowhere"
	t.Setenv("PATH", "")
	loadable := func(string) bool { return true }
	said := fmt.Sprint(unmended(examine(t.Context(), h, bareChecks()), loadable))
	for _, want := range []string{"apt-get install iptables", "apt-get install btrfs-progs", "5.4.0 is older than 6.1"} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not say %q:\n%v", want, said)
		}
	}
	if strings.Contains(said, "/nowhere") {
		t.Errorf("it asks for what the packages bring:\n%v", said)
	}
	for _, name := range brought {
		find(t, name)
	}
	found := []Finding{
		{Check: "warned", Status: Warn},
		{Check: "there", Status: Fail, modules: []string{"loop"}},
		{Check: "absent", Status: Fail, modules: []string{"loop", "overlay"}},
		{Check: "set", Status: Fail, sysctl: &setting{}},
		{Check: "lacks", Status: Fail},
	}
	got := unmended(found, func(module string) bool { return module == "loop" })
	if len(got) != 2 || got[0].Check != "absent" || got[1].Check != "lacks" {
		t.Errorf("%+v", got)
	}
}
