package api

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/http"
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
	maxVolumeName = 63
	maxClaimName  = 253
	minVolume     = 16 << 20
	maxVolume     = 1 << 50
)

// volumeName is OpenSandbox's form of the names of mounts and of volumes.
var volumeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// badVolume is an error of the volumes of a request, with OpenSandbox's code.
func badVolume(code, format string, args ...any) error {
	return errs.Wire(httperr.Invalid(format, args...), "VOLUME::"+code)
}

// applyVolumes checks volumes as far as that needs no look at the host.
func (s *Server) applyVolumes(spec *record.Spec, all []wire.VolumeMount) error {
	if len(all) > maxVolumes {
		return httperr.Invalid("volumes has %d entries; at most %d are taken", len(all), maxVolumes)
	}
	names := map[string]bool{}
	for i := range all {
		m, err := s.toMount(&all[i], fmt.Sprintf("volumes[%d]", i))
		if err != nil {
			return err
		}
		if names[m.Name] {
			return badVolume("DUPLICATE_NAME", "volumes[%d].name %q is the name of another one; give each its own", i, m.Name)
		}
		names[m.Name] = true
		for _, o := range spec.Volumes {
			switch {
			case o.Path == m.Path:
				return badVolume("INVALID_MOUNT_PATH", "volumes[%d].mountPath %q is that of volume %s; one would hide the other", i, httperr.Clip(m.Path, 200), o.Name)
			case o.Claim != "" && o.Claim == m.Claim && (o.Bytes != m.Bytes || o.Create != m.Create || o.Owned != m.Owned):
				return badVolume("INVALID_BACKEND", "volumes[%d].pvc: volume %s is mounted twice and asked for in two ways; say the same of both", i, m.Claim)
			}
		}
		for _, t := range spec.Tmpfs {
			if record.Within(t.Path, m.Path) {
				return badVolume("INVALID_MOUNT_PATH", "volumes[%d].mountPath %q: the file system in memory at %s would lie in it, or be hidden; choose other directories", i, httperr.Clip(m.Path, 200), t.Path)
			}
		}
		spec.Volumes = append(spec.Volumes, m)
	}
	return onceInOne(spec)
}

// onceInOne refuses what gVisor can not: it takes a file for the same wherever it
// meets it in one mount, and opens it again as it was opened before, for writing,
// where it may only be read.
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
			same := a.Claim != "" && a.Claim == b.Claim || a.Source != "" && b.Source != "" && (record.Within(a.Source, b.Source) || record.Within(b.Source, a.Source))
			if same && a.ReadOnly != b.ReadOnly && top(i) == top(j) {
				return badVolume("INVALID_MOUNT_PATH", "volumes %s and %s show the same files twice in one volume (%s), once read-only, which gVisor can not; mount one of them elsewhere, or take runc", b.Name, a.Name, all[top(i)].Name)
			}
		}
	}
	return nil
}

