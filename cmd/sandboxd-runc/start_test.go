package main

import (
	"testing"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/oci"
)

// TestConvert: the user namespace is joined by its path, and its mappings come from the
// spec. Nothing is read from the namespace, which here does not exist.
func TestConvert(t *testing.T) {
	const path, base = "/nowhere/user", 2_000_000
	spec := oci.NewSpec(oci.Runc, oci.Config{ID: "rabcdefghijk", RootFS: t.TempDir(), UserNS: path, UIDBase: base})
	spec.Linux.Seccomp = nil // which depends on the build's tags
	config, err := convert("rabcdefghijk", spec)
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Namespaces.PathOf(configs.NEWUSER); got != path {
		t.Errorf("the user namespace to join is %q, want %q", got, path)
	}
	want := configs.IDMap{ContainerID: 0, HostID: base, Size: instance.UsersPerSlot}
	for what, got := range map[string][]configs.IDMap{"uid": config.UIDMappings, "gid": config.GIDMappings} {
		if len(got) != 1 || got[0] != want {
			t.Errorf("the %s mappings are %v, want %v alone", what, got, want)
		}
	}
}

// TestConvertWithoutMappings: a spec without mappings, which an older daemon has written,
// is read as libcontainer reads it: from the namespace.
func TestConvertWithoutMappings(t *testing.T) {
	spec := oci.NewSpec(oci.Runc, oci.Config{ID: "rabcdefghijk", RootFS: t.TempDir()})
	spec.Linux.Seccomp = nil
	spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace, Path: "/nowhere/user"})
	if _, err := convert("rabcdefghijk", spec); err == nil {
		t.Error("the mappings of a namespace that does not exist were found")
	}
}
