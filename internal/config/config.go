// Package config reads the daemon's configuration file and its drop-ins.
//
// The defaults are a file too: default.toml, embedded, which `sandboxd config init`
// writes with each key commented out. It holds each value with its reason. A user's file is
// read over it, and the files of the directory NAME.d beside NAME.toml over that, by name;
// an unknown key is an error.
package config

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Config is the configuration of a daemon, as default.toml describes it.
type Config struct {
	// File is where Load has read it; "": there is no file.
	File string `toml:"-"`

	InstanceName string   `toml:"instance"`
	StateDir     string   `toml:"state_dir"`
	RunDir       string   `toml:"run_dir"`
	LibexecDir   string   `toml:"libexec_dir"`
	RecipesDir   string   `toml:"recipes_dir"`
	Listen       Listen   `toml:"listen"`
	Gateway      Gateway  `toml:"gateway"`
	Storage      Storage  `toml:"storage"`
	Network      Network  `toml:"network"`
	Egress       Egress   `toml:"egress"`
	Runtime      Runtime  `toml:"runtime"`
	Security     Security `toml:"security"`
	Images       Images   `toml:"images"`

	Registries []registry.Registry `toml:"registries"`

	Defaults Guest  `toml:"defaults"`
	Limits   Limits `toml:"limits"`
	Log      Log    `toml:"log"`

	Prepared Prepared `toml:"prepared"`

	Snapshots Snapshots `toml:"snapshots"`

	Backup Backup `toml:"backup"`

	Upgrade Upgrade `toml:"upgrade"`

	Policies map[string]Policy `toml:"policies"`

	Pools []Pool `toml:"pool"`

	// Warnings are about keys of older releases, for the operator.
	Warnings []string `toml:"-"`
	// OwnPrograms: the configuration names libexec_dir, so the runtimes do not follow the version.
	OwnPrograms bool `toml:"-"`
	// Instance is InstanceName, checked.
	Instance instance.Instance `toml:"-"`
}

// Listen is where the API is served, and to whom.
type Listen struct {
	Socket        string `toml:"socket"`
	SocketGroup   string `toml:"socket_group"`
	AdminSocket   string `toml:"admin_socket"`
	Metrics       string `toml:"metrics"`
	TCP           string `toml:"tcp"`
	APIKeyFile    string `toml:"api_key_file"`
	InsecureIf    any    `toml:"insecure"` // false, true or the words of Insecure; "" is false
	PublicAddress string `toml:"public_address"`
	TLSCert       string `toml:"tls_cert"`
	TLSKey        string `toml:"tls_key"`

	TrustedProxies []string `toml:"trusted_proxies"`

	Proxies  []netip.Prefix `toml:"-"` // TrustedProxies, checked
	Insecure bool           `toml:"-"` // InsecureIf, checked
}

// Gateway is the listener for ports of sandboxes.
type Gateway struct {
	Listen  string `toml:"listen"`
	Domain  string `toml:"domain"`
	Address string `toml:"address"`
	Public  string `toml:"public"`
	TLSCert string `toml:"tls_cert"`
	TLSKey  string `toml:"tls_key"`
}

// Storage is the pool to which sandboxes write, and the host's directories that they
// may mount.
type Storage struct {
	Pool     string `toml:"pool"`
	Device   string `toml:"device"`
	PoolSize Size   `toml:"pool_size"`
	Reserve  Size   `toml:"reserve"`

	VolumeSize       Size     `toml:"volume_size"`
	AllowedHostPaths []string `toml:"allowed_host_paths"`
}

// Runtime is how sandboxes are started.
type Runtime struct {
	Default       string   `toml:"default"`
	RunscHeadroom Size     `toml:"runsc_headroom"`
	StartTimeout  Duration `toml:"start_timeout"`
}

// Security is which levels of security requests may ask for.
type Security struct {
	Levels []string `toml:"levels"`
}

// Offered returns the levels, the strictest first.
func (s Security) Offered() (levels []record.Security) {
	for _, l := range record.SecurityLevels {
		if slices.Contains(s.Levels, string(l)) {
			levels = append(levels, l)
		}
	}
	return levels
}

// Guest is what a sandbox gets if its request does not say otherwise.
type Guest struct {
	Memory  Size   `toml:"memory"`
	CPU     CPU    `toml:"cpu"`
	Pids    int64  `toml:"pids"`
	Disk    Size   `toml:"disk"`
	LogSize Size   `toml:"log_size"`
	Network string `toml:"network"`

	Security   string `toml:"security"`
	ShellAhead bool   `toml:"shell_ahead"`
}

// Limits bound the host's load.
type Limits struct {
	MaxSandboxes  int      `toml:"max_sandboxes"`
	MaxCreating   int      `toml:"max_creating"` // 0 in the file: by the CPUs
	MemoryReserve Size     `toml:"memory_reserve"`
	MaxTimeout    Duration `toml:"max_timeout"`
	RetainEnded   Duration `toml:"retain_ended"`

	RequestsPerSecond int `toml:"requests_per_second"`
}

