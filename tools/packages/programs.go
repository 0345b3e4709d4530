package main

import (
	"embed"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	"github.com/goreleaser/nfpm/v2/files"
)

//go:embed scripts/*.sh
var scripts embed.FS

const (
	root      = "/usr/lib/sandboxd"
	documents = "/usr/share/doc/sandboxd"
)

const summary = "daemon that runs untrusted code in sandboxes"

const description = `sandboxd runs code that nobody has reviewed, on gVisor or on runc, and
is made for AI agents. A sandbox has its own root file system, network
rules and limits. Its network is closed by default. Clients speak the
OpenSandbox HTTP API.
.
This package has the daemon sandboxd, the command line sandboxctl, both
runtimes, and the agent that is PID 1 of each sandbox.`

// programs is the package sandboxd.
func (b *build) programs(f format) (*nfpm.Info, error) {
	info := b.info("sandboxd", summary, description)
	c := &contents{b: b}
	b.versioned(c)
	b.host(c, f)
	b.manual(c, f)
	b.documents(c, f)
	if c.err != nil {
		return nil, c.err
	}
	info.Contents = c.all
	if err := b.changes(info, f); err != nil {
		return nil, err
	}
	schema, err := schemaOf(filepath.Join(b.source, "pkg/store/store.go"))
	if err != nil {
		return nil, err
	}
	values := map[string]string{"version": b.version, "schema": strconv.Itoa(schema)}
	targets := map[string]*string{
		"deb.preinst": &info.Scripts.PreInstall, "deb.postinst": &info.Scripts.PostInstall,
		"deb.prerm": &info.Scripts.PreRemove, "deb.postrm": &info.Scripts.PostRemove,
		"rpm.pre": &info.Scripts.PreInstall, "rpm.post": &info.Scripts.PostInstall,
		"rpm.preun": &info.Scripts.PreRemove, "rpm.postun": &info.Scripts.PostRemove,
		"rpm.posttrans": &info.RPM.Scripts.PostTrans,
	}
	for name, target := range targets {
		if !strings.HasPrefix(name, f.name+".") {
			continue
		}
		if *target, err = b.script(values, "common", name); err != nil {
			return nil, err
		}
	}
	// What the doctor looks for (internal/doctor/programs.go), what sandboxd-runc is linked to
	// (glibc 2.34 is the newest symbol version that it has), and what the scripts call.
	if f.name == "deb" {
		info.Depends = []string{
			"btrfs-progs", "init-system-helpers (>= 1.54~)", "iptables", "libc6 (>= 2.34)", "libseccomp2 (>= 2.5.0)", "systemd",
		}
		info.Recommends = []string{"bash-completion", "kmod", "mmdebstrap"}
		return info, nil
	}
	// RHEL has no btrfs-progs: there the pool is on xfs (docs/install.md).
	info.Depends = []string{"glibc >= 2.34", "iptables", "libseccomp >= 2.5.0", "systemd", "util-linux"}
	info.Recommends = []string{"bash-completion", "btrfs-progs", "kmod"}
	return info, nil
}

