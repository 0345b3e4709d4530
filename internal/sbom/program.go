package sbom

import (
	"crypto/sha256"
	"debug/buildinfo"
	"debug/elf"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// ours begins the names of the modules of this repository.
const ours = "github.com/sandboxd/sandboxd"

// prefix begins the names of our properties.
const prefix = "sandboxd:"

// settings are the settings of a build that decide what is in a program.
var settings = []string{"-tags", "CGO_ENABLED", "GOARCH", "GOOS", "vcs.revision", "vcs.modified"}

// program is the component of a Go program. Its modules are those that Go has noted in it
// (debug/buildinfo).
func program(path, version string) (c cdx.Component, err error) {
	f, err := os.Open(path)
	if err != nil {
		return c, err
	}
	defer f.Close()
	info, err := buildinfo.Read(f)
	if err != nil {
		return c, fmt.Errorf("program %s: %w", path, err)
	}
	sum, err := sumOf(f)
	if err != nil {
		return c, err
	}
	name := filepath.Base(path)
	c = cdx.Component{
		BOMRef: "program:" + name, Type: cdx.ComponentTypeApplication, Name: name, Version: version,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: sum}},
	}
	var properties []cdx.Property
	for _, s := range info.Settings {
		if slices.Contains(settings, s.Key) && s.Value != "" {
			properties = append(properties, cdx.Property{Name: prefix + "go:" + s.Key, Value: s.Value})
		}
	}
	if e, err := elf.NewFile(f); err == nil {
		libraries, _ := e.ImportedLibraries() // none: it is linked statically
		for _, library := range libraries {
			properties = append(properties, cdx.Property{Name: prefix + "elf:needed", Value: library})
		}
	}
	c.Properties = sorted(properties)
	parts := []cdx.Component{toolchain(info.GoVersion)}
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Path == "" { // a program without a module
			continue
		}
		parts = append(parts, module(m, version))
	}
	c.Components = nest(c.BOMRef, parts)
	return c, nil
}

// sumOf is the sha256 of a file, in hex.
func sumOf(f *os.File) (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, 1<<62)); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// toolchain is the component of Go's standard library, under the name of Go's database of
// vulnerabilities.
func toolchain(version string) cdx.Component {
	number, _, _ := strings.Cut(strings.TrimPrefix(version, "go"), " ")
	return cdx.Component{
		Type: cdx.ComponentTypeLibrary, Name: "stdlib", Version: number, PackageURL: purl("golang", "stdlib", number),
		Description: "the standard library and the toolchain of Go",
	}
}

// module is the component of a Go module. version is that of our own.
func module(m *debug.Module, version string) cdx.Component {
	c := cdx.Component{Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version}
	sum := m.Sum
	switch r := m.Replace; {
	case m.Path == ours || strings.HasPrefix(m.Path, ours+"/"):
		c.Version = version
	case r != nil && r.Version != "":
		c.Name, c.Version, sum = r.Path, r.Version, r.Sum
		c.Pedigree = &cdx.Pedigree{Notes: "used in place of " + m.Path + " " + m.Version}
	case r != nil:
		c.Pedigree = &cdx.Pedigree{Notes: "built from a changed copy, " + r.Path}
	}
	// The package URLs of Go are in lower case (purl-spec, golang).
	c.PackageURL = purl("golang", strings.ToLower(c.Name), c.Version)
	if sum != "" {
		// It is no sum of bytes but of the list of the files' sums, so it is not one of the hashes.
		c.Properties = &[]cdx.Property{{Name: prefix + "go:sum", Value: sum}}
	}
	return c
}

// sorted are properties in the order of their names and values; nil if there are none.
func sorted(all []cdx.Property) *[]cdx.Property {
	if len(all) == 0 {
		return nil
	}
	slices.SortStableFunc(all, func(a, b cdx.Property) int {
		return strings.Compare(a.Name+"\x00"+a.Value, b.Name+"\x00"+b.Value)
	})
	return &all
}

// nest makes components parts of the one with the reference ref: sorted, each with a reference of
// its own, and none twice.
func nest(ref string, parts []cdx.Component) *[]cdx.Component {
	for i := range parts {
		parts[i].BOMRef = ref + "/" + parts[i].PackageURL
	}
	slices.SortStableFunc(parts, func(a, b cdx.Component) int { return strings.Compare(a.BOMRef, b.BOMRef) })
	var once []cdx.Component
	for _, p := range parts {
		last := len(once) - 1
		switch {
		case last < 0 || once[last].BOMRef != p.BOMRef:
			once = append(once, p)
		case p.Evidence != nil: // found in more than one place
			*once[last].Evidence.Occurrences = append(*once[last].Evidence.Occurrences, *p.Evidence.Occurrences...)
		}
	}
	return &once
}