// Prepared is how many prepared slots are kept for each runtime.
type Prepared struct {
	Runsc int `toml:"runsc"`
	Runc  int `toml:"runc"`
}

// maxSnapshots is how many snapshots a host has at most, whatever is configured.
const maxSnapshots = 10_000

// maxPrepared bounds the prepared slots of a runtime. More would only be made while
// nothing else happens, and hold addresses and memory of the kernel.
const maxPrepared = 32

// Snapshots are the limits beyond which snapshots are removed; 0: none.
type Snapshots struct {
	Max             int      `toml:"max"`
	MaxPerSandbox   int      `toml:"max_per_sandbox"`
	Bytes           Size     `toml:"max_bytes"`
	BytesPerSandbox Size     `toml:"max_bytes_per_sandbox"`
	Age             Duration `toml:"max_age"`
}

// Upgrade is how a new version is tried.
type Upgrade struct {
	Gate     Duration `toml:"gate"`
	Soak     Duration `toml:"soak"`
	Packages bool     `toml:"try_packages"`
}

// Log is how much the daemon logs.
type Log struct {
	Level string `toml:"level"`
}

// validate fills in what derives from the instance and reports every problem.
func (c *Config) validate(bad func(format string, args ...any)) {
	var err error
	if c.Instance, err = instance.Parse(c.InstanceName); err != nil {
		bad("%w", err)
		c.Instance = 'a' // what derives from it is well formed
	}
	c.validatePlaces(bad)
	c.validateListen(bad)
	c.validateGateway(bad)
	c.validateNetwork(bad)
	c.validatePolicies(bad)
	c.validatePools(bad)
	c.validateStorage(bad)
	c.validateRuntime(bad)
	c.validateSecurity(bad)
	c.validateImages(bad)
	c.validateDefaults(bad)
	c.validateLimits(bad)
	c.validateSnapshots(bad)
	c.validateBackup(bad)
	if d := time.Duration(c.Upgrade.Gate); d < time.Second {
		bad("upgrade.gate = %s: want at least 1s", d)
	}
	switch c.Log.Level {
	case "debug", "info", "warn", "error":
	default:
		bad("log.level = %q: want debug, info, warn or error", c.Log.Level)
	}
}

// validatePlaces fills in directories and sockets.
func (c *Config) validatePlaces(bad func(string, ...any)) {
	c.StateDir, c.RunDir = cmp.Or(c.StateDir, c.Instance.StateDir()), cmp.Or(c.RunDir, c.Instance.RunDir())
	if err := c.fillPrograms(); err != nil {
		bad("%w", err)
	}
	c.Listen.Socket = cmp.Or(c.Listen.Socket, filepath.Join(c.RunDir, "sandboxd.sock"))
	c.Listen.AdminSocket = cmp.Or(c.Listen.AdminSocket, filepath.Join(c.RunDir, "admin.sock"))
	for name, dir := range map[string]string{
		"state_dir": c.StateDir, "run_dir": c.RunDir, "libexec_dir": c.LibexecDir,
		"recipes_dir": c.RecipesDir, "listen.socket": c.Listen.Socket, "listen.admin_socket": c.Listen.AdminSocket,
	} {
		if !filepath.IsAbs(dir) {
			bad("%s = %q: want an absolute path", name, dir)
		}
	}
	if within(c.LibexecDir, c.StateDir) || within(c.StateDir, c.LibexecDir) {
		bad("libexec_dir %s and state_dir %s overlap: keep them apart", c.LibexecDir, c.StateDir)
	}
	if within(c.RunDir, c.StateDir) || within(c.StateDir, c.RunDir) {
		bad("run_dir %s and state_dir %s overlap: keep them apart, because run_dir is cleared", c.RunDir, c.StateDir)
	}
}

func (c *Config) validateRuntime(bad func(string, ...any)) {
	if c.Runtime.Default != "runsc" && c.Runtime.Default != "runc" {
		bad("runtime.default = %q: want runsc or runc", c.Runtime.Default)
	}
	if c.Runtime.StartTimeout <= 0 {
		bad("runtime.start_timeout: want more than 0")
	}
	for name, n := range map[string]int{"runsc": c.Prepared.Runsc, "runc": c.Prepared.Runc} {
		if n < 0 || n > maxPrepared {
			bad("prepared.%s = %d: want 1 to %d, or 0 for none", name, n, maxPrepared)
		}
	}
}

// Slots is Prepared, with as many slots as max_sandboxes leaves addresses for: a slot never
// has an address that a sandbox needs, so a create does not wait for one. The runtime with
// more slots gives up one first.
// Preconditions: the configuration is valid.
func (c *Config) Slots() Prepared {
	p := c.Prepared
	for p.Runsc+p.Runc > instance.MaxSlots-c.Limits.MaxSandboxes {
		if p.Runsc > p.Runc {
			p.Runsc--
		} else {
			p.Runc--
		}
	}
	return p
}