// versioned adds what is side by side with other versions. It has the form of a prefix of
// scripts/install.sh, so the programs find one another.
func (b *build) versioned(c *contents) {
	top := filepath.Join(root, "versions", b.version)
	for _, p := range []string{"sandboxd", "sandboxctl"} {
		c.file(filepath.Join(b.bin, p), filepath.Join(top, "bin", p), 0o755)
	}
	for _, p := range []string{"runsc", "sandboxd-runc", "agent/sandbox-agent"} {
		c.file(filepath.Join(b.bin, p), filepath.Join(top, "libexec/sandboxd", p), 0o755)
	}
	// As scripts/install.sh: programs from before June 2026 start the code interpreter there.
	c.link("/opt/code-interpreter/code-interpreter.sh", filepath.Join(top, "libexec/sandboxd/agent/code-interpreter.sh"))
	c.tree(filepath.Join(b.source, "rootfs"), filepath.Join(top, "share/sandboxd/rootfs"), files.TypeFile)
	schema, err := schemaOf(filepath.Join(b.source, "pkg/store/store.go"))
	c.fail(err)
	c.text([]byte(strconv.Itoa(schema)+"\n"), filepath.Join(top, "share/sandboxd/schema"), files.TypeFile, 0o644)
	for _, unit := range []string{"sandboxd.service", "sandboxd.socket"} {
		c.text(b.unit(c, unit), filepath.Join(top, "systemd", unit), files.TypeFile, 0o644)
	}
	c.dirs(root)
	c.link("versions/"+b.version, filepath.Join(root, "current"))
	for _, p := range []string{"sandboxd", "sandboxctl"} {
		c.link("../lib/sandboxd/current/bin/"+p, filepath.Join("/usr/bin", p))
	}
}

// unit is a unit file of systemd/, with the prefix /usr.
func (b *build) unit(c *contents, name string) []byte {
	text, err := os.ReadFile(filepath.Join(b.source, "systemd", name))
	c.fail(err)
	return []byte(strings.ReplaceAll(string(text), "@prefix@", "/usr"))
}

// host adds what other programs of the host read.
func (b *build) host(c *contents, f format) {
	for _, unit := range []string{"sandboxd.service", "sandboxd.socket"} {
		c.text(b.unit(c, unit), filepath.Join("/usr/lib/systemd/system", unit), files.TypeFile, 0o644)
	}
	for suffix, dir := range map[string]string{"sysusers": "sysusers.d", "tmpfiles": "tmpfiles.d", "modules": "modules-load.d"} {
		c.file(filepath.Join(b.source, "systemd/sandboxd."+suffix), filepath.Join("/usr/lib", dir, "sandboxd.conf"), 0o644)
	}
	c.dir("/etc/sandboxd")
	c.text(b.output(c, "sandboxd", "config", "init"), "/etc/sandboxd/config.toml", files.TypeConfigNoReplace, 0o644)
	for _, p := range []string{"sandboxd", "sandboxctl"} {
		for shell, target := range map[string]string{
			"bash": "/usr/share/bash-completion/completions/" + p,
			"zsh":  f.zsh + "/_" + p,
			"fish": "/usr/share/fish/vendor_completions.d/" + p + ".fish",
		} {
			c.text(b.output(c, p, "completion", shell), target, files.TypeFile, 0o644)
		}
	}
}

// output is what a program of this build prints.
func (b *build) output(c *contents, program string, args ...string) []byte {
	path, err := filepath.Abs(filepath.Join(b.native, program))
	c.fail(err)
	cmd := exec.Command(path, args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		c.fail(fmt.Errorf("%s %s: %w", path, strings.Join(args, " "), err))
	}
	return out
}

// manual adds the manual pages.
func (b *build) manual(c *contents, f format) {
	pages, err := filepath.Glob(filepath.Join(b.man, "*.[18]"))
	c.fail(err)
	if len(pages) == 0 {
		c.fail(fmt.Errorf("%s has no manual pages", b.man))
	}
	sort.Strings(pages)
	for _, page := range pages {
		c.zipped(f, page, filepath.Join("/usr/share/man", "man"+page[len(page)-1:], filepath.Base(page)))
	}
}

// schemaOf reads the constant Schema of pkg/store: the newest schema of the state that the
// programs read.
func schemaOf(path string) (int, error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		return 0, err
	}
	if o := file.Scope.Lookup("Schema"); o != nil {
		if spec, ok := o.Decl.(*ast.ValueSpec); ok && len(spec.Values) == 1 {
			if l, ok := spec.Values[0].(*ast.BasicLit); ok && l.Kind == token.INT {
				return strconv.Atoi(l.Value)
			}
		}
	}
	return 0, fmt.Errorf("%s has no constant Schema", path)
}
