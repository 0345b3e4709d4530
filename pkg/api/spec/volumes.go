package spec

import (
	"fmt"
	"math"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Limits of volumes.
const (
	maxVolumes    = 32   // of one sandbox
	maxMountPath  = 1024 // bytes
	maxSourcePath = 4000 // bytes, with subPath; the kernel takes 4095
	maxMountName  = 63
	minVolume     = 16 << 20
	maxVolume     = 1 << 50
)

// MaxVolumeName is how long the name of a volume may be, in bytes.
const MaxVolumeName = 253

// volumeName is OpenSandbox's form of the names of mounts and of volumes.
var volumeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// badVolume is an error of the volumes of a request, with OpenSandbox's code.
func badVolume(code, format string, args ...any) error {
	return errs.Wire(httperr.Invalid(format, args...), "VOLUME::"+code)
}

// applyVolumes reads the volumes of a creation. Whether a volume or a directory
// exists is not looked at here.
func (o *Offer) applyVolumes(spec *record.Spec, all []wire.VolumeMount) error {
	if len(all) > maxVolumes {
		return httperr.Invalid("volumes has %d entries; at most %d are allowed", len(all), maxVolumes)
	}
	names := map[string]bool{}
	for i := range all {
		m, err := o.toMount(&all[i], fmt.Sprintf("volumes[%d]", i))
		if err != nil {
			return err
		}
		if names[m.Name] {
			return badVolume("DUPLICATE_NAME", "volumes[%d].name %q is used twice; give each volume its own name", i, m.Name)
		}
		names[m.Name] = true
		for _, other := range spec.Volumes {
			switch {
			case other.Path == m.Path:
				return badVolume("INVALID_MOUNT_PATH", "volumes[%d].mountPath %q is also that of volume %s; one would hide the other", i,
					httperr.Clip(m.Path, 200), other.Name)
			case other.Claim != "" && other.Claim == m.Claim &&
				(other.Bytes != m.Bytes || other.Create != m.Create || other.Owned != m.Owned):
				return badVolume("INVALID_BACKEND",
					"volumes[%d].pvc: volume %s is mounted twice with different options; give both the same options", i, m.Claim)
			}
		}
		for _, t := range spec.Tmpfs {
			if record.Within(t.Path, m.Path) {
				return badVolume("INVALID_MOUNT_PATH", "volumes[%d].mountPath %q: the tmpfs at %s would be inside it or "+
					"hidden; choose other directories", i, httperr.Clip(m.Path, 200), t.Path)
			}
		}
		spec.Volumes = append(spec.Volumes, m)
	}
	return onceInOne(spec)
}

// onceInOne refuses what gVisor cannot do: to show a directory twice in one mount, once
// read-only. gVisor treats a file as the same wherever it appears in a mount: after it
// has opened the file for writing, it would do so at the read-only place too.
func onceInOne(spec *record.Spec) error {
	if spec.Runtime != "runsc" {
		return nil
	}
	all := spec.Volumes
	outer := record.Outer(all)
	top := func(i int) int {
		for outer[i] >= 0 {
			i = outer[i]
		}
		return i
	}
	for i, a := range all {
		for j, b := range all[:i] {
			same := a.Claim != "" && a.Claim == b.Claim || a.Source != "" && b.Source != "" &&
				(record.Within(a.Source, b.Source) || record.Within(b.Source, a.Source))
			if same && a.ReadOnly != b.ReadOnly && top(i) == top(j) {
				return badVolume("INVALID_MOUNT_PATH", "volumes %s and %s show the same files twice in one volume (%s), once read-only; "+
					"gVisor cannot do this; mount one of them elsewhere, or use runc", b.Name, a.Name, all[top(i)].Name)
			}
		}
	}
	return nil
}

// toMount reads one volume; errors call it what.
func (o *Offer) toMount(v *wire.VolumeMount, what string) (m record.VolumeMount, err error) {
	m = record.VolumeMount{Name: v.Name, Path: path.Clean(v.MountPath), ReadOnly: v.ReadOnly}
	switch {
	case len(v.Name) > maxMountName || !volumeName.MatchString(v.Name):
		return m, badVolume("INVALID_NAME", "%s.name %q: want 1 to %d characters of a-z 0-9 - that begin and end with a letter or digit",
			what, httperr.Clip(v.Name, 80), maxMountName)
	case !path.IsAbs(v.MountPath) || hasDotDot(v.MountPath) || strings.ContainsRune(v.MountPath, 0):
		return m, badVolume("INVALID_MOUNT_PATH", "%s.mountPath %q: want the absolute path of a directory in the sandbox, without ..", what,
			httperr.Clip(v.MountPath, 200))
	case len(v.MountPath) > maxMountPath:
		return m, badVolume("INVALID_MOUNT_PATH", "%s.mountPath has %d bytes; at most %d are allowed", what, len(v.MountPath), maxMountPath)
	case record.IsPrivate(m.Path):
		return m, badVolume("INVALID_MOUNT_PATH", "%s.mountPath %q: the runtime or sandboxd has its own files there; choose another "+
			"directory", what, httperr.Clip(v.MountPath, 200))
	case path.IsAbs(v.SubPath) || hasDotDot(v.SubPath) || strings.ContainsRune(v.SubPath, 0) || len(v.SubPath) > maxSourcePath:
		return m, badVolume("INVALID_SUB_PATH", "%s.subPath %q: want a relative path of at most %d bytes, without ..", what,
			httperr.Clip(v.SubPath, 200), maxSourcePath)
	}
	if m.Sub = path.Clean(v.SubPath); m.Sub == "." {
		m.Sub = ""
	}
	n := 0
	for _, given := range []bool{v.Host != nil, v.PVC != nil, v.OSSFS != nil} {
		if given {
			n++
		}
	}
	switch {
	case n != 1:
		return m, badVolume("INVALID_BACKEND", "%s has %d backends; want either host or pvc", what, n)
	case v.OSSFS != nil:
		return m, errs.Wire(errs.New(errs.Unsupported, "%s.ossfs: buckets are not supported; use a named volume (pvc), or a directory "+
			"of the host where the bucket is mounted", what), "VOLUME::UNSUPPORTED_BACKEND")
	case v.Host != nil:
		err = toHostMount(&m, v.Host, what)
		return m, err
	}
	err = o.toClaim(&m, v.PVC, what)
	return m, err
}

func toHostMount(m *record.VolumeMount, h *wire.HostPath, what string) error {
	if !path.IsAbs(h.Path) || hasDotDot(h.Path) || strings.ContainsRune(h.Path, 0) || len(h.Path)+len(m.Sub) > maxSourcePath {
		return badVolume("INVALID_HOST_PATH", "%s.host.path %q: want an absolute path of this host, of at most %d bytes with subPath, "+
			"without ..", what, httperr.Clip(h.Path, 200), maxSourcePath)
	}
	m.Source = path.Clean(h.Path)
	return nil
}

func (o *Offer) toClaim(m *record.VolumeMount, p *wire.PVC, what string) (err error) {
	if o.NoVolumes {
		return errs.Wire(errs.New(errs.Unsupported, "this daemon was built without named volumes"), "VOLUME::UNSUPPORTED_BACKEND")
	}
	if err := CheckVolumeName(p.ClaimName, what+".pvc.claimName"); err != nil {
		return err
	}
	size := ""
	if p.Storage != nil {
		size = *p.Storage
	}
	if m.Bytes, err = o.VolumeSize(size, what+".pvc.storage"); err != nil {
		return err
	}
	m.Claim, m.Create, m.Owned = p.ClaimName, p.CreateIfNotExists == nil || *p.CreateIfNotExists, p.DeleteOnSandboxTermination
	return nil
}

// CheckVolumeName checks the name of a volume; errors call it what.
func CheckVolumeName(name, what string) error {
	if name == "prune" { // POST /volumes/prune is a route
		return badVolume("INVALID_PVC_NAME", "%s: prune is a reserved name; choose another name", what)
	}
	if len(name) > MaxVolumeName || !volumeName.MatchString(name) {
		return badVolume("INVALID_PVC_NAME", "%s %q: want 1 to %d characters of a-z 0-9 - that begin and end with a letter or digit", what,
			httperr.Clip(name, 80), MaxVolumeName)
	}
	return nil
}

// VolumeSize reads how much a new volume may hold, in bytes; errors call it what.
// "" is the host's default, 0 no bound. Kubernetes' form also has fractions.
func (o *Offer) VolumeSize(size, what string) (int64, error) {
	if size == "" {
		if o.NoDisk {
			return 0, nil
		}
		return min(o.VolumeBytes, o.MaxDiskBytes), nil
	}
	n, err := parseStorage(size)
	switch {
	case err != nil:
		return 0, httperr.Invalid("%s: %s", what, err.Error())
	case o.NoDisk:
		return 0, errs.New(errs.Unsupported,
			"%s: the storage pool of this host is a plain directory and cannot limit volumes; leave it out", what)
	case n < minVolume || n > maxVolume:
		return 0, httperr.Invalid("%s %q: want 16Mi to 1Pi", what, httperr.Clip(size, 40))
	}
	return n, nil
}

func parseStorage(size string) (int64, error) {
	whole, unit, ok := strings.Cut(size, ".")
	if !ok {
		return parseSize(size)
	}
	digits := strings.TrimRight(unit, "KkMmGgTtPpEeiB")
	one, err := parseSize("1" + unit[len(digits):])
	if err != nil {
		return 0, err
	}
	f, err := strconv.ParseFloat(whole+"."+digits, 64)
	// ParseFloat reads more than a size may be: 0x1.8p40, 1.5e9.
	if n := f * float64(one); err == nil && strings.Trim(whole+digits, "0123456789") == "" && n < math.MaxInt64/2 {
		return int64(n), nil
	}
	return 0, httperr.Invalid("%q is not a size; want a number with an optional unit, such as 512Mi or 1.5Gi", httperr.Clip(size, 40))
}

func hasDotDot(p string) bool {
	for name := range strings.SplitSeq(p, "/") {
		if name == ".." {
			return true
		}
	}
	return false
}

// toWireMount shows a mount as a client asks for one.
func toWireMount(m record.VolumeMount) wire.VolumeMount {
	out := wire.VolumeMount{Name: m.Name, MountPath: m.Path, ReadOnly: m.ReadOnly, SubPath: m.Sub}
	if m.Source != "" {
		out.Host = &wire.HostPath{Path: m.Source}
	} else {
		out.PVC = &wire.PVC{ClaimName: m.Claim, DeleteOnSandboxTermination: m.Owned}
	}
	return out
}