func (c *Config) validateDefaults(bad func(string, ...any)) {
	if c.Defaults.Memory < 64<<20 || c.Defaults.CPU <= 0 || c.Defaults.Pids <= 0 || c.Defaults.Disk < 0 {
		bad("defaults: want memory ≥ 64Mi, cpu > 0, pids > 0, disk ≥ 0")
	}
	if n := c.Defaults.LogSize; n < 64<<10 || n > 256<<20 {
		bad("defaults.log_size = %d: want 64Ki to 256Mi", n)
	}
	switch c.Defaults.Network {
	case "none", "rules", "open":
	default:
		bad("defaults.network = %q: want none, rules or open", c.Defaults.Network)
	}
}

func (c *Config) validateLimits(bad func(string, ...any)) {
	if n := c.Limits.MaxSandboxes; n < 1 || n > instance.MaxSlots {
		bad("limits.max_sandboxes = %d: want 1 to %d", n, instance.MaxSlots)
	}
	switch n := c.Limits.MaxCreating; {
	case n == 0:
		c.Limits.MaxCreating = 2 * runtime.NumCPU()
	case n < 0 || n > instance.MaxSlots:
		bad("limits.max_creating = %d: want 1 to %d, or 0 for twice the CPUs", n, instance.MaxSlots)
	}
	if n := c.Limits.RequestsPerSecond; n < 0 || n > 1e6 {
		bad("limits.requests_per_second = %d: want 1 to 1000000, or 0 for no limit", n)
	}
	if d := time.Duration(c.Limits.RetainEnded); d < time.Second {
		bad("limits.retain_ended = %s: want at least 1s, so that clients can read why a sandbox ended", d)
	}
}

func (c *Config) validateSnapshots(bad func(string, ...any)) {
	for name, n := range map[string]int{"max": c.Snapshots.Max, "max_per_sandbox": c.Snapshots.MaxPerSandbox} {
		if n < 0 || n > maxSnapshots {
			bad("snapshots.%s = %d: want 1 to %d, or 0 for no limit", name, n, maxSnapshots)
		}
	}
	if d := time.Duration(c.Snapshots.Age); d != 0 && d < time.Minute {
		bad("snapshots.max_age = %s: want at least 1m, or 0s for no limit", d)
	}
}

func (c *Config) validateSecurity(bad func(string, ...any)) {
	for _, l := range c.Security.Levels {
		if !slices.Contains(record.SecurityLevels, record.Security(l)) {
			bad("security.levels: %q: want a list of strict, default and compat", l)
		}
	}
	if !slices.Contains(record.SecurityLevels, record.Security(c.Defaults.Security)) {
		bad("defaults.security = %q: want strict, default or compat", c.Defaults.Security)
	} else if !slices.Contains(c.Security.Levels, c.Defaults.Security) {
		bad("defaults.security = %q: it is not in security.levels; add it there, or choose another level", c.Defaults.Security)
	}
}

func (c *Config) validateStorage(bad func(string, ...any)) {
	switch c.Storage.Pool {
	case "auto", "btrfs", "btrfs-loop", "prjquota", "plain":
	default:
		bad("storage.pool = %q: want auto, btrfs, btrfs-loop, prjquota or plain", c.Storage.Pool)
	}
	if d := c.Storage.Device; d != "" && (c.Storage.Pool != "btrfs" || !filepath.IsAbs(d)) {
		bad("storage.device = %q: want the absolute path of a block device, and storage.pool = \"btrfs\" with it", d)
	}
	if n := c.Storage.PoolSize; n != 0 && n < 256<<20 {
		bad("storage.pool_size = %d: want at least 256Mi, or 0 for a size by what is free", n)
	}
	if n := c.Storage.VolumeSize; n != 0 && n < 16<<20 {
		bad("storage.volume_size = %d: want at least 16Mi, or 0 for no limit", n)
	}
	for _, p := range c.Storage.AllowedHostPaths {
		switch {
		case !filepath.IsAbs(p) || filepath.Clean(p) != p:
			bad("storage.allowed_host_paths: %q: want an absolute path without . and .., and without a slash at its end", p)
		case p == "/":
			bad("storage.allowed_host_paths: / cannot be allowed, because it contains the files of sandboxd; list directories")
		case within(p, c.StateDir), within(p, c.RunDir):
			bad("storage.allowed_host_paths: %q overlaps the directories of sandboxd; choose another directory", p)
		}
	}
}

// fillPrograms finds the directories that were installed with this program, under any
// prefix.
func (c *Config) fillPrograms() error {
	c.OwnPrograms = c.LibexecDir != ""
	if c.LibexecDir != "" && c.RecipesDir != "" {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find libexec_dir beside this program: %w; set libexec_dir and recipes_dir", err)
	}
	prefix := filepath.Dir(filepath.Dir(self))
	if c.LibexecDir == "" {
		c.LibexecDir = filepath.Join(prefix, "libexec/sandboxd")
	}
	if c.RecipesDir == "" {
		c.RecipesDir = filepath.Join(prefix, "share/sandboxd/rootfs")
	}
	return nil
}

func within(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}
