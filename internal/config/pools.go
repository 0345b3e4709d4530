package config

import (
	"encoding/json"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Pool is a pool of sandboxes that are kept ready.
type Pool struct {
	Name    string `toml:"name"`
	Image   string `toml:"image"`
	Runtime string `toml:"runtime"` // empty, as the next: the default
	// What a creation calls resourceLimits: cpu, memory, pids, disk and others.
	Limits   map[string]string `toml:"limits"`
	Security string            `toml:"security"`
	Prestart []string          `toml:"prestart"` // languages of code contexts that run already
	Warm     string            `toml:"warm"`     // a line for the shell, run once in each member
	Ready    string            `toml:"ready"`    // another, then tried until it succeeds
	MaxAge   Duration          `toml:"max_age"`  // 0: none

	BufferMin int `toml:"buffer_min"`
	BufferMax int `toml:"buffer_max"`
	PoolMin   int `toml:"pool_min"`
	PoolMax   int `toml:"pool_max"`
}

// pool is p as the store has it.
func (p Pool) pool() record.Pool {
	t := wire.PoolTemplate{Image: &wire.Image{URI: p.Image}, ResourceLimits: p.Limits, Extensions: map[string]string{}}
	for k, v := range map[string]string{
		wire.ExtRuntime: p.Runtime, wire.ExtSecurity: p.Security, wire.ExtPrestart: strings.Join(p.Prestart, ","), wire.ExtPoolWarm: p.Warm,
		wire.ExtPoolReady: p.Ready,
	} {
		if v != "" {
			t.Extensions[k] = v
		}
	}
	if p.MaxAge > 0 {
		t.Extensions[wire.ExtPoolMaxAge] = time.Duration(p.MaxAge).String()
	}
	b, _ := json.Marshal(t) //nolint:errcheck // strings alone
	return record.Pool{
		Name: p.Name, Template: b, Warm: p.Warm, Ready: p.Ready, MaxAge: time.Duration(p.MaxAge),
		Capacity: record.Capacity{BufferMin: p.BufferMin, BufferMax: p.BufferMax, PoolMin: p.PoolMin, PoolMax: p.PoolMax},
	}
}

// FixedPools are Pools as the store has them.
// Preconditions: the configuration is valid.
func (c *Config) FixedPools() (all []record.Pool) {
	for _, p := range c.Pools {
		all = append(all, p.pool())
	}
	return all
}

// PoolImages are the images of Pools, as they are named.
func (c *Config) PoolImages() (uris []string) {
	for _, p := range c.Pools {
		uris = append(uris, p.Image)
	}
	return uris
}

func (c *Config) validatePools(bad func(string, ...any)) {
	if n := len(c.Pools); n > record.MaxPools {
		bad("pool: there are %d tables [[pool]]: want at most %d", n, record.MaxPools)
	}
	names := map[string]bool{}
	for _, p := range c.Pools {
		if !record.IsPolicyName(p.Name) {
			bad("pool: name = %q: %s", p.Name, record.WantPolicyName)
			continue
		}
		if names[p.Name] {
			bad("pool %s: there are two of that name", p.Name)
		}
		names[p.Name] = true
		if p.Image == "" {
			bad("pool %s: image is missing", p.Name)
		}
		if p.Runtime != "" && p.Runtime != "runsc" && p.Runtime != "runc" {
			bad("pool %s: runtime = %q: want runsc or runc", p.Name, p.Runtime)
		}
		for key, line := range map[string]string{"warm": p.Warm, "ready": p.Ready} {
			if why := record.CheckPoolLine(line); why != "" {
				bad("pool %s: %s: %s", p.Name, key, why)
			}
		}
		if why := p.pool().Capacity.Check(); why != "" {
			bad("pool %s: %s (bufferMin is buffer_min, and so on)", p.Name, why)
		}
		if p.MaxAge != 0 && time.Duration(p.MaxAge) < time.Minute {
			bad("pool %s: max_age: want at least 1m", p.Name)
		}
	}
}
