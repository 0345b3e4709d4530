// Package sbom says what is in our programs and images, as a software bill of materials in
// CycloneDX's JSON (https://cyclonedx.org/specification/overview/).
//
//	sandboxd                          the release
//	├── program:sandboxd              of each program the Go modules, which Go notes in it,
//	│   └── …/pkg:golang/…@v1.2.3     with their sums, and Go's standard library
//	└── image:python:latest           of each image what its own files say:
//	    ├── …/pkg:deb/debian/…        var/lib/dpkg/status, var/lib/dpkg/status.d/*
//	    ├── …/pkg:pypi/…              *.dist-info/METADATA, *.egg-info
//	    └── …/pkg:npm/…               node_modules/NAME/package.json
//
// The same programs, archives and time give the same bytes.
//
// What surprises: an image is hostile, so a child without privileges reads it (internal/confine) and
// says what it has found. Only a user who is not root, and cannot start such a child, reads it
// without one. What an image says of itself may be a lie; only its bounds and its form are checked.
package sbom

import (
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // RFC 9562 has it in UUIDs of version 5
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// Content says what a bill is of.
type Content struct {
	Version  string    // of the release, as internal/release has it
	Time     time.Time // zero: the bill has none
	Programs []string  // files
	Images   []string  // archives
}

// Make makes a bill. Its error names the file that cannot be read.
func Make(ctx context.Context, c Content) ([]byte, error) {
	release := cdx.Component{BOMRef: "sandboxd", Type: cdx.ComponentTypeApplication, Name: "sandboxd", Version: c.Version}
	var parts []cdx.Component
	for _, path := range c.Programs {
		p, err := program(path, c.Version)
		if err != nil {
			return nil, err
		}
		parts = append(parts, p)
	}
	for _, path := range c.Images {
		i, err := image(ctx, path)
		if err != nil {
			return nil, err
		}
		parts = append(parts, i)
	}
	slices.SortFunc(parts, func(a, b cdx.Component) int { return strings.Compare(a.BOMRef, b.BOMRef) })
	for i := range parts[min(1, len(parts)):] {
		if parts[i].BOMRef == parts[i+1].BOMRef {
			return nil, fmt.Errorf("there are two of %s; leave one out", strings.Replace(parts[i].BOMRef, ":", " ", 1))
		}
	}
	bom := &cdx.BOM{
		JSONSchema: "http://cyclonedx.org/schema/bom-1.6.schema.json", BOMFormat: cdx.BOMFormat,
		SpecVersion: cdx.SpecVersion1_6, Version: 1,
		Metadata: &cdx.Metadata{
			Component: &release,
			Tools: &cdx.ToolsChoice{Components: &[]cdx.Component{
				{Type: cdx.ComponentTypeApplication, Name: "sandboxd", Version: c.Version},
			}},
		},
		Components:   &parts,
		Dependencies: dependencies(release.BOMRef, parts),
	}
	if !c.Time.IsZero() {
		bom.Metadata.Timestamp = c.Time.UTC().Format(time.RFC3339)
	}
	b, err := encode(bom)
	if err != nil {
		return nil, err
	}
	bom.SerialNumber = "urn:uuid:" + uuidOf(b)
	return encode(bom)
}

func encode(bom *cdx.BOM) ([]byte, error) {
	var b bytes.Buffer
	err := cdx.NewBOMEncoder(&b, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false).EncodeVersion(bom, cdx.SpecVersion1_6)
	return b.Bytes(), err
}

// space is the space of names of our bills: the UUID of version 5 of the URL https://github.com/sandboxd/sandboxd.
var space = uuid5([]byte("\x6b\xa7\xb8\x11\x9d\xad\x11\xd1\x80\xb4\x00\xc0\x4f\xd4\x30\xc8"), []byte("https://"+ours))

// uuidOf is a UUID of version 5 that only this content has (RFC 9562, section 5.5).
func uuidOf(content []byte) string {
	h := hex.EncodeToString(uuid5(space, content))
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

func uuid5(space, name []byte) []byte {
	sum := sha1.Sum(append(slices.Clone(space), name...)) //nolint:gosec // as above
	u := sum[:16]
	u[6] = u[6]&0x0f | 5<<4
	u[8] = u[8]&0x3f | 2<<6
	return u
}

// dependencies say of each component with parts that it depends on them.
func dependencies(root string, parts []cdx.Component) *[]cdx.Dependency {
	var all []cdx.Dependency
	add := func(ref string, parts []cdx.Component) {
		refs := []string{}
		for _, p := range parts {
			refs = append(refs, p.BOMRef)
		}
		all = append(all, cdx.Dependency{Ref: ref, Dependencies: &refs})
	}
	add(root, parts)
	for _, p := range parts {
		if p.Components != nil {
			add(p.BOMRef, *p.Components)
		}
	}
	return &all
}
