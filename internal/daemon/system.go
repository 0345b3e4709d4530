package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/contents"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

var _ api.System = (*system)(nil)

// system answers requests about the daemon itself.
type system struct {
	*Daemon
	version string
	started time.Time

	mu     sync.Mutex
	layers map[string]int64 // bytes by digest; guarded by mu
}

// Info describes the daemon and what it holds.
func (s *system) Info(ctx context.Context) (wire.SystemInfo, error) {
	all, err := s.store.List(ctx)
	if err != nil {
		return wire.SystemInfo{}, err
	}
	images, err := s.images.List(ctx)
	if err != nil {
		return wire.SystemInfo{}, err
	}
	bad, err := s.unreadable(ctx)
	if err != nil {
		return wire.SystemInfo{}, err
	}
	info := wire.SystemInfo{
		Started:  s.started.UTC(),
		CPU:      cpuModel(),
		CPUs:     runtime.NumCPU(),
		StateDir: s.cfg.StateDir,
		Pool:     s.files.Describe(),
		Cgroups:  s.cgroups.Mode(),
		Network:  s.cfg.Network.Pool.String(),
		Schema:   store.Schema,
		Defaults: wire.Guest{
			Runtime:     s.cfg.Runtime.Default,
			MemoryBytes: int64(s.cfg.Defaults.Memory),
			CPUMillis:   int64(s.cfg.Defaults.CPU),
			Pids:        s.cfg.Defaults.Pids,
			DiskBytes:   int64(s.cfg.Defaults.Disk),
			Network:     s.cfg.Defaults.Network,
		},
		Limits: wire.SystemLimits{
			MaxSandboxes:       s.cfg.Limits.MaxSandboxes,
			MaxCreating:        s.cfg.Limits.MaxCreating,
			MemoryReserveBytes: int64(s.cfg.Limits.MemoryReserve),
			DiskReserveBytes:   int64(s.cfg.Storage.Reserve),
			MaxTimeoutSeconds:  int64(time.Duration(s.cfg.Limits.MaxTimeout).Seconds()),
			RetainEndedSeconds: int64(time.Duration(s.cfg.Limits.RetainEnded).Seconds()),
		},
		Sandboxes:  map[string]int{},
		Images:     len(images),
		Unreadable: bad,
		SecretKeys: s.secrets.Keys(),
		NoSweep:    s.noSweep(),
	}
	if since := s.drain.Since(); !since.IsZero() {
		info.DrainingSince = &since
	}
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	info.Kernel = strings.TrimSpace(string(release))
	for _, r := range all {
		if r.State != record.Deleting && r.State != record.Prepared { // no other answer knows those
			info.Sandboxes[spec.StateOf(r)]++
		}
	}
	if info.NoSweep != "" {
		info.Strays, err = s.strays(ctx)
	}
	return info, err
}

// cpuModel is the model of the first CPU, or empty where the kernel says none, as on arm64.
func cpuModel() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// unreadable lists sandboxes, snapshots and images whose records cannot be read.
func (s *system) unreadable(ctx context.Context) ([]string, error) {
	boxes, err := s.store.Unreadable(ctx)
	if err != nil {
		return nil, err
	}
	_, snaps, err := s.store.SnapshotRecords(ctx)
	if err != nil {
		return nil, err
	}
	_, images, err := s.store.ListImages(ctx)
	return slices.Concat(boxes, snaps, images), err
}

// Drain starts or ends the drain of the host.
func (s *system) Drain(_ context.Context, on bool) error {
	if err := s.drain.Set(on); err != nil {
		return noRoom(err)
	}
	s.log.Info("drain", "on", on)
	sandbox.StockOf(s.manager).Look() // a host that drains prepares nothing
	return nil
}

func (s *system) poolSpace() (sp wire.Space, err error) {
	if sp.FreeBytes, sp.TotalBytes, err = s.files.Pool.Space(); err != nil {
		return sp, err
	}
	if sp.ReadyBytes, err = s.files.Pool.Ready(); errors.Is(err, errors.ErrUnsupported) {
		err = nil
	}
	return sp, err
}

