package sandbox

import (
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// mounts reads the values of -v and --mount, docker's forms.
func mounts(short, long []string) (all []wire.VolumeMount, err error) {
	read := func(values []string, parse func(string) (wire.VolumeMount, error)) error {
		for _, s := range values {
			m, err := parse(s)
			if err != nil {
				return err
			}
			m.Name = fmt.Sprint("volume-", len(all)+1)
			all = append(all, m)
		}
		return nil
	}
	if err := read(short, shortMount); err != nil {
		return nil, err
	}
	if err := read(long, longMount); err != nil {
		return nil, err
	}
	return all, nil
}

// mountOf mounts source, a directory of the host if bind is set and a volume
// otherwise, at target.
func mountOf(source, target string, bind bool) wire.VolumeMount {
	m := wire.VolumeMount{MountPath: target}
	if bind {
		m.Host = &wire.HostPath{Path: source}
	} else {
		m.PVC = &wire.PVC{ClaimName: source}
	}
	return m
}

// shortMount reads a value of -v.
func shortMount(s string) (m wire.VolumeMount, err error) {
	fail := func(format string, args ...any) (wire.VolumeMount, error) {
		return m, errs.New(errs.Invalid, "-v %q: "+format, append([]any{text.Clip(s, 80)}, args...)...)
	}
	f := strings.Split(s, ":")
	if len(f) < 2 || len(f) > 3 || f[0] == "" || f[1] == "" {
		return fail("want NAME:/PATH or /HOST/PATH:/PATH, optionally with :ro")
	}
	if strings.HasPrefix(f[0], ".") || strings.HasPrefix(f[0], "~") {
		return fail("want the name of a volume, or an absolute path of the daemon's host")
	}
	m = mountOf(f[0], f[1], f[0][0] == '/')
	if len(f) == 3 {
		if f[2] != "ro" && f[2] != "rw" {
			return fail("the option %q is unknown; the options are ro and rw", text.Clip(f[2], 20))
		}
		m.ReadOnly = f[2] == "ro"
	}
	return m, nil
}

// longMount reads a value of --mount.
func longMount(s string) (m wire.VolumeMount, err error) {
	fail := func(format string, args ...any) (wire.VolumeMount, error) {
		return m, errs.New(errs.Invalid, "--mount %q: "+format, append([]any{text.Clip(s, 80)}, args...)...)
	}
	kind, source, target, subPath, readOnly := "volume", "", "", "", false
	for o := range strings.SplitSeq(s, ",") {
		k, v, _ := strings.Cut(o, "=")
		switch k {
		case "type":
			kind = v
		case "source", "src":
			source = v
		case "target", "dst", "destination":
			target = v
		case "readonly", "ro":
			if readOnly = v == "" || v == "true" || v == "1"; !readOnly && v != "false" && v != "0" {
				return fail("%q: want readonly, or readonly=false", text.Clip(o, 40))
			}
		case "volume-subpath":
			subPath = v
		default:
			return fail("%q is unknown; the keys are type, source, target, readonly and volume-subpath", text.Clip(o, 40))
		}
	}
	if kind != "volume" && kind != "bind" || source == "" || target == "" {
		return fail("want type=volume or type=bind, a source and a target")
	}
	m = mountOf(source, target, kind == "bind")
	m.ReadOnly, m.SubPath = readOnly, subPath
	return m, nil
}
