package sbom

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// ReadVerb is the verb of the child that reads an image: the program's main gives [Read] to
// confine.Main under this name.
const ReadVerb = "sbom"

// maxAnswer bounds what a child may say, in bytes.
const maxAnswer = 4 * maxWeight

// Read is the child: it reads the archive at confine.FirstFile and writes an Image as JSON. Its
// argument is the name of an image whose archive has none.
func Read(args []string) error {
	f := os.NewFile(confine.FirstFile, "archive")
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	i, err := readImage(f, fi.Size(), strings.Join(args, " "))
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(i)
}

// image is the component of an image.
func image(ctx context.Context, path string) (c cdx.Component, err error) {
	f, err := os.Open(path)
	if err != nil {
		return c, err
	}
	defer f.Close()
	sum, err := sumOf(f)
	if err != nil {
		return c, err
	}
	i, err := whatIsIn(ctx, f, nameOf(path))
	if err != nil {
		return c, fmt.Errorf("image %s: %w", path, err)
	}
	name, version := i.Name, ""
	if at := strings.LastIndexByte(i.Name, ':'); at > strings.LastIndexByte(i.Name, '/') {
		name, version = i.Name[:at], i.Name[at+1:]
	}
	c = cdx.Component{
		BOMRef: "image:" + i.Name, Type: cdx.ComponentTypeContainer, Name: name, Version: version,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: sum}},
	}
	var properties []cdx.Property
	for _, l := range i.Layers { // in their order
		properties = append(properties, cdx.Property{Name: prefix + "layer", Value: l})
	}
	for _, n := range i.Notes {
		properties = append(properties, cdx.Property{Name: prefix + "note", Value: n})
	}
	if len(properties) > 0 {
		c.Properties = &properties
	}
	parts := make([]cdx.Component, 0, len(i.Packages))
	for _, p := range i.Packages {
		parts = append(parts, p.component(i.OS))
	}
	c.Components = nest(c.BOMRef, parts)
	if i.OS.ID != "" {
		system := cdx.Component{
			BOMRef: c.BOMRef + "/os", Type: cdx.ComponentTypeOS, Name: i.OS.ID, Version: i.OS.Version, Description: i.OS.Name,
		}
		*c.Components = slices.Insert(*c.Components, 0, system)
	}
	return c, nil
}

// component is the component of a package of an image.
func (p Package) component(of OS) cdx.Component {
	c := cdx.Component{
		Type: cdx.ComponentTypeLibrary, Name: p.Name, Version: p.Version, PackageURL: p.url(of), Licenses: licences(p.Licences),
		Evidence: &cdx.Evidence{Occurrences: &[]cdx.EvidenceOccurrence{{Location: p.At}}},
	}
	if p.Supplier != "" {
		c.Supplier = &cdx.OrganizationalEntity{Name: p.Supplier}
	}
	return c
}

// whatIsIn reads the archive of an image in a child. Without the rights that starting one needs,
// this process reads it.
func whatIsIn(ctx context.Context, f *os.File, name string) (i Image, err error) {
	if os.Geteuid() != 0 {
		fi, err := f.Stat()
		if err != nil {
			return i, err
		}
		if i, err = readImage(f, fi.Size(), name); err != nil {
			return i, err
		}
		return i, i.check()
	}
	p, err := confine.Start(ctx, confine.Child{Verb: ReadVerb, Args: []string{name}, Files: []*os.File{f}})
	if err != nil {
		return i, err
	}
	defer p.Close()
	p.In.Close()
	b, err := io.ReadAll(io.LimitReader(p.Out, maxAnswer+1))
	if len(b) > maxAnswer {
		p.Kill()
		err = errTooMuch
	}
	if werr := p.Wait(); werr != nil && err == nil {
		err = werr
	}
	if err == nil {
		err = json.Unmarshal(b, &i)
	}
	if err != nil {
		return i, err
	}
	return i, i.check()
}

// check refuses what no honest child says.
func (i Image) check() error {
	bad := func(what string) error { return errs.New(errs.Invalid, "what the child says of %s is wrong", what) }
	if i.Name == "" || i.Name != clean(i.Name) {
		return bad("the name")
	}
	if i.OS.ID != "" && i.OS.wrong() != "" {
		return bad("the distribution")
	}
	for _, p := range i.Packages {
		if p.wrong() != "" || p.At == "" {
			return bad("a package")
		}
	}
	for _, text := range append(slices.Clone(i.Notes), i.Layers...) {
		if text != clean(text) {
			return bad("a file")
		}
	}
	return nil
}