// DiskUsage measures the disk use of images and sandboxes.
func (s *system) DiskUsage(ctx context.Context) (df wire.DiskUsage, err error) {
	if df.State, err = stateSpace(s.cfg.StateDir); err != nil {
		return df, err
	}
	if df.Pool, err = s.poolSpace(); err != nil {
		return df, err
	}
	all, err := s.store.List(ctx)
	if err != nil {
		return df, err
	}
	snaps, _, err := s.store.SnapshotRecords(ctx)
	if err != nil {
		return df, err
	}
	images, err := s.images.List(ctx)
	if err != nil {
		return df, err
	}
	layers := map[string]int64{}
	digests, err := s.files.Layers.List(ctx)
	if err != nil {
		return df, err
	}
	for _, l := range digests {
		if layers[l], err = s.layerBytes(ctx, l); err != nil && !errs.Is(err, errs.NotFound) { // removed just now
			return df, err
		}
	}
	s.forgetLayers(layers)
	addImages(&df, images, layers, all, snaps)
	df.Snapshots = []wire.Disk{}
	for _, snap := range snaps {
		df.Snapshots = append(df.Snapshots, wire.Disk{
			ID: snap.ID, Name: snap.Name, State: spec.SnapshotStateOf(snap), Bytes: snap.HeldBytes(), InUse: s.inUse(snap, all),
		})
	}
	slices.SortFunc(df.Snapshots, func(a, b wire.Disk) int { return strings.Compare(a.ID, b.ID) })
	df.Sandboxes = []wire.Disk{}
	for _, r := range all {
		d := wire.Disk{ID: r.ID, Name: r.Spec.Name, State: spec.StateOf(r)}
		// A sandbox being made or deleted has no disk, and some pools do not count.
		if used, limit, err := s.files.Disks.Usage(r.ID); err == nil {
			d.Bytes, d.LimitBytes = used, limit
		}
		if r.Hibernation != nil {
			d.Bytes += r.Hibernation.Bytes()
		}
		switch r.State {
		case record.Deleting:
			addDeleting(&df, r, d.Bytes)
			continue
		case record.Prepared:
			if !sandbox.StockOf(s.manager).Making(r.ID) {
				df.Prepared.Slots++
			}
			df.Prepared.Bytes += d.Bytes
			continue
		}
		if r.State == record.Ended && !r.Restarting() {
			df.ReclaimableBytes += d.Bytes
		}
		df.Sandboxes = append(df.Sandboxes, d)
	}
	slices.SortFunc(df.Sandboxes, func(a, b wire.Disk) int { return strings.Compare(a.ID, b.ID) })
	if df.Volumes, err = s.volumeDisks(ctx); err != nil {
		return df, err
	}
	lost, err := s.files.Pool.Lost(ctx)
	df.Lost = len(lost)
	return df, err
}

// volumeDisks measures the named volumes. One that cannot be measured has 0 bytes, as one on a pool that does not
// count.
func (s *system) volumeDisks(ctx context.Context) ([]wire.VolumeDisk, error) {
	volumes := sandbox.VolumesOf(s.manager)
	all, err := volumes.List(ctx)
	if err != nil {
		return nil, err
	}
	disks := []wire.VolumeDisk{}
	for _, v := range all {
		d := wire.VolumeDisk{Name: v.Name, LimitBytes: v.Bytes, Sandboxes: len(v.UsedBy)}
		if used, err := volumes.Usage(v.ID); err == nil {
			d.Bytes = used
		}
		disks = append(disks, d)
	}
	return disks, nil
}

// inUse reports whether a snapshot cannot be deleted now: it is being taken, its maker
// deletes it, its files are read, or a sandbox is being created from it.
func (s *system) inUse(snap record.Snapshot, all []*record.Record) bool {
	return snap.State == record.SnapshotCreating || snap.Temporary || s.manager.Snapshots().InUse(snap.ID) ||
		slices.ContainsFunc(all, func(r *record.Record) bool { return r.State == record.Creating && r.Spec.Snapshot == snap.ID })
}

// addDeleting adds a deleted sandbox of which something is left.
func addDeleting(df *wire.DiskUsage, r *record.Record, bytes int64) {
	if df.Deleting == nil {
		df.Deleting = &wire.Deleting{Since: r.Changed.UTC()}
	}
	if r.Changed.Before(df.Deleting.Since) {
		df.Deleting.Since = r.Changed.UTC()
	}
	df.Deleting.Sandboxes++
	df.Deleting.Bytes += bytes
}

