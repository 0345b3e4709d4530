package appliance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// debian is dpkg. It is asked and not apt: a host without a network may have no apt, and apt plans
// with packages that its lists name and that nobody can fetch.
type debian struct{}

func (debian) form() string { return ".deb" }

func (debian) install(ctx context.Context, files []string, _ bool, out io.Writer) error {
	if err := run(ctx, out, "dpkg", append([]string{"--force-confdef", "--force-confold", "--install"}, files...)...); err != nil {
		return err
	}
	// An installation that was cut short has left triggers of packages that are not in this bundle, such as ldconfig.
	// dpkg does those of the whole host then, also such as fail for reasons of their own.
	err := run(ctx, out, "dpkg", "--triggers-only", "--pending")
	if err == nil {
		return nil
	}
	if bad := unfinished(ctx, files); bad != nil {
		return errors.Join(err, bad)
	}
	fmt.Fprintf(out, "warning: dpkg --triggers-only --pending: %v, for the reason above: triggers of other packages of this host failed; "+
		"all packages of the bundle are installed; see dpkg --audit, remove the cause, and run dpkg --configure --pending\n", err)
	return nil
}

// unfinished fails unless dpkg has each of the packages in this version, and has nothing left to do for it but
// triggers, which may be those of others.
func unfinished(ctx context.Context, files []string) error {
	const form = "${Package} ${Version} ${Architecture}\n"
	out, err := ask(ctx, "dpkg-query", "--show", "--showformat", "${db:Status-Status} "+form)
	if err != nil {
		return err
	}
	has := map[string]string{}
	for line := range strings.Lines(string(out)) {
		status, name, _ := strings.Cut(line, " ")
		has[name] = status
	}
	for _, file := range files {
		name, err := ask(ctx, "dpkg-deb", "--show", "--showformat", form, file)
		if err != nil {
			return err
		}
		switch status := has[string(name)]; status {
		case "installed", "triggers-pending", "triggers-awaited":
		case "":
			return fmt.Errorf("%s is not installed", bytes.TrimSpace(name))
		default:
			return fmt.Errorf("%s is %s", bytes.TrimSpace(name), status)
		}
	}
	return nil
}

func (debian) unpack(ctx context.Context, file, dir string) error {
	_, err := ask(ctx, "dpkg-deb", "--extract", file, dir)
	return err
}

// piped runs two programs, of which the second reads what the first writes.
func piped(from, to *exec.Cmd) error {
	var said, added bytes.Buffer
	from.Stderr, to.Stderr = &said, &added
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	from.Stdout, to.Stdin = w, r
	started := from.Start()
	w.Close()
	ended := to.Run()
	r.Close()
	if started == nil {
		started = from.Wait()
	}
	for _, p := range []struct {
		cmd  *exec.Cmd
		err  error
		said *bytes.Buffer
	}{{to, ended, &added}, {from, started, &said}} {
		if p.err != nil {
			return fmt.Errorf("%s: %w: %s", p.cmd.Args[0], p.err, bytes.TrimSpace(p.said.Bytes()))
		}
	}
	return nil
}

// run runs a program that no signal to this one ends halfway: dpkg would leave a host that needs care.
func run(ctx context.Context, out io.Writer, program string, args ...string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal signals groups
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", program, err)
	}
	return nil
}

// ask returns what a program prints.
func ask(ctx context.Context, program string, args ...string) ([]byte, error) {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(said.Bytes()))
	}
	return out, nil
}

// control is the fields of a package that say what it needs and what it is.
type control struct{ name, version, depends, provides string }

// controlForm makes dpkg-query and dpkg-deb print a control in a line. A field has no tab.
const controlForm = "${Package}\t${Version}\t${Pre-Depends}, ${Depends}\t${Provides}\n"

func controls(out []byte) (all []control) {
	for line := range strings.Lines(string(out)) {
		if f := strings.Split(strings.TrimSuffix(line, "\n"), "\t"); len(f) == 4 {
			all = append(all, control{f[0], f[1], f[2], f[3]})
		}
	}
	return all
}

// choose compares the dependencies of files with what is installed. A package that the host has in a newer
// version stays. What is brought for need only is chosen for what is not met without it.
func (debian) choose(ctx context.Context, all []packed, force bool) (files, missing []string, err error) {
	out, err := ask(ctx, "dpkg-query", "--show", "--showformat", "${db:Status-Status}\t"+controlForm)
	if err != nil {
		return nil, nil, err
	}
	var installed bytes.Buffer
	for line := range bytes.Lines(out) {
		status, rest, _ := bytes.Cut(line, []byte("\t"))
		if s := string(status); s == "installed" || s == "triggers-pending" { // dpkg takes both for what others need
			installed.Write(rest)
		}
	}
	p := plan{present: controls(installed.Bytes()), of: map[string]string{}}
	var spare []control
	for _, f := range all {
		out, err := ask(ctx, "dpkg-deb", "--show", "--showformat", controlForm, f.file)
		if err != nil {
			return nil, nil, err
		}
		for _, c := range controls(out) {
			p.of[c.name] = f.file
			if f.ifNeeded || !force {
				if newer, err := met(ctx, c.name+" (>> "+c.version+")", p.named(c.name)); err != nil {
					return nil, nil, err
				} else if newer {
					continue
				}
			}
			if f.ifNeeded {
				spare = append(spare, c)
			} else {
				p.take(c)
			}
		}
	}
	for i := 0; i < len(p.taken); i++ { // it grows meanwhile
		if err := p.complete(ctx, p.taken[i], spare); err != nil {
			return nil, nil, err
		}
	}
	for _, c := range slices.Backward(p.taken) { // dpkg wants first what others need before they are unpacked
		files = append(files, p.of[c.name])
	}
	return files, p.missing, nil
}