// toMount checks one volume; what is how errors call it.
func (s *Server) toMount(v *wire.VolumeMount, what string) (m record.VolumeMount, err error) {
	m = record.VolumeMount{Name: v.Name, Path: path.Clean(v.MountPath), ReadOnly: v.ReadOnly}
	switch {
	case len(v.Name) > maxVolumeName || !volumeName.MatchString(v.Name):
		return m, badVolume("INVALID_NAME", "%s.name %q: want up to %d of a-z 0-9 and -, beginning and ending with a letter or digit", what, httperr.Clip(v.Name, 80), maxVolumeName)
	case !path.IsAbs(v.MountPath) || hasDotDot(v.MountPath) || strings.ContainsRune(v.MountPath, 0):
		return m, badVolume("INVALID_MOUNT_PATH", "%s.mountPath %q: want the absolute path of a directory inside, without ..", what, httperr.Clip(v.MountPath, 200))
	case len(v.MountPath) > maxMountPath:
		return m, badVolume("INVALID_MOUNT_PATH", "%s.mountPath has %d bytes; at most %d are taken", what, len(v.MountPath), maxMountPath)
	case record.IsPrivate(m.Path):
		return m, badVolume("INVALID_MOUNT_PATH", "%s.mountPath %q: the runtime or sandboxd has its own files there; choose another directory", what, httperr.Clip(v.MountPath, 200))
	case path.IsAbs(v.SubPath) || hasDotDot(v.SubPath) || strings.ContainsRune(v.SubPath, 0) || len(v.SubPath) > maxSourcePath:
		return m, badVolume("INVALID_SUB_PATH", "%s.subPath %q: want a relative path of at most %d bytes, without ..", what, httperr.Clip(v.SubPath, 200), maxSourcePath)
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
		return m, badVolume("INVALID_BACKEND", "%s names %d backends; want one of host and pvc", what, n)
	case v.OSSFS != nil:
		return m, errs.Wire(errs.New(errs.Unsupported, "%s.ossfs: buckets are not mounted here; use a named volume (pvc), or a directory of the host that the bucket is mounted on", what), "VOLUME::UNSUPPORTED_BACKEND")
	case v.Host != nil:
		return m, toHostMount(&m, v.Host, what)
	}
	return m, s.toClaim(&m, v.PVC, what)
}

func toHostMount(m *record.VolumeMount, h *wire.HostPath, what string) error {
	if !path.IsAbs(h.Path) || hasDotDot(h.Path) || strings.ContainsRune(h.Path, 0) || len(h.Path)+len(m.Sub) > maxSourcePath {
		return badVolume("INVALID_HOST_PATH", "%s.host.path %q: want an absolute path of this host, of at most %d bytes with subPath, without ..", what, httperr.Clip(h.Path, 200), maxSourcePath)
	}
	m.Source = path.Clean(h.Path)
	return nil
}

func (s *Server) toClaim(m *record.VolumeMount, p *wire.PVC, what string) (err error) {
	if s.cfg.Volumes == nil {
		return errs.Wire(errs.New(errs.Unsupported, "this daemon was built without named volumes"), "VOLUME::UNSUPPORTED_BACKEND")
	}
	if err := checkVolumeName(p.ClaimName, what+".pvc.claimName"); err != nil {
		return err
	}
	size := ""
	if p.Storage != nil {
		size = *p.Storage
	}
	if m.Bytes, err = s.volumeSize(size, what+".pvc.storage"); err != nil {
		return err
	}
	m.Claim, m.Create, m.Owned = p.ClaimName, p.CreateIfNotExists == nil || *p.CreateIfNotExists, p.DeleteOnSandboxTermination
	return nil
}

func checkVolumeName(name, what string) error {
	if name == "prune" { // POST /volumes/prune is a route
		return badVolume("INVALID_PVC_NAME", "%s: a volume can not be called prune here; choose another name", what)
	}
	if len(name) > maxClaimName || !volumeName.MatchString(name) {
		return badVolume("INVALID_PVC_NAME", "%s %q: want up to %d of a-z 0-9 and -, beginning and ending with a letter or digit", what, httperr.Clip(name, 80), maxClaimName)
	}
	return nil
}

