package wire

import "time"

// SystemInfo answers GET /system/info. (ours)
type SystemInfo struct {
	Version
	Started   time.Time      `json:"started"` // of the daemon
	Kernel    string         `json:"kernel"`
	CPU       string         `json:"cpu,omitempty"` // the model, if the kernel says it (proc_cpuinfo(5))
	CPUs      int            `json:"cpus"`          // that the daemon may use
	StateDir  string         `json:"stateDir"`
	Pool      string         `json:"pool"`    // kind, place and size, for people
	Cgroups   string         `json:"cgroups"` // unified, hybrid or legacy
	Network   string         `json:"network"` // the addresses of sandboxes
	Schema    int            `json:"schema"`  // of the store
	Defaults  Guest          `json:"defaults"`
	Limits    SystemLimits   `json:"limits"`
	Sandboxes map[string]int `json:"sandboxes"` // by State
	Images    int            `json:"images"`
	// DrainingSince is since when the daemon refuses new sandboxes; absent: it accepts
	// them.
	DrainingSince *time.Time `json:"drainingSince,omitempty"`
	// Unreadable are records of sandboxes, snapshots and images that cannot be
	// read; delete them by id, or by name:tag.
	Unreadable []string `json:"unreadable,omitempty"`
	// SecretKeys are the ids of the keys that open secrets of sandboxes; nil: an older
	// release, which does not tell.
	SecretKeys []string `json:"secretKeys,omitzero"`
	// NoSweep is why the daemon removes nothing that nobody asked it to remove; absent:
	// it does. With NoSweep, Strays are the ids of which the host has something and the
	// store nothing.
	NoSweep string   `json:"noSweep,omitempty"`
	Strays  []string `json:"strays,omitempty"`
}

// Guest is what a sandbox gets by default. (ours)
type Guest struct {
	Runtime     string `json:"runtime"`
	MemoryBytes int64  `json:"memoryBytes"`
	CPUMillis   int64  `json:"cpuMillis"`
	Pids        int64  `json:"pids"`
	DiskBytes   int64  `json:"diskBytes"`
	Network     string `json:"network"`
}

// SystemLimits are what the host's owner allows. (ours)
type SystemLimits struct {
	MaxSandboxes       int   `json:"maxSandboxes"`
	MaxCreating        int   `json:"maxCreating"`        // at once; the others wait
	MemoryReserveBytes int64 `json:"memoryReserveBytes"` // 0: none
	DiskReserveBytes   int64 `json:"diskReserveBytes"`   // 0: none
	MaxTimeoutSeconds  int64 `json:"maxTimeoutSeconds"`  // 0: none
	RetainEndedSeconds int64 `json:"retainEndedSeconds"`
}

// Space is room on a file system. (ours)
type Space struct {
	FreeBytes  int64 `json:"freeBytes"`
	TotalBytes int64 `json:"totalBytes"`
	// ReadyBytes, of a pool in a file, are those that were written at least once. The first
	// write to others is slow. Absent elsewhere.
	ReadyBytes int64 `json:"readyBytes,omitempty"`
}

// DiskUsage answers GET /system/df. (ours)
type DiskUsage struct {
	State     Space       `json:"state"` // the file system of the state directory: layers, records, the pool's file
	Pool      Space       `json:"pool"`  // what sandboxes write
	Images    []ImageDisk `json:"images"`
	Sandboxes []Disk      `json:"sandboxes"`
	Snapshots []Disk      `json:"snapshots"` // what they held when they were taken; sources and copies share it
	// Volumes are the named volumes. Bytes is 0 where the pool does not count.
	Volumes []VolumeDisk `json:"volumes"`
	// Deleting are the deleted sandboxes of which something is left on the host; absent:
	// there are none.
	Deleting *Deleting `json:"deleting,omitempty"`
	// Prepared are the slots that wait for a create.
	Prepared PreparedSlots `json:"prepared"`
	// LayerBytes is what all layers take, each counted once.
	LayerBytes int64 `json:"layerBytes"`
	// Lost counts the disks and snapshots in lost+found. Each is removed after a day.
	Lost int `json:"lost"`
	// ReclaimableBytes is freed by removing images that no sandbox and no snapshot
	// uses, and sandboxes that have ended.
	ReclaimableBytes int64 `json:"reclaimableBytes"`
}

