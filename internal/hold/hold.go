//go:build hold

// Package hold keeps go.mod whole while the tree grows.
package hold

import (
	_ "github.com/bmatcuk/doublestar/v4"
	_ "github.com/containerd/cgroups/v3"
	_ "github.com/containerd/cgroups/v3/cgroup1"
	_ "github.com/containerd/cgroups/v3/cgroup2"
	_ "github.com/coreos/go-iptables/iptables"
	_ "github.com/docker/go-units"
	_ "github.com/getkin/kin-openapi/openapi3"
	_ "github.com/getkin/kin-openapi/openapi3filter"
	_ "github.com/getkin/kin-openapi/routers/gorillamux"
	_ "github.com/miekg/dns"
	_ "github.com/opencontainers/cgroups"
	_ "github.com/opencontainers/cgroups/manager"
	_ "github.com/opencontainers/runc/libcontainer"
	_ "github.com/opencontainers/runc/libcontainer/specconv"
	_ "github.com/opencontainers/runtime-spec/specs-go"
	_ "github.com/pelletier/go-toml/v2"
	_ "github.com/spf13/cobra"
	_ "github.com/spf13/cobra/doc"
	_ "github.com/vishvananda/netlink"
	_ "github.com/vishvananda/netns"
	_ "go.etcd.io/bbolt"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sys/unix"
	_ "golang.org/x/term"
)