// volumeSize reads how much a new volume may hold; an empty size is the host's
// default. Kubernetes' form also has fractions.
func (s *Server) volumeSize(size, what string) (int64, error) {
	if size == "" {
		if s.cfg.NoDisk {
			return 0, nil
		}
		return min(s.cfg.VolumeBytes, s.cfg.MaxDiskBytes), nil
	}
	n, err := parseStorage(size)
	switch {
	case err != nil:
		return 0, httperr.Invalid("%s: %s", what, err.Error())
	case s.cfg.NoDisk:
		return 0, errs.New(errs.Unsupported, "%s: the storage pool of this host is a plain directory and can not limit volumes; leave it out", what)
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
	if n := f * float64(one); err == nil && f >= 0 && n < math.MaxInt64/2 {
		return int64(n), nil
	}
	return 0, httperr.Invalid("%q is not a size; want a number with an optional unit, as 512Mi or 1.5Gi", httperr.Clip(size, 40))
}

func hasDotDot(p string) bool {
	for name := range strings.SplitSeq(p, "/") {
		if name == ".." {
			return true
		}
	}
	return false
}

// toWireMount is toMount, backward.
func toWireMount(m record.VolumeMount) wire.VolumeMount {
	out := wire.VolumeMount{Name: m.Name, MountPath: m.Path, ReadOnly: m.ReadOnly, SubPath: m.Sub}
	if m.Source != "" {
		out.Host = &wire.HostPath{Path: m.Source}
	} else {
		out.PVC = &wire.PVC{ClaimName: m.Claim, DeleteOnSandboxTermination: m.Owned}
	}
	return out
}

// volumeRoutes finds what stands under /volumes; seg[0] is "volumes".
func (s *Server) volumeRoutes(seg []string) (route, map[string]handler) {
	switch {
	case s.cfg.Volumes == nil || len(seg) > 2:
		return route{}, nil
	case len(seg) == 1:
		return route{name: "/volumes"}, map[string]handler{http.MethodGet: s.listVolumes, http.MethodPost: s.createVolume}
	case seg[1] == "prune":
		return route{name: "/volumes/prune"}, only(http.MethodPost, s.pruneVolumes)
	}
	name := unescape(seg[1])
	return route{name: "/volumes/{name}"}, map[string]handler{
		http.MethodGet:    func(w http.ResponseWriter, r *http.Request) error { return s.inspectVolume(w, r, name) },
		http.MethodDelete: func(w http.ResponseWriter, r *http.Request) error { return s.removeVolume(w, r, name) },
	}
}

func (s *Server) toWireVolume(v record.VolumeInfo) wire.Volume {
	out := wire.Volume{Name: v.Name, ID: v.ID, SizeBytes: v.Bytes, UsedBy: v.UsedBy, SandboxID: v.Owner, CreatedAt: micros(v.Created)}
	if out.UsedBy == nil {
		out.UsedBy = []string{}
	}
	n, err := s.cfg.Volumes.Usage(v.ID)
	if err == nil {
		out.UsedBytes = &n
	} else if !errs.Is(err, errs.Unsupported) {
		s.cfg.Log.Warn("a volume can not be measured", "volume", v.Name, "err", err)
	}
	return out
}

func (s *Server) listVolumes(w http.ResponseWriter, r *http.Request) error {
	all, err := s.cfg.Volumes.List(r.Context())
	if err != nil {
		return err
	}
	out := wire.VolumeList{Items: []wire.Volume{}}
	for _, v := range all {
		out.Items = append(out.Items, s.toWireVolume(v))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (s *Server) createVolume(w http.ResponseWriter, r *http.Request) error {
	var req wire.VolumeRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := checkVolumeName(req.Name, "name"); err != nil {
		return err
	}
	bytes, err := s.volumeSize(req.Size, "size")
	if err != nil {
		return err
	}
	v, err := s.cfg.Volumes.Create(r.Context(), req.Name, bytes)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusCreated, s.toWireVolume(v))
	return nil
}

func (s *Server) inspectVolume(w http.ResponseWriter, r *http.Request, name string) error {
	v, err := s.cfg.Volumes.Get(r.Context(), httperr.Clip(name, maxClaimName+1))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.toWireVolume(v))
	return nil
}

func (s *Server) removeVolume(w http.ResponseWriter, r *http.Request, name string) error {
	// Who hangs up during a delete has still asked for it.
	if err := s.cfg.Volumes.Delete(context.WithoutCancel(r.Context()), cmp.Or(httperr.Clip(name, maxClaimName+1), "-")); err != nil {
		return err
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}

func (s *Server) pruneVolumes(w http.ResponseWriter, r *http.Request) error {
	gone, err := s.cfg.Volumes.Prune(context.WithoutCancel(r.Context()))
	if err != nil {
		return err
	}
	if gone == nil {
		gone = []string{}
	}
	writeJSON(w, http.StatusOK, wire.VolumePruneReport{Volumes: gone})
	return nil
}