// SystemPruneReport answers POST /system/prune. (ours)
type SystemPruneReport struct {
	Sandboxes      []string `json:"sandboxes"` // ids
	Snapshots      []string `json:"snapshots"` // ids
	Images         []string `json:"images"`    // name:tag
	Layers         []string `json:"layers"`    // digests
	Volumes        []string `json:"volumes"`   // empty since prune keeps volumes that have a name; all have one
	BytesReclaimed int64    `json:"bytesReclaimed"`
}

// Backup is a backup on the target of the configuration. (ours)
type Backup struct {
	Name      string    `json:"name"`
	Owner     string    `json:"owner"`   // the instance, the host, and the id of the state that wrote it
	TakenAt   time.Time `json:"takenAt"` // by the clock of that host
	Bytes     int64     `json:"bytes"`
	Encrypted bool      `json:"encrypted"`
	// Verified is whether it was read back and compared after it was stored. One that is not
	// was cut short.
	Verified bool `json:"verified"`
	// Whose is what it is to the state of the daemon: own or adopted, which are counted and removed;
	// unknown, under the name of this host and of another state; other, of another host.
	Whose string `json:"whose"`
}

// AdoptBackups is the body of POST /system/backups/adopt. (ours)
type AdoptBackups struct {
	Names []string `json:"names,omitempty"` // of backups, or of their owners
	All   bool     `json:"all,omitempty"`   // all that are unknown; then there are no names
}

// BackupList answers GET /system/backups: those of all owners, of each the oldest first. (ours)
type BackupList struct {
	Items []Backup `json:"items"`
}

// RemoveBackups is the body of POST /system/backups/remove. (ours)
type RemoveBackups struct {
	Names []string `json:"names"`
}

// RemovedBackups answers POST /system/backups/remove. (ours)
type RemovedBackups struct {
	Items []Backup `json:"items"`
	Packs int      `json:"packs"` // files of data that no other backup needs
	Bytes int64    `json:"bytes"` // of backups and packs
	// PacksKept is why packs that nothing may need are still there; absent: none is.
	PacksKept string `json:"packsKept,omitempty"`
}

// CheckBackups is the body of POST /system/backups/check. (ours)
type CheckBackups struct {
	Names []string `json:"names,omitempty"` // of backups, or of their owners
	All   bool     `json:"all,omitempty"`   // all on the target, also of others; then there are no names
}

// BackupCheckLine is a line of the answer to POST /system/backups/check. It has one of these. The last line
// has Report or Error. (ours)
type BackupCheckLine struct {
	Progress *BackupCheck  `json:"progress,omitempty"`
	Damage   *BackupDamage `json:"damage,omitempty"`
	Report   *BackupCheck  `json:"report,omitempty"`
	Error    *Error        `json:"error,omitempty"`
}

// BackupCheck is how far a check of backups is, or was. (ours)
type BackupCheck struct {
	Backup  string `json:"backup,omitempty"` // at which it is
	Backups int    `json:"backups"`          // that were read to their end
	Of      int    `json:"of"`               // that there are to read
	Packs   int    `json:"packs"`            // files of data that were read
	Bytes   int64  `json:"bytes"`            // that were read
	Damaged int    `json:"damaged"`          // backups with a damage
	Partial int    `json:"partial"`          // that were cut short, or are being stored now: they count for nothing
	// Sealed are those that this host has no key for: their bytes were compared with checksums alone.
	Sealed  int `json:"sealed"`
	Removed int `json:"removed"` // that were removed before they were read to their end
}

// BackupDamage is something that is wrong with a backup on the target. (ours)
type BackupDamage struct {
	Backup  string `json:"backup"`
	Whose   string `json:"whose"`          // of Backup
	Tree    string `json:"tree,omitempty"` // a volume, snapshot or layer; absent: it is not of one alone
	File    string `json:"file,omitempty"` // in it; absent: it is not of one alone
	Problem string `json:"problem"`
}