// A plan is an installation.
type plan struct {
	present []control         // what the host will have
	taken   []control         // of it, what is installed
	of      map[string]string // the files, by the name of the package
	missing []string
}

func (p *plan) named(name string) []control {
	return slices.DeleteFunc(slices.Clone(p.present), func(c control) bool { return c.name != name })
}

func (p *plan) take(c control) {
	p.present = append(slices.DeleteFunc(p.present, func(old control) bool { return old.name == c.name }), c)
	p.taken = append(p.taken, c)
}

// complete takes what c needs and the host will not have otherwise.
func (p *plan) complete(ctx context.Context, c control, spare []control) error {
	for need := range strings.SplitSeq(c.depends, ",") {
		need = strings.Join(strings.Fields(need), " ")
		if need == "" {
			continue
		}
		if ok, err := met(ctx, need, p.present); err != nil || ok {
			if err != nil {
				return err
			}
			continue
		}
		found := false
		for _, s := range spare {
			ok, err := met(ctx, need, []control{s})
			if err != nil {
				return err
			}
			if ok {
				p.take(s)
				found = true
				break
			}
		}
		if text := strings.ReplaceAll(need, " | ", " or "); !found && !slices.Contains(p.missing, text) {
			p.missing = append(p.missing, text)
		}
	}
	return nil
}

// relation matches a dependency: deb-control(5), "name:arch (>= 1.0)".
var relation = regexp.MustCompile(`^([a-z0-9][a-z0-9+.-]*)(?::[a-z0-9-]+)?(?: \((<<|<=|=|>=|>>) ([^\s)]+)\))?$`)

// met reports whether one of the alternatives of need is present.
func met(ctx context.Context, need string, present []control) (bool, error) {
	for alternative := range strings.SplitSeq(need, "|") {
		m := relation.FindStringSubmatch(strings.TrimSpace(alternative))
		if m == nil {
			return false, fmt.Errorf("the dependency %q of a package cannot be read: the package is damaged", need)
		}
		for _, p := range present {
			for _, version := range p.versions(m[1]) {
				ok, err := suffices(ctx, version, m[2], m[3])
				if ok || err != nil {
					return ok, err
				}
			}
		}
	}
	return false, nil
}

// versions are those in which p has the package name: its own, and that of what it provides, which
// may be "".
func (p control) versions(name string) (all []string) {
	if p.name == name {
		all = append(all, p.version)
	}
	for provided := range strings.SplitSeq(p.provides, ",") {
		if m := relation.FindStringSubmatch(strings.Join(strings.Fields(provided), " ")); m != nil && m[1] == name {
			all = append(all, m[3])
		}
	}
	return all
}

func suffices(ctx context.Context, version, op, want string) (bool, error) {
	if op == "" {
		return true, nil
	}
	if version == "" {
		return false, nil // provided without a version: Debian's policy, 7.5
	}
	err := exec.CommandContext(ctx, "dpkg", "--compare-versions", version, op, want).Run()
	if e, ok := errors.AsType[*exec.ExitError](err); ok && e.ExitCode() == 1 {
		return false, nil
	}
	return err == nil, err
}

// rpm is RPM.
type rpm struct{}

func (rpm) form() string { return ".rpm" }

func (rpm) install(ctx context.Context, files []string, older bool, out io.Writer) error {
	return run(ctx, out, "rpm", append(rpmFlags(older), files...)...)
}

func (rpm) unpack(ctx context.Context, file, dir string) error {
	out := exec.CommandContext(ctx, "cpio", "--extract", "--make-directories", "--preserve-modification-time", "--quiet",
		"--no-absolute-filenames")
	out.Dir = dir
	err := piped(exec.CommandContext(ctx, "rpm2cpio", file), out)
	// rpm2cpio writes all and then fails (rpm 4.18), because nfpm notes another size of what is packed. cpio
	// fails if the archive is not whole.
	if _, ok := errors.AsType[*exec.ExitError](err); ok && out.ProcessState.Success() {
		return nil
	}
	return err
}

func rpmFlags(older bool) []string {
	if older {
		return []string{"--upgrade", "--replacepkgs", "--oldpackage"}
	}
	return []string{"--upgrade", "--replacepkgs"}
}

// needed matches what rpm says about a dependency that is not met.
var needed = regexp.MustCompile(`(?m)^\s+(.+) is needed by `)

// choose takes all: rpm itself refuses to replace a newer package.
func (rpm) choose(ctx context.Context, all []packed, _ bool) (files, missing []string, err error) {
	for _, f := range all {
		files = append(files, f.file)
	}
	args := append([]string{"--test"}, append(rpmFlags(true), files...)...)
	cmd := exec.CommandContext(ctx, "rpm", args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	said, err := cmd.CombinedOutput()
	for _, m := range needed.FindAllSubmatch(said, -1) {
		if text := string(m[1]); !slices.Contains(missing, text) {
			missing = append(missing, text)
		}
	}
	if err != nil && missing == nil {
		return nil, nil, fmt.Errorf("rpm --test: %w: %s", err, bytes.TrimSpace(said))
	}
	return files, missing, nil
}
