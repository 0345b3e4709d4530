package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/target"
)

// Backup is where backups of the state are kept, and how many.
type Backup struct {
	Target  string   `toml:"target"`
	Every   Duration `toml:"every"`
	Keep    int      `toml:"keep"`
	MaxAge  Duration `toml:"max_age"`
	Encrypt []string `toml:"encrypt"`
	Data    bool     `toml:"data"`

	// AppendOnly is whether the daemon never removes anything from the target.
	AppendOnly bool `toml:"append_only"`

	// Of S3-compatible storage alone.
	Credentials string `toml:"credentials"`
	Region      string `toml:"region"`
	CA          string `toml:"ca"`

	Drill    Duration `toml:"drill"`
	Identity string   `toml:"identity"`
}

// Identity is the name of the private key for restore drills among the credentials of the service.
const Identity = "sandboxd-backup.identity"

// Identities reads the private keys that open encrypted backups; none if none are named.
func (b *Backup) Identities() (backup.Identities, error) {
	switch b.Identity {
	case "":
		return nil, nil
	case Identity:
		dir := os.Getenv("CREDENTIALS_DIRECTORY")
		if dir == "" {
			return nil, fmt.Errorf("backup.identity is a credential, and this process is not the service, which has it: name a file")
		}
		return backup.ReadIdentities(filepath.Join(dir, Identity))
	}
	return backup.ReadIdentities(b.Identity)
}

// Bounds of the table [backup].
const (
	minBackupEvery = time.Minute
	maxBackups     = 10_000
)

// options are what the target needs beside its address.
func (b *Backup) options() target.Options {
	return target.Options{
		Credentials: b.Credentials, Directory: os.Getenv("CREDENTIALS_DIRECTORY"), CA: b.CA, Region: b.Region,
	}
}

// Open returns the target, to which it does not connect; nil if none is configured.
func (b *Backup) Open() (target.Target, error) {
	if b.Target == "" {
		return nil, nil
	}
	t, err := target.Parse(b.Target, b.options())
	if err == nil && b.AppendOnly {
		t = target.AppendOnly{Target: t}
	}
	return t, err
}

func (c *Config) validateBackup(bad func(string, ...any)) {
	b := &c.Backup
	if d := time.Duration(b.Every); d != 0 && d < minBackupEvery {
		bad("backup.every = %s: want at least %s, or 0s for backups on request only", d, minBackupEvery)
	}
	if b.Keep < 0 || b.Keep > maxBackups {
		bad("backup.keep = %d: want 1 to %d, or 0 for no limit", b.Keep, maxBackups)
	}
	if d := time.Duration(b.MaxAge); d != 0 && d < time.Hour {
		bad("backup.max_age = %s: want at least 1h, or 0s for no limit", d)
	}
	if b.Keep == 0 && b.MaxAge == 0 && !b.AppendOnly {
		bad("backup.keep and backup.max_age are both 0: the target would grow without end; set one of them")
	}
	if _, err := backup.ParseRecipients(b.Encrypt); err != nil {
		bad("backup.encrypt: %w", err)
	}
	if d := time.Duration(b.Drill); d != 0 && d < minBackupEvery {
		bad("backup.drill = %s: want at least %s, or 0s for drills on request only", d, minBackupEvery)
	}
	if b.Identity != "" && b.Identity != Identity && !filepath.IsAbs(b.Identity) {
		bad("backup.identity = %q: want an absolute path, or %q for that credential of the service", b.Identity, Identity)
	}
	if b.Target != "" && len(b.Encrypt) > 0 && b.Drill != 0 && b.Identity == "" {
		bad("backup.drill = %s: a drill must open the backup, which is encrypted; name the private key in backup.identity, or set drill "+
			"to 0s and try backups with `sandboxd restore --check` where the key is", time.Duration(b.Drill))
	}
	for key, path := range map[string]string{"credentials": b.Credentials, "ca": b.CA} {
		if path != "" && !filepath.IsAbs(path) {
			bad("backup.%s = %q: want an absolute path", key, path)
		}
	}
	if b.Target == "" {
		return
	}
	_, err := b.Open()
	switch {
	case err != nil:
		bad("backup.target: %w", err)
	case filepath.IsAbs(b.Target) && (within(b.Target, c.StateDir) || within(b.Target, c.RunDir)):
		bad("backup.target = %q: it overlaps the directories of sandboxd, which a backup is for the loss of; choose another disk", b.Target)
	case target.InClear(b.Target) && len(b.Encrypt) == 0:
		bad("backup.target = %q: without https others on the way can read backups, which have secrets; use s3:https://, or set "+
			"backup.encrypt", b.Target)
	}
}

// checkBackup reads the files that the table names, and looks for the directory.
func (c *Config) checkBackup(there func(key, path string) bool, bad func(string, ...any)) {
	b := &c.Backup
	found := true
	for key, path := range map[string]string{"backup.credentials": b.Credentials, "backup.ca": b.CA} {
		found = (path == "" || there(key, path)) && found
	}
	if filepath.IsAbs(b.Identity) && there("backup.identity", b.Identity) {
		if _, err := b.Identities(); err != nil {
			bad("backup.identity: %w", err)
		}
	}
	switch {
	case filepath.IsAbs(b.Target):
		there("backup.target", b.Target)
	case found && strings.HasPrefix(b.Target, "s3:"):
		if err := b.options().Check(); err != nil {
			bad("backup.credentials: %w", err)
		}
	}
}
