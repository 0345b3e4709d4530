// Package config reads the daemon's one configuration file.
//
// The defaults are a file too: default.toml, embedded, which `sandboxd config init`
// writes. It holds each value with its reason. A user's file is read over it; an
// unknown key is an error.
package config

import (
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
)

//go:embed default.toml
var defaults []byte

// Config is the configuration of a daemon, as default.toml describes it.
type Config struct {
	InstanceName string  `toml:"instance"`
	StateDir     string  `toml:"state_dir"`
	RunDir       string  `toml:"run_dir"`
	LibexecDir   string  `toml:"libexec_dir"`
	RecipesDir   string  `toml:"recipes_dir"`
	Listen       Listen  `toml:"listen"`
	Gateway      Gateway `toml:"gateway"`
	Storage      Storage `toml:"storage"`
	Network      Network `toml:"network"`
	Runtime      Runtime `toml:"runtime"`
	Images       Images  `toml:"images"`

	Registries []registry.Registry `toml:"registries"`

	Defaults Guest  `toml:"defaults"`
	Limits   Limits `toml:"limits"`
	Log      Log    `toml:"log"`

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

// Guest is what a sandbox gets if its request does not say otherwise.
type Guest struct {
	Memory  Size   `toml:"memory"`
	CPU     CPU    `toml:"cpu"`
	Pids    int64  `toml:"pids"`
	Disk    Size   `toml:"disk"`
	LogSize Size   `toml:"log_size"`
	Network string `toml:"network"`

	ShellAhead bool `toml:"shell_ahead"`
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

// Log is how much the daemon logs.
type Log struct {
	Level string `toml:"level"`
}

// Default returns the text of the default configuration.
func Default() []byte { return defaults }

// Load reads path over the defaults; an empty path is the defaults alone.
// The error names every problem at once.
func Load(path string) (*Config, error) {
	c := &Config{}
	if err := decode(defaults, "default.toml", c); err != nil {
		return nil, err
	}
	if path != "" {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read configuration: %w", err)
		}
		if err := decode(b, path, c); err != nil {
			return nil, err
		}
	}
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("configuration %s:\n%w", path, err)
	}
	return c, nil
}

func decode(b []byte, name string, c *Config) error {
	err := toml.NewDecoder(strings.NewReader(string(b))).DisallowUnknownFields().Decode(c)
	if strict, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		return fmt.Errorf("configuration %s: unknown key; `sandboxd config init` prints all keys:\n%s", name, strict.String())
	}
	if bad, ok := errors.AsType[*toml.DecodeError](err); ok {
		return fmt.Errorf("configuration %s:\n%s", name, bad.String())
	}
	if err != nil {
		return fmt.Errorf("configuration %s: %w", name, err)
	}
	return nil
}

// validate fills in what derives from the instance and reports every problem.
func (c *Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }

	var err error
	if c.Instance, err = instance.Parse(c.InstanceName); err != nil {
		return err // everything below derives from it
	}
	if c.StateDir == "" {
		c.StateDir = c.Instance.StateDir()
	}
	if c.RunDir == "" {
		c.RunDir = c.Instance.RunDir()
	}
	if err := c.fillPrograms(); err != nil {
		return err
	}
	if c.Listen.Socket == "" {
		c.Listen.Socket = filepath.Join(c.RunDir, "sandboxd.sock")
	}
	if c.Listen.AdminSocket == "" {
		c.Listen.AdminSocket = filepath.Join(c.RunDir, "admin.sock")
	}
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
	c.validateListen(bad)
	c.validateGateway(bad)
	c.validateNetwork(bad)
	c.validateStorage(bad)
	if c.Runtime.Default != "runsc" && c.Runtime.Default != "runc" {
		bad("runtime.default = %q: want runsc or runc", c.Runtime.Default)
	}
	c.validateImages(bad)
	if c.Runtime.StartTimeout <= 0 {
		bad("runtime.start_timeout: want more than 0")
	}
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
	switch c.Log.Level {
	case "debug", "info", "warn", "error":
	default:
		bad("log.level = %q: want debug, info, warn or error", c.Log.Level)
	}
	return errors.Join(errs...)
}

func (c *Config) validateStorage(bad func(string, ...any)) {
	switch c.Storage.Pool {
	case "auto", "btrfs", "btrfs-loop", "prjquota", "plain":
	default:
		bad("storage.pool = %q: want auto, btrfs, btrfs-loop, prjquota or plain", c.Storage.Pool)
	}
	if c.Storage.PoolSize < 256<<20 {
		bad("storage.pool_size = %d: want at least 256Mi", c.Storage.PoolSize)
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

// APIKeys reads the API keys, one per line; none if no file is named.
func (c *Config) APIKeys() ([]string, error) {
	if c.Listen.APIKeyFile == "" {
		return nil, nil
	}
	fi, err := os.Stat(c.Listen.APIKeyFile)
	if err != nil {
		return nil, fmt.Errorf("read API keys: %w", err)
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("read API keys: %s may be read by others (mode %04o): chmod 600 it", c.Listen.APIKeyFile, fi.Mode().Perm())
	}
	b, err := os.ReadFile(c.Listen.APIKeyFile)
	if err != nil {
		return nil, fmt.Errorf("read API keys: %w", err)
	}
	keys := strings.Fields(string(b))
	if len(keys) == 0 {
		return nil, fmt.Errorf("read API keys: %s is empty", c.Listen.APIKeyFile)
	}
	return keys, nil
}

func within(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}

// Size is a number of bytes, written as "512Mi".
type Size int64

// UnmarshalText reads a whole number with an optional Ki, Mi, Gi or Ti.
func (s *Size) UnmarshalText(b []byte) error {
	text, unit := string(b), int64(1)
	for suffix, u := range map[string]int64{"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40} {
		if t, ok := strings.CutSuffix(text, suffix); ok {
			text, unit = t, u
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > (1<<62)/unit {
		return fmt.Errorf("size %q: want a whole number with Ki, Mi, Gi or Ti", b)
	}
	*s = Size(n * unit)
	return nil
}

// CPU is thousandths of a core, written as "500m", "1" or "0.5".
type CPU int64

// UnmarshalText reads cores, or thousandths of one with the suffix m.
func (c *CPU) UnmarshalText(b []byte) error {
	text, unit := string(b), 1000.0
	if t, ok := strings.CutSuffix(text, "m"); ok {
		text, unit = t, 1
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !(f > 0) || f*unit > 1e6 {
		return fmt.Errorf("cpu %q: want cores such as 1 or 0.5, or thousandths such as 500m", b)
	}
	*c = CPU(f * unit)
	return nil
}

// Duration is a time.Duration, written as "90s".
type Duration time.Duration

// UnmarshalText reads Go's form of a duration.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil || v < 0 {
		return fmt.Errorf("duration %q: want a duration such as 90s, 30m or 1h", b)
	}
	*d = Duration(v)
	return nil
}
