package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// Volumes keeps named volumes: directories on the pool that any number of
// sandboxes mount, and that outlive them.
//
//	Create, or a sandbox that names it ─▶ ready ─▶ deleting ─▶ (no record)
//
// A volume is only a record at first. Its files are made when a sandbox first mounts
// it, because only then is it known what the image has there. Every record of a sandbox
// counts as a user, whatever its state. One transaction of the store checks that a
// volume has no users and condemns it.
//
// Files on the pool without a record are left alone: a volume holds data that somebody
// wanted to keep.
type Volumes struct{ m *Manager }

// maxVolumes bounds what a host keeps, for the reasons of maxSnapshots.
const maxVolumes = 10_000

// VolumesOf is the part of a Manager that keeps named volumes.
func VolumesOf(m *Manager) *Volumes { return &Volumes{m: m} }

// Create adds a volume that holds at most bytes; 0 is no limit. It fails with
// errs.Exists if there is one of its name.
func (v *Volumes) Create(ctx context.Context, name string, bytes int64) (record.VolumeInfo, error) {
	all, _, err := v.m.life.Store.Volumes(ctx)
	if err == nil && len(all) >= maxVolumes {
		err = tooManyVolumes(maxVolumes)
	}
	if err != nil {
		return record.VolumeInfo{}, fmt.Errorf("create volume %s: %w", name, err)
	}
	n := record.Volume{ID: v.m.volID(), Name: name, State: record.VolumeReady, Bytes: bytes, Created: now()}
	err = bounded(ctx, storeLimit, "store:volume:add", func(ctx context.Context) error { return v.m.life.Store.AddVolume(ctx, n) })
	return record.VolumeInfo{Volume: n}, err
}

func tooManyVolumes(n int) error {
	return errs.New(errs.Exhausted, "this host has its maximum of %s; delete some (`sandboxctl volume rm`)",
		errs.Count(n, "volume", "volumes"))
}

