package config

import (
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
)

// Images is which image a name means.
type Images struct {
	Aliases map[string]string `toml:"aliases"`
	// OtherVersions is what an alias of another version does: NoteVersions or RefuseVersions.
	OtherVersions string `toml:"other_versions"`

	Names      []image.Alias    `toml:"-"` // Aliases, checked
	Registries *registry.Client `toml:"-"` // Config.Registries, checked
}

// The values of images.other_versions.
const (
	NoteVersions   = "note"
	RefuseVersions = "refuse"
)

func (c *Config) validateImages(bad func(string, ...any)) {
	var err error
	if c.Images.Names, err = image.ParseAliases(c.Images.Aliases); err != nil {
		bad("images.aliases: %w", err)
	}
	if v := c.Images.OtherVersions; v != NoteVersions && v != RefuseVersions {
		bad("images.other_versions = %q: want %s or %s", v, NoteVersions, RefuseVersions)
	}
	if c.Images.Registries, err = registry.New(c.Registries); err != nil {
		bad("registries: %w", err)
	}
}