// BackupStatus answers GET /system/backups/status. (ours)
type BackupStatus struct {
	Target        string `json:"target"`
	EverySeconds  int64  `json:"everySeconds"`  // 0: on request only
	Keep          int    `json:"keep"`          // 0: no limit
	MaxAgeSeconds int64  `json:"maxAgeSeconds"` // 0: no limit
	Encrypted     bool   `json:"encrypted"`
	Owner         string `json:"owner"` // of the backups that this state writes
	// Unknown counts the backups under the name of this host that another state has written. They are
	// not counted, and never removed, until they are adopted. UnknownNewest is the newest of them.
	Unknown       int    `json:"unknown"`
	UnknownNewest string `json:"unknownNewest,omitempty"`
	// RemovalRefused is why the target let no old backup be removed after the last one; absent: it did.
	RemovalRefused string `json:"removalRefused,omitempty"`
	// PacksKept is why packs that nothing may need stayed after the last backup; absent: none did.
	PacksKept string `json:"packsKept,omitempty"`
	// AppendOnly is whether the daemon never removes anything from the target: the storage does.
	AppendOnly bool `json:"appendOnly"`

	Backup       BackupRun `json:"backup"`
	DrillSeconds int64     `json:"drillSeconds"` // 0: on request only
	Drill        BackupRun `json:"drill"`
	// Data is there if backups have volumes, snapshots and layers.
	Data *BackupData `json:"data,omitempty"`
}

// BackupData is what the last backup that succeeded has of data. (ours)
type BackupData struct {
	Bytes     int64 `json:"bytes"`     // of the files in it
	SentBytes int64 `json:"sentBytes"` // that the target did not have before
	Packs     int   `json:"packs"`     // files of the target that it needs
	LeftOut   int   `json:"leftOut"`   // volumes and snapshots that could not be read; the log names them
	// Check is the comparison of packs with their checksums, a thirtieth of them each day.
	Check BackupRun `json:"check"`
}

// BackupDrill answers POST /system/backups/drill: a backup that was restored, and what is in it.
// (ours)
type BackupDrill struct {
	Backup     Backup `json:"backup"`
	Sandboxes  int    `json:"sandboxes"`
	Images     int    `json:"images"`
	Secrets    int    `json:"secrets"`
	TookMillis int64  `json:"tookMillis"`
}

// BackupRun is how a task has gone. (ours)
type BackupRun struct {
	// LastGood is when the last run began that succeeded, and Name and Bytes are of its backup;
	// absent: none has.
	LastGood *time.Time `json:"lastGood,omitempty"`
	Name     string     `json:"name,omitempty"`
	Bytes    int64      `json:"bytes,omitempty"`
	// FailingSince is when it failed first after that, LastTried when the last run began, and Error
	// why it failed; absent: it did not fail.
	FailingSince *time.Time `json:"failingSince,omitempty"`
	LastTried    *time.Time `json:"lastTried,omitempty"`
	Error        string     `json:"error,omitempty"`
}

// Deleting is what deleted sandboxes still hold, because the kernel is taking them apart.
// (ours)
type Deleting struct {
	Sandboxes int       `json:"sandboxes"`
	Since     time.Time `json:"since"` // when the first of them was deleted
	Bytes     int64     `json:"bytes"` // of their disks; 0 where the pool does not count
}

// PreparedSlots are what was made for sandboxes that nobody has asked for yet. (ours)
type PreparedSlots struct {
	Slots int   `json:"slots"`
	Bytes int64 `json:"bytes"` // of their disks; 0 where the pool does not count
}

// ImageDisk is what an image takes. (ours)
type ImageDisk struct {
	Name        string `json:"name"`
	Tag         string `json:"tag"`
	Bytes       int64  `json:"bytes"`       // of all its layers
	SharedBytes int64  `json:"sharedBytes"` // of layers that other images have, too
	Sandboxes   int    `json:"sandboxes"`   // that use it
}

// VolumeDisk is the disk use of a named volume. (ours)
type VolumeDisk struct {
	Name       string `json:"name"`
	Bytes      int64  `json:"bytes"`
	LimitBytes int64  `json:"limitBytes,omitempty"` // absent: none
	Sandboxes  int    `json:"sandboxes"`            // that have it mounted, in whatever state
}

// Disk is what a sandbox has written, or a snapshot holds. (ours)
type Disk struct {
	ID         string `json:"id"`
	Name       string `json:"name,omitempty"`
	State      string `json:"state"`
	Bytes      int64  `json:"bytes"`                // 0 where the pool does not count
	LimitBytes int64  `json:"limitBytes,omitempty"` // absent: none
	// InUse says of a snapshot that it cannot be deleted now.
	InUse bool `json:"inUse,omitempty"`
}