// addImages adds up the bytes of layers, by image and in total, each layer once in the
// total. Layers without a sandbox or snapshot on them are reclaimable.
func addImages(df *wire.DiskUsage, images []record.Image, layers map[string]int64, all []*record.Record, snaps []record.Snapshot) {
	users := map[string]int{} // by layer: number of images
	for _, i := range images {
		for _, l := range i.Layers {
			users[l]++
		}
	}
	bases := map[string]bool{}
	base := func(i record.Image) {
		for _, l := range i.Layers {
			bases[l] = true
		}
	}
	for _, r := range all {
		base(r.Spec.Image)
	}
	for _, s := range snaps {
		if s.State != record.SnapshotFailed {
			base(s.Image)
		}
	}
	df.Images = []wire.ImageDisk{}
	for _, i := range images {
		d := wire.ImageDisk{Name: i.Name, Tag: i.Tag}
		for _, r := range all {
			if r.Spec.Image.Digest == i.Digest {
				d.Sandboxes++
			}
		}
		for _, l := range i.Layers {
			d.Bytes += layers[l]
			if users[l] > 1 {
				d.SharedBytes += layers[l]
			}
		}
		df.Images = append(df.Images, d)
	}
	for l, n := range layers {
		df.LayerBytes += n
		if !bases[l] {
			df.ReclaimableBytes += n
		}
	}
}

// layerBytes measures each layer once per run of the daemon: layers never change.
func (s *system) layerBytes(ctx context.Context, digest string) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock() // two measurements at once would be slower than one after the other
	if n, ok := s.layers[digest]; ok {
		return n, nil
	}
	n, err := s.files.Layers.DiskBytes(ctx, digest)
	if err == nil {
		s.layers[digest] = n
	}
	return n, err
}

// forgetLayers drops what was measured of layers that are not there any more. A daemon that runs for
// a year meets a new layer with each image.
func (s *system) forgetLayers(there map[string]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.layers, func(digest string, _ int64) bool {
		_, ok := there[digest]
		return !ok
	})
}

// Backup copies the state into a file without a name. The kernel removes it when the
// process closes it or ends, so nothing is ever left. If the disk is too full, Backup
// fails before the answer begins.
func (s *system) Backup(ctx context.Context) (io.ReadCloser, error) {
	f, _, err := s.backup(ctx, nil)
	if err != nil {
		return nil, noRoom(err)
	}
	return f, nil
}

// backup also puts the data into a session, unless that is nil.
func (s *system) backup(ctx context.Context, to *chunks.Session) (_ *os.File, data *backup.Data, err error) {
	state, err := unnamed(s.cfg.StateDir)
	if err != nil {
		return nil, nil, err
	}
	defer state.Close()
	if _, err := s.store.Backup(state); err != nil {
		return nil, nil, err
	}
	facts, err := store.Examine(fmt.Sprintf("/proc/self/fd/%d", state.Fd()))
	if err == nil {
		_, err = state.Seek(0, io.SeekStart)
	}
	if err == nil && to != nil { // after the copy of the state: it names nothing newer
		data, err = s.saveData(ctx, to)
	}
	if err != nil {
		return nil, nil, err
	}
	out, err := unnamed(s.cfg.StateDir)
	if err != nil {
		return nil, nil, err
	}
	host, _ := os.Hostname()
	err = backup.Write(out, backup.Manifest{
		Version: s.version, Taken: time.Now().UTC().Truncate(time.Second), Host: host,
		Instance: s.cfg.Instance.String(), AddressPool: s.cfg.Network.Pool.String(), State: facts, Data: data,
	}, state)
	if err == nil {
		_, err = out.Seek(0, io.SeekStart)
	}
	if err != nil {
		out.Close()
		return nil, nil, err
	}
	return out, data, ctx.Err()
}

// saveData sends the layers, snapshots and volumes of the host.
func (s *system) saveData(ctx context.Context, to *chunks.Session) (*backup.Data, error) {
	h := contents.Host{Files: s.files, Spool: s.cfg.StateDir, Log: s.log}
	var err error
	if h.Volumes, _, err = s.store.Volumes(ctx); err != nil {
		return nil, err
	}
	if h.Snapshots, _, err = s.store.SnapshotRecords(ctx); err != nil {
		return nil, err
	}
	if h.Layers, err = s.files.Layers.List(ctx); err != nil {
		return nil, err
	}
	return contents.Save(ctx, h, to)
}

// unnamed makes a file in dir that has no name (open(2), O_TMPFILE).
func unnamed(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EIO) {
		return nil, errs.Wrap(err, errs.Unavailable, "the disk of the state directory of sandboxd takes no writes, and a backup is made "+
			"there; check the disk, which dmesg tells of, and reboot the host")
	}
	if err != nil {
		return nil, fmt.Errorf("make a file in %s: %w", filepath.Clean(dir), err)
	}
	return f, nil
}
