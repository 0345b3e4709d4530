package archive

import (
	"encoding/json"
	"maps"
	"path"
	"regexp"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// document is the config of an image, as OCI's specification and docker have it, as far as it
// is read. What nobody reads may have any form.
type document struct {
	Architecture string `json:"architecture"`
	Variant      string `json:"variant"`
	OS           string `json:"os"`
	Config       struct {
		User, WorkingDir string
		Env              []string
		Entrypoint, Cmd  words
		Labels           map[string]string
		StopSignal       string
		unused
	} `json:"config"`
	RootFS struct {
		DiffIDs []v1.Hash `json:"diff_ids"`
	} `json:"rootfs"`
}

// unused are the fields that sandboxd does not use. docs/compatibility.md has all fields.
type unused struct {
	ExposedPorts, Healthcheck, OnBuild, Shell, Volumes json.RawMessage
}

// given are those that an image has.
func (u unused) given() map[string]json.RawMessage {
	all := map[string]json.RawMessage{
		"ExposedPorts": u.ExposedPorts, "Healthcheck": u.Healthcheck, "OnBuild": u.OnBuild, "Shell": u.Shell, "Volumes": u.Volumes,
	}
	maps.DeleteFunc(all, func(_ string, v json.RawMessage) bool {
		switch string(v) {
		case "", "null", "{}", "[]":
			return true
		}
		return false
	})
	return all
}

// words are a list, or one word that some programs write without its list; docker takes both.
type words []string

func (w *words) UnmarshalJSON(b []byte) error {
	var one string
	if json.Unmarshal(b, &one) == nil && string(b) != "null" {
		*w = words{one}
		return nil
	}
	return json.Unmarshal(b, (*[]string)(w))
}

// configOf reads the config of an image.
func configOf(b []byte) (Config, error) {
	var c document
	if err := json.Unmarshal(b, &c); err != nil {
		return Config{}, errs.Wrap(err, errs.Invalid, "the config of the image cannot be read")
	}
	platform, err := platformOf(c.OS, c.Architecture, c.Variant)
	if err != nil {
		return Config{}, err
	}
	out := Config{Config: record.ImageConfig{
		Env: variables(c.Config.Env), Workdir: path.Clean("/" + c.Config.WorkingDir), User: c.Config.User,
		Labels: c.Config.Labels, Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Platform: platform,
		StopSignal: c.Config.StopSignal,
	}, Unused: c.Config.given()}
	if slices.Equal(c.Config.Entrypoint, words{""}) { // `ENTRYPOINT [""]` of a Dockerfile takes back that of the base
		out.Config.Entrypoint = nil
	}
	for _, id := range c.RootFS.DiffIDs {
		out.DiffIDs = append(out.DiffIDs, id.String())
	}
	return out, nil
}

// variables leaves out what sets none: docker ignores entries without "=", and runc refuses
// those without a name.
func variables(env []string) (kept []string) {
	for _, kv := range env {
		if strings.Index(kv, "=") > 0 {
			kept = append(kept, kv)
		}
	}
	return kept
}

var machineForm = regexp.MustCompile(`^[a-z0-9_.-]{1,32}$`)

// platformOf is empty for an image that runs here. For a Linux on another machine it says
// which, and refuses all else.
func platformOf(system, architecture, variant string) (string, error) {
	architecture = machine(architecture)
	switch {
	case (system == "" || system == "linux") && (architecture == "" || architecture == runtime.GOARCH):
		return "", nil
	case system != "" && system != "linux", !machineForm.MatchString(architecture), variant != "" && !machineForm.MatchString(variant):
		return "", errs.New(errs.Unsupported, "the image is for %.20q/%.20q, and this host is linux/%s", system, architecture,
			runtime.GOARCH)
	}
	return strings.TrimSuffix("linux/"+architecture+"/"+variant, "/"), nil
}

// machine is Go's name of an architecture, which images are to use, also for the kernel's.
func machine(architecture string) string {
	switch architecture {
	case "x86_64", "x86-64":
		return "amd64"
	case "aarch64":
		return "arm64"
	}
	return architecture
}
