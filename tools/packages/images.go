package main

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/goreleaser/nfpm/v2"
)

var imageForm = regexp.MustCompile(`^[a-z0-9][a-z0-9.+-]+$`)

// image is the package of one image: its archive, which is imported when it is installed and a
// daemon runs.
func (b *build) image(f format, archive string) (*nfpm.Info, error) {
	name := strings.TrimSuffix(filepath.Base(archive), ".tar")
	if !imageForm.MatchString(name) {
		return nil, fmt.Errorf("%q is no name of a package: want small letters, digits and .+-", name)
	}
	info := b.info("sandboxd-image-"+name, "image "+name+" for sandboxes of sandboxd",
		"The root file system of sandboxes that are created from "+name+".\n"+
			"It is imported when the package is installed and sandboxd runs.")
	c := &contents{b: b}
	c.file(archive, "/usr/share/sandboxd/images/"+name+".tar", 0o644)
	if f.name == "rpm" {
		c.dir("/usr/share/sandboxd")
		c.dir("/usr/share/sandboxd/images")
	}
	b.legal(c, f, info.Name, imageCopyright, "")
	if c.err != nil {
		return nil, c.err
	}
	info.Contents = c.all
	if err := b.changes(info, f); err != nil {
		return nil, err
	}
	info.Depends = []string{"sandboxd"}
	// The archive has Debian's packages, each with its own licence in the image.
	info.License = "Apache-2.0 AND various"
	script, err := b.script(map[string]string{"image": name}, "image.postinst")
	info.Scripts.PostInstall = script
	return info, err
}
