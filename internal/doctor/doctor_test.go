package doctor

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/egress"
)

// newTree makes a host of files, in place of /.
func newTree(t *testing.T, files map[string]string) *host {
	t.Helper()
	cfg, err := config.Load("")
	if err != nil {
		t.Fatal(err)
	}
	h := &host{cfg: cfg, isRoot: true, root: t.TempDir(), now: time.Now}
	for name, text := range files {
		path := filepath.Join(h.root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func find(t *testing.T, name string) check {
	t.Helper()
	all := table()
	i := slices.IndexFunc(all, func(c check) bool { return c.name == name })
	if i < 0 {
		t.Fatalf("no check %s", name)
	}
	return all[i]
}

func TestTable(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range table() {
		if c.name == "" || c.protects == "" || c.run == nil || seen[c.name] {
			t.Errorf("%q: each row has a name of its own, says what it protects, and does something", c.name)
		}
		seen[c.name] = true
	}
}

// TestLimits compares sysctls with the need of max_sandboxes, and skips a sysctl that
// does not exist or holds no number.
func TestLimits(t *testing.T) {
	for text, want := range map[string]Status{"4194304\n": OK, "32768\n": Warn, "lots\n": Skipped, "": Skipped, "-1\n": Warn} {
		h := newTree(t, map[string]string{"/proc/sys/kernel/pid_max": text})
		f := find(t, "kernel.pid_max").ask(t.Context(), h)
		if f.Status != want {
			t.Errorf("pid_max %q: %+v; want %s", text, f, want)
		}
		if want == Warn && (f.Mend != "sysctl -w kernel.pid_max=4194304" || !f.Fixable() || !strings.Contains(f.Detail, "1000 sandboxes")) {
			t.Errorf("pid_max %q: %+v", text, f)
		}
		h.cfg.Limits.MaxSandboxes = 10
		if f := find(t, "kernel.pid_max").ask(t.Context(), h); text == "32768\n" && f.Status != OK {
			t.Errorf("10 sandboxes: %+v", f)
		}
	}
	for limit, want := range map[string]Status{"272384": OK, "262144": Warn} {
		h := newTree(t, map[string]string{"/proc/sys/net/netfilter/nf_conntrack_max": limit})
		h.cfg.Limits.MaxSandboxes, h.cfg.Network.MaxFlows = 1000, 4096
		if f := flowTable.ask(t.Context(), h); f.Status != want || want == Warn && !f.Fixable() {
			t.Errorf("a table of %s flows: %+v; want %s", limit, f, want)
		}
	}
	arp := "IP address HW type Flags HW address Mask Device\n" + strings.Repeat("10.0.0.1 0x1 0x2 02:00:00:00:00:01 * eth0\n",
		90) + strings.Repeat("10.160.0.2 0x1 0x6 02:00:00:00:00:01 * sb-a\n", 900)
	for limit, want := range map[string]Status{"1024": OK, "100": Warn} {
		h := newTree(t, map[string]string{"/proc/net/arp": arp, "/proc/sys/net/ipv4/neigh/default/gc_thresh3": limit})
		if f := neighbours.ask(t.Context(), h); f.Status != want {
			t.Errorf("90 neighbours of %s: %+v", limit, f)
		}
	}
}

// TestHardening accepts the values in range, advises one otherwise, and does not set it.
func TestHardening(t *testing.T) {
	for name, c := range map[string]struct {
		good, bad []string
		set       string
	}{
		"kernel.unprivileged_bpf_disabled":     {[]string{"1", "2"}, []string{"0"}, "2"},
		"kernel.kptr_restrict":                 {[]string{"1", "2"}, []string{"0"}, "1"},
		"kernel.dmesg_restrict":                {[]string{"1"}, []string{"0"}, "1"},
		"kernel.yama.ptrace_scope":             {[]string{"1", "2", "3"}, []string{"0"}, "1"},
		"vm.unprivileged_userfaultfd":          {[]string{"0"}, []string{"1"}, "0"},
		"net.netfilter.nf_conntrack_tcp_loose": {[]string{"1"}, []string{"0"}, "1"},
	} {
		path := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
		for want, values := range map[Status][]string{OK: c.good, Warn: c.bad, Skipped: {"", "much"}} {
			for _, v := range values {
				f := find(t, name).ask(t.Context(), newTree(t, map[string]string{path: v + "\n"}))
				if f.Status != want || f.Fixable() {
					t.Errorf("%s is %q: %+v; want %s", name, v, f, want)
				}
				if command := "echo '" + name + " = " + c.set + "' >>/etc/sysctl.d/99-hardening.conf && sysctl -w " + name + "=" +
					c.set; want == Warn && f.Mend != command {
					t.Errorf("%s is mended by %q, want %q", name, f.Mend, command)
				}
			}
		}
		if f := find(t, name).ask(t.Context(), newTree(t, nil)); f.Status != Skipped {
			t.Errorf("without %s: %+v", name, f)
		}
	}
	for files, want := range map[[2]string]Status{
		{"core", "0"}: OK, {"|/lib/systemd/systemd-coredump %P", "16"}: OK, {"|/lib/systemd/systemd-coredump %P", "0"}: Warn,
		{"|/usr/share/apport/apport -p%p", ""}: Skipped,
	} {
		h := newTree(t, map[string]string{"/proc/sys/kernel/core_pattern": files[0] + "\n", "/proc/sys/kernel/core_pipe_limit": files[1] +
			"\n"})
		f := find(t, "kernel.core_pipe_limit").ask(t.Context(), h)
		if f.Status != want || f.Fixable() || want == Warn && (!strings.Contains(f.Mend, "sysctl -w kernel.core_pipe_limit=16") ||
			!strings.Contains(f.Detail, "starts /lib/systemd/systemd-coredump as root")) {
			t.Errorf("%q: %+v; want %s", files, f, want)
		}
	}
}

// TestSubordinateIDs warns of users to whom ids of sandboxes are lent.
func TestSubordinateIDs(t *testing.T) {
	for subuid, want := range map[string]string{
		"":                                   "",
		"root:100000:65536\n":                "",
		"ann:99000:1000\n":                   "",
		"ann:99000:1001\n":                   "ann (/etc/subuid, 99000-100000)",
		"ann:100000:65536\nbob:165536:65536": "ann (/etc/subuid, 100000-165535), bob (/etc/subuid, 165536-231071)",
		"ann:131172000:65536\n":              "", // the next instance's
		"ann:131171999:1\n":                  "ann (",
		"ann:x:y\nann\n::\nann:100000:0\n":   "",
	} {
		h := newTree(t, map[string]string{"/usr/bin/newuidmap": "ELF", "/etc/subuid": subuid})
		f := find(t, "subordinate-ids").ask(t.Context(), h)
		if (f.Status == Warn) != (want != "") || !strings.Contains(f.Detail, want) || f.Fixable() || f.Status == Warn && f.Mend == "" {
			t.Errorf("%q: %+v; want %q", subuid, f, want)
		}
	}
	h := newTree(t, map[string]string{"/usr/bin/newuidmap": "ELF", "/etc/subgid": "ann:100000:65536\n"})
	if f := find(t, "subordinate-ids").ask(t.Context(), h); f.Status != Warn || !strings.Contains(f.Detail, "/etc/subgid") {
		t.Errorf("groups: %+v", f)
	}
	h = newTree(t, map[string]string{"/etc/subuid": "ann:100000:65536\n"})
	if f := find(t, "subordinate-ids").ask(t.Context(), h); f.Status != OK {
		t.Errorf("without newuidmap: %+v", f)
	}
}

// TestHardeningExists: the sysctls exist in the kernel that the tests run on, if it has
// the feature. Every Linux since 6.1 has these three.
func TestHardeningExists(t *testing.T) {
	h := newTree(t, nil)
	h.root = ""
	for _, name := range []string{"kernel.kptr_restrict", "kernel.dmesg_restrict", "kernel.core_pipe_limit"} {
		if f := find(t, name).ask(t.Context(), h); f.Status == Skipped {
			t.Errorf("%+v", f)
		}
	}
}

// TestMend raises each sysctl that is too low, once. It keeps an operator's lines and
// lowers nothing.
func TestMend(t *testing.T) {
	const pid, files = "/proc/sys/kernel/pid_max", "/proc/sys/fs/file-max"
	h := newTree(t, map[string]string{pid: "32768\n", files: "9999999\n", sysctlFile: "# mine\nvm.swappiness = 1\n"})
	for round := range 2 {
		found := examine(t.Context(), h, []check{find(t, "kernel.pid_max"), find(t, "fs.file-max")})
		if err := mend(t.Context(), h, found); err != nil {
			t.Fatal(err)
		}
		if did := found[0].Fixed != ""; did != (round == 0) || found[1].Fixed != "" {
			t.Errorf("round %d: %+v", round, found)
		}
		if got := h.read(pid); got != "4194304\n" {
			t.Errorf("pid_max is %q", got)
		}
		want := "# mine\nvm.swappiness = 1\n# kernel.pid_max was 32768\nkernel.pid_max = 4194304\n"
		if got := h.read(sysctlFile); got != want {
			t.Errorf("the file is\n%s", got)
		}
	}
	if got := h.read(files); got != "9999999\n" {
		t.Errorf("file-max is %q", got)
	}
	// After another program lowered it: raised again, and still once in the file.
	if err := os.WriteFile(h.root+pid, []byte("100\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	found := examine(t.Context(), h, []check{find(t, "kernel.pid_max")})
	if err := mend(t.Context(), h, found); err != nil || !strings.Contains(found[0].Fixed, "was 100") {
		t.Errorf("%+v, %v", found, err)
	}
	if n := strings.Count(h.read(sysctlFile), "kernel.pid_max ="); n != 1 {
		t.Errorf("%d lines", n)
	}
}

// TestMendTellsFailure: a sysctl that could not be set is not reported as fixed.
func TestMendTellsFailure(t *testing.T) {
	h := newTree(t, map[string]string{"/proc/sys/kernel/pid_max": "1", "/etc": "not a directory"})
	found := examine(t.Context(), h, []check{find(t, "kernel.pid_max")})
	if err := mend(t.Context(), h, found); err == nil || found[0].Fixed != "" {
		t.Errorf("%+v, %v", found, err)
	}
}

// TestMendLooksAgain: Mend runs the checks again and reports the state that they find,
// not the change that it made.
func TestMendLooksAgain(t *testing.T) {
	const path, other = "/proc/sys/kernel/pid_max", "/proc/sys/fs/file-max"
	inVain := func(_ context.Context, h *host) Finding {
		f := fail("", "still broken")
		f.sysctl = &setting{name: "fs.file-max", want: 5}
		return f
	}
	h := newTree(t, map[string]string{path: "32768\n", other: "1\n"})
	checks := []check{find(t, "kernel.pid_max"), {name: "in vain", protects: "x", run: inVain}}
	found, err := mendAll(t.Context(), h, examine(t.Context(), h, checks), checks)
	if err != nil || found[0].Status != OK || !strings.Contains(found[0].Fixed, "was 32768") {
		t.Errorf("mended: %+v, %v", found[0], err)
	}
	if found[1].Status != Fail || !strings.Contains(found[1].Fixed, "was 1") {
		t.Errorf("mended in vain: %+v", found[1])
	}
}

func TestKernel(t *testing.T) {
	for _, c := range []struct {
		release, text string
		version       Status // of the check "kernel"
		advisories    Status
	}{
		{"6.18.44-fc-v470\n", "#1 SMP PREEMPT_DYNAMIC @0\n", OK, OK},
		{"6.1.0-18-amd64\n", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1 (2024-02-01)\n", OK, OK},
		{"6.1.0-17-amd64\n", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.69-1 (2023-12-30)\n", OK, Warn},
		{"6.1.8\n", "#1 SMP\n", OK, Warn},
		{"6.8.0-31-generic\n", "#31-Ubuntu SMP PREEMPT_DYNAMIC\n", OK, Skipped},
		{"5.10.0-28-amd64\n", "#1 SMP Debian 5.10.209-2 (2024-01-31)\n", Fail, Warn},
		{"plan9\n", "", Fail, Skipped},
		{"", "", Fail, Skipped},
	} {
		h := newTree(t, map[string]string{"/proc/sys/kernel/osrelease": c.release, "/proc/sys/kernel/version": c.text})
		for name, want := range map[string]Status{"kernel": c.version, "kernel-advisories": c.advisories} {
			if f := find(t, name).ask(t.Context(), h); f.Status != want {
				t.Errorf("%q, %q: %+v; want %s", c.release, c.text, f, want)
			}
		}
	}
}

// TestGvisorAge reads the date in a program's build information; this test itself links
// no gVisor.
func TestGvisorAge(t *testing.T) {
	m := pseudoVersion.FindStringSubmatch("v0.0.0-20260905035102-160fafc42237+sandboxd")
	if m == nil || m[1] != "20260905" {
		t.Errorf("%q", m)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if v, err := moduleOf(self, "golang.org/x/sys"); err != nil && !strings.Contains(err.Error(), "was not built with") {
		t.Errorf("%q, %v", v, err)
	}
	h := newTree(t, nil)
	h.cfg.LibexecDir = t.TempDir()
	if f := find(t, "gvisor-age").ask(t.Context(), h); f.Status != Skipped {
		t.Errorf("without a runsc: %+v", f)
	}
}

func TestStart(t *testing.T) {
	h := newTree(t, map[string]string{"/proc/sys/kernel/osrelease": "5.4.0\n"})
	h.isRoot, h.cfg.LibexecDir = false, "/nowhere"
	t.Setenv("PATH", "")
	err := start(h, table())
	if err == nil {
		t.Fatal("a host without anything will do")
	}
	for _, want := range []string{
		"as root", "/nowhere/runsc", "/nowhere/agent/sandbox-agent", "libexec_dir", "apt-get install iptables",
		"apt-get install btrfs-progs", "5.4.0 is older than 6.1",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("it does not say %q:\n%v", want, err)
		}
	}
	h.cfg.Storage.Pool = "plain"
	if err := start(h, table()); strings.Contains(err.Error(), "btrfs-progs") {
		t.Errorf("a plain pool needs no mkfs.btrfs: %v", err)
	}
}

// TestAgentFiles: what is missing has a command that makes it, and only a warning: other
// sandboxes start.
func TestAgentFiles(t *testing.T) {
	h := newTree(t, nil)
	h.cfg.LibexecDir = t.TempDir()
	agent := filepath.Join(h.cfg.LibexecDir, "agent")
	if err := os.Mkdir(agent, 0o755); err != nil {
		t.Fatal(err)
	}
	c := find(t, "agent-files")
	bundle := filepath.Join(agent, "ca-bundle.pem")
	if err := os.Symlink("/dev/null", bundle); err != nil { // as bad as none
		t.Fatal(err)
	}
	for _, missing := range []int{2, 1} {
		f := c.ask(t.Context(), h)
		if c.start || f.Status != Warn || strings.Count(f.Detail, agent) != missing || !strings.Contains(f.Detail, bundle) {
			t.Fatalf("without %d of the files: %+v", missing, f)
		}
		if out, err := exec.Command("sh", "-c", f.Mend).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", f.Mend, err, out)
		}
		if f := c.ask(t.Context(), h); f.Status != OK {
			t.Errorf("mended: %+v", f)
		}
		if err := os.Remove(bundle); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOthersCanNotTell: without root, a check that needs root is skipped and says so.
func TestOthersCanNotTell(t *testing.T) {
	h := newTree(t, nil)
	h.isRoot = false
	n := 0
	for _, c := range table() {
		if c.root {
			n++
			c.run = func(context.Context, *host) Finding { t.Errorf("%s was asked", c.name); return Finding{} }
			if f := c.ask(t.Context(), h); f.Status != Skipped || !strings.Contains(f.Detail, "root") {
				t.Errorf("%+v", f)
			}
		}
	}
	if n == 0 {
		t.Error("none needs root")
	}
}

func TestOtherFamily(t *testing.T) {
	for saved, want := range map[string]string{
		"*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\nCOMMIT\n":                "",
		"*filter\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\nCOMMIT\n":                  ":FORWARD DROP [0:0]",
		":FORWARD ACCEPT [0:0]\n-A FORWARD -o docker0 -j DOCKER\n":                     "-A FORWARD -o docker0 -j DOCKER",
		":FORWARD ACCEPT [0:0]\n-A FORWARD -i sb-a+ -j SANDBOXD-A-FORWARD\nCOMMIT\n":   "",
		":FORWARD ACCEPT [0:0]\n-A FORWARD -m conntrack --ctstate NEW -j ACCEPT\n":     "",
		"*nat\n:PREROUTING ACCEPT [0:0]\n-A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE\n": "",
	} {
		if got := decides(saved); got != want {
			t.Errorf("%q: %q, want %q", saved, got, want)
		}
	}
}

// fakeFirewalld answers as firewall-cmd 1.3.3 does, from the content of files.
const fakeFirewalld = `#!/bin/sh
case "$*" in
"--info-zone=sandboxd-a") f=zone ;;
"--info-policy=sandboxd-a-out") f=policy ;;
"--permanent --info-zone=sandboxd-a") f=zone-kept ;;
"--permanent --info-policy=sandboxd-a-out") f=policy-kept ;;
"--zone=trusted --query-source=10.160.0.0/16") f=trusted ;;
*) echo "usage: $*" >&2; exit 2 ;;
esac
if [ -e "${0%/*}/$f" ]; then while read -r l; do echo "$l"; done <"${0%/*}/$f"; exit 0; fi
exit 112
`

func TestFirewalldAround(t *testing.T) {
	h := newTree(t, map[string]string{"/proc/77/comm": "firewalld\n", "/etc/ufw/ufw.conf": "ENABLED=yes\n"})
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(bin, name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	ask := func() Finding { return find(t, "firewalld").ask(t.Context(), h) }
	const all = "firewall-cmd --permanent --new-zone=sandboxd-a" +
		" && firewall-cmd --permanent --zone=sandboxd-a --change-source=10.160.0.0/16" +
		" && firewall-cmd --permanent --zone=sandboxd-a --add-port=15353/tcp --add-port=15353/udp" +
		" && firewall-cmd --permanent --new-policy=sandboxd-a-out" +
		" && firewall-cmd --permanent --policy=sandboxd-a-out --add-ingress-zone=sandboxd-a" +
		" && firewall-cmd --permanent --policy=sandboxd-a-out --add-egress-zone=ANY" +
		" && firewall-cmd --permanent --policy=sandboxd-a-out --set-target=ACCEPT" +
		" && firewall-cmd --reload"
	if f := ask(); f.Status != Warn || f.Mend != all {
		t.Errorf("without firewall-cmd: %+v", f)
	}
	put("firewall-cmd", fakeFirewalld)
	if f := ask(); f.Status != Warn || f.Mend != all {
		t.Errorf("of what knows nothing: %+v", f)
	}
	put("trusted", "yes\n")
	if f := ask(); f.Status != Warn || f.Mend != all || !strings.Contains(f.Detail, "trusts") {
		t.Errorf("of what trusts the pool: %+v", f)
	}
	os.Remove(filepath.Join(bin, "trusted"))
	const zone = "sandboxd-a (active)\n  target: default\n  sources: 10.160.0.0/16\n  ports: 15353/tcp 15353/udp\n"
	const policy = "sandboxd-a-out (active)\n  priority: -1\n  target: ACCEPT\n  ingress-zones: sandboxd-a\n  egress-zones: ANY\n"
	put("zone", zone)
	put("zone-kept", zone)
	if f := ask(); f.Status != Warn || strings.Contains(f.Mend, "--new-zone") || !strings.Contains(f.Mend, "--new-policy") {
		t.Errorf("with the zone alone: %+v", f)
	}
	put("policy", policy)
	put("policy-kept", policy)
	if f := ask(); f.Status != OK {
		t.Errorf("with both: %+v", f)
	}
	for name, was := range map[string]string{
		"10.160.0.0/16": zone, "15353/udp": zone, "ANY": policy, "ACCEPT": policy,
		"ingress-zones: sandboxd-a": policy,
	} {
		file := map[string]string{zone: "zone", policy: "policy"}[was]
		put(file, strings.Replace(was, name, "", 1))
		if f := ask(); f.Status != Warn || strings.Contains(f.Mend, "--new-") {
			t.Errorf("without %s: %+v", name, f)
		}
		put(file, was)
	}
	if f := find(t, "docker-ufw").ask(t.Context(), h); f.Status != OK || !strings.Contains(f.Detail, "ufw") {
		t.Errorf("%+v", f)
	}
}

func TestNftables(t *testing.T) {
	forward := egress.Barrier{Family: "inet", Table: "filter", Chain: "forward", Hook: "forward", By: "its policy"}
	input := egress.Barrier{Family: "ip", Table: "site", Chain: "in", Hook: "input", By: "a rule of rest"}
	reject := egress.Barrier{Family: "inet", Table: "firewalld", Chain: "filter_FORWARD", Hook: "forward", By: "a rule of filter_FORWARD"}
	const (
		out = "nft insert rule inet filter forward iifname 'sb-a*' accept" +
			" && nft insert rule inet filter forward oifname 'sb-a*' ct state established,related accept"
		in = "nft insert rule ip site in iifname 'sb-a*' udp dport 15353 accept" +
			" && nft insert rule ip site in iifname 'sb-a*' tcp dport 15353 accept" +
			" && nft insert rule ip site in iifname 'sb-a*' ct state established,related accept"
		keep = " # and change the file that these rules come from, such as /etc/nftables.conf"
	)
	for name, c := range map[string]struct {
		all       []egress.Barrier
		firewalld bool
		mend      string // empty: nothing to mend
		detail    []string
	}{
		"none":        {},
		"firewalld's": {[]egress.Barrier{reject}, true, "", nil},
		"left by firewalld": {
			[]egress.Barrier{reject},
			false, strings.ReplaceAll(out, "filter forward", "firewalld filter_FORWARD") + keep,
			[]string{"inet firewalld filter_FORWARD"},
		},
		"forward": {
			[]egress.Barrier{forward, reject},
			true, out + keep,
			[]string{"inet filter forward, by its policy", "allowed to reach"},
		},
		"both": {
			[]egress.Barrier{forward, input},
			false, out + " && " + in + keep,
			[]string{"ip site in, by a rule of rest", "resolver"},
		},
	} {
		f := barred(c.all, 'a', c.firewalld)
		if f.Mend != c.mend || (f.Status == Warn) != (c.mend != "") || f.Status == Fail || f.Fixable() {
			t.Errorf("%s: %+v; want %q", name, f, c.mend)
		}
		for _, want := range c.detail {
			if !strings.Contains(f.Detail, want) {
				t.Errorf("%s: %q does not say %q", name, f.Detail, want)
			}
		}
	}
}