// List returns all volumes by name.
func (v *Volumes) List(ctx context.Context) ([]record.VolumeInfo, error) {
	all, _, err := v.m.life.Store.Volumes(ctx)
	if err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	boxes, err := v.m.life.Store.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	used := map[string][]string{}
	for _, r := range boxes {
		for _, m := range r.Spec.Volumes {
			if m.Volume != "" && !slices.Contains(used[m.Volume], r.ID) {
				used[m.Volume] = append(used[m.Volume], r.ID)
			}
		}
	}
	out := make([]record.VolumeInfo, 0, len(all))
	for _, r := range all {
		if r.State != record.VolumeDeleting {
			out = append(out, record.VolumeInfo{Volume: r, UsedBy: used[r.ID]})
		}
	}
	slices.SortFunc(out, func(a, b record.VolumeInfo) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Get returns a volume by its name.
func (v *Volumes) Get(ctx context.Context, name string) (record.VolumeInfo, error) {
	all, err := v.List(ctx)
	if err != nil {
		return record.VolumeInfo{}, err
	}
	at := slices.IndexFunc(all, func(i record.VolumeInfo) bool { return i.Name == name })
	if at < 0 {
		return record.VolumeInfo{}, errs.Wire(errs.New(errs.NotFound, "no volume %q; `sandboxctl volume ls` lists the volumes of this host",
			name),
			"VOLUME::PVC_NOT_FOUND")
	}
	return all[at], nil
}

// Usage returns the bytes that a volume holds. It fails with errs.Unsupported where
// the pool does not count.
func (v *Volumes) Usage(id string) (int64, error) { return v.m.life.Volumes.VolumeUsage(id) }

// Delete removes a volume and all that is in it. While a sandbox has it mounted, in
// whatever state, it fails with errs.WrongState; it waits for a sandbox that is being
// deleted. A record that cannot be read is removed, and its files stay on the pool.
func (v *Volumes) Delete(ctx context.Context, name string) error {
	m := v.m
	if !m.tracker.begin() {
		return errClosing
	}
	defer m.tracker.end()
	if _, bad, err := m.life.Store.Volumes(ctx); err == nil && slices.Contains(bad, name) {
		return bounded(ctx, storeLimit, "store:volume:forget",
			func(ctx context.Context) error { return m.life.Store.ForgetVolume(ctx, name, "") })
	}
	if err := v.awaitLeavers(ctx, name); err != nil {
		return err
	}
	var vol record.Volume
	err := bounded(ctx, storeLimit, "store:volume:deleting", func(ctx context.Context) (err error) {
		vol, err = m.life.Store.CondemnVolume(ctx, name)
		return err
	})
	if err != nil {
		return err
	}
	return m.life.dropVolume(ctx, &vol)
}

// awaitLeavers waits for sandboxes that are being deleted and still hold a volume.
func (v *Volumes) awaitLeavers(ctx context.Context, name string) error {
	all, err := v.m.life.Store.List(ctx)
	if err != nil {
		return fmt.Errorf("delete volume %s: %w", name, err)
	}
	for _, r := range all {
		if r.State != record.Deleting || !slices.ContainsFunc(r.Spec.Volumes, func(m record.VolumeMount) bool { return m.Claim == name }) {
			continue
		}
		unlock, err := v.m.locks.Lock(ctx, r.ID)
		if err != nil {
			return fmt.Errorf("delete volume %s: sandbox %s is still being deleted: %w", name, r.ID, err)
		}
		unlock()
	}
	return nil
}

// goingLimit is how long a creation waits for a volume that goes. A deletion takes tens of milliseconds.
const goingLimit = 5 * time.Second

// awaitGoing waits for the volumes that s claims, and that go with a sandbox that is being deleted: s gets
// new ones. After goingLimit the store refuses s.
func (v *Volumes) awaitGoing(ctx context.Context, s *record.Spec) error {
	claimed := func(name string) bool {
		return slices.ContainsFunc(s.Volumes, func(m record.VolumeMount) bool { return m.Claim == name && name != "" })
	}
	boxes, err := v.m.life.Store.List(ctx)
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	var owners []string
	for _, r := range boxes {
		if r.State == record.Deleting && slices.ContainsFunc(r.Spec.Volumes, func(m record.VolumeMount) bool {
			return m.Owned && claimed(m.Claim)
		}) {
			owners = append(owners, r.ID)
		}
	}
	all, _, err := v.m.life.Store.Volumes(ctx) // after the sandboxes: the store condemns a volume as it deletes its owner
	if err != nil {
		return fmt.Errorf("list volumes: %w", err)
	}
	for _, vol := range all {
		if vol.State == record.VolumeDeleting && vol.Owner != "" && claimed(vol.Name) {
			owners = append(owners, vol.Owner)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, goingLimit)
	defer cancel()
	for _, id := range owners {
		unlock, err := v.m.locks.Lock(ctx, id)
		if err != nil {
			return nil //nolint:nilerr // the store says what is the matter
		}
		unlock()
	}
	return nil
}

// Prune removes the volumes that no sandbox has mounted, and returns their names.
func (v *Volumes) Prune(ctx context.Context) (gone []string, err error) {
	all, err := v.List(ctx)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if len(i.UsedBy) > 0 {
			continue
		}
		switch derr := v.Delete(ctx, i.Name); {
		case derr == nil:
			gone = append(gone, i.Name)
		case errs.Is(derr, errs.NotFound), errs.Is(derr, errs.WrongState): // another caller was faster
		default:
			err = errors.Join(err, derr)
		}
	}
	return gone, err
}

// dropVolumes removes the volumes that are condemned.
func (l *life) dropVolumes(ctx context.Context) error {
	all, _, err := l.Store.Volumes(ctx)
	if err != nil {
		return fmt.Errorf("list volumes: %w", err)
	}
	var failed []error
	for _, v := range all {
		if v.State == record.VolumeDeleting {
			failed = append(failed, l.dropVolume(ctx, &v))
		}
	}
	return errors.Join(failed...)
}

// dropVolume removes a volume that is condemned; it may run any number of times.
func (l *life) dropVolume(ctx context.Context, v *record.Volume) error {
	err := bounded(ctx, stepLimit, "volume:delete", func(ctx context.Context) error { return l.Volumes.DeleteVolume(ctx, v.ID) })
	if err == nil {
		err = bounded(ctx, storeLimit, "store:volume:forget",
			func(ctx context.Context) error { return l.Store.ForgetVolume(ctx, v.Name, v.ID) })
	}
	if err != nil {
		return fmt.Errorf("delete volume %s: %w", v.Name, err)
	}
	l.cfg.Log.InfoContext(ctx, "volume deleted", "volume", v.Name, "id", v.ID)
	return nil
}

// checkVolumes refuses volumes that no start of the sandbox could mount, and draws the
// IDs of those that may have to be made.
func (m *Manager) checkVolumes(ctx context.Context, s *record.Spec) error {
	if len(s.Volumes) == 0 {
		return nil
	}
	if err := VolumesOf(m).awaitGoing(ctx, s); err != nil {
		return err
	}
	all, _, err := m.life.Store.Volumes(ctx)
	if err != nil {
		return fmt.Errorf("list volumes: %w", err)
	}
	s.Volumes = slices.Clone(s.Volumes)
	for i := range s.Volumes {
		v := &s.Volumes[i]
		if v.Claim != "" {
			v.Volume = m.volID()
			if len(all) >= maxVolumes && !slices.ContainsFunc(all, func(o record.Volume) bool { return o.Name == v.Claim }) {
				return tooManyVolumes(maxVolumes)
			}
		} else if err := m.life.Volumes.CheckHostPath(*v); err != nil {
			return err
		}
	}
	return nil
}

// volumesRow is the row of volumes; owner and uids are those of the row rootfs.
func volumesRow(d Deps, owner func(*record.Record) bool, uids func(*record.Record) uint32) table.Row {
	return table.Row{
		Name: "volumes", After: []string{"rootfs"}, Limit: takeLimit, // files of the image are copied into a new volume
		Wanted: func(r *record.Record) bool { return len(r.Spec.Volumes) > 0 },
		Up:     func(ctx context.Context, r *record.Record) error { return attachVolumes(ctx, d, r, owner(r), uids(r)) },
		Down:   func(ctx context.Context, r *record.Record) error { return d.Volumes.DetachVolumes(ctx, r.ID) },
		Held:   func(ctx context.Context) ([]string, error) { return d.Volumes.ListAttached(ctx) },
	}
}

// attachVolumes makes the volumes that r is the first to mount, and mounts all of its
// volumes where the runtime finds them.
func attachVolumes(ctx context.Context, d Deps, r *record.Record, ownUsers bool, uidBase uint32) error {
	all, _, err := d.Store.Volumes(ctx)
	if err != nil {
		return fmt.Errorf("list volumes: %w", err)
	}
	a := Attachment{
		All: r.Spec.Volumes, OwnUsers: ownUsers, UIDBase: uidBase, Memory: []string{"/run"},
		NoExec: r.Spec.Level() == record.SecurityStrict,
	}
	for _, t := range r.Spec.Tmpfs {
		a.Memory = append(a.Memory, t.Path)
	}
	outer := record.Outer(r.Spec.Volumes)
	for i, m := range r.Spec.Volumes {
		if m.Claim == "" {
			continue
		}
		at := slices.IndexFunc(all, func(v record.Volume) bool { return v.ID == m.Volume && v.State == record.VolumeReady })
		if at < 0 {
			return errs.New(errs.NotFound, "its volume %s no longer exists", m.Claim)
		}
		v := all[at]
		if v.Made {
			continue
		}
		seed := VolumeSeed{OwnUsers: ownUsers, UIDBase: uidBase}
		if m.Sub == "" && outer[i] < 0 { // it begins with the files of the image that it hides
			seed.ID, seed.Path = r.ID, m.Path
		}
		if err := d.Volumes.MakeVolume(ctx, v.ID, v.Bytes, seed); err != nil {
			return err
		}
		if err := d.Store.VolumeMade(ctx, v.Name, v.ID); err != nil {
			return err
		}
		all[at].Made = true // mounted twice
	}
	return d.Volumes.AttachVolumes(ctx, r.ID, a)
}
