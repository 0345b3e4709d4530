package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/pkg/oci"
)

// A fewer takes filters of system calls from a sandbox on runc.
type fewer struct {
	without string // for people
	change  func(*specs.Spec)
	over    float64 // how many ms a start may take longer than without them
	ratio   float64 // how many times longer a system call may take
}

// fewers are the baselines of the second filter alone, and of both.
var fewers = []fewer{
	{"the same with the first filter alone", onlyFirst, 1, 1.01},
	{"the same without a filter", func(s *specs.Spec) { onlyFirst(s); s.Linux.Seccomp = nil }, 2, 1.02},
}

// onlyFirst tells the agent to install no second filter.
func onlyFirst(s *specs.Spec) {
	s.Process.Env = append(slices.DeleteFunc(s.Process.Env, func(v string) bool {
		return strings.HasPrefix(v, seccomp.Variable+"=")
	}), seccomp.Variable+"="+string(seccomp.Compat))
}

// securityStart: a start on runc with both filters, against one with fewer.
func securityStart(ctx context.Context, b *bench) error {
	if !slices.Contains(runtimes, oci.Runc) {
		return nil
	}
	timed := func(changes ...func(*specs.Spec)) func() (float64, error) {
		return func() (float64, error) {
			x, err := b.bare.prepare(ctx, oci.Runc, changes...)
			if err != nil {
				return 0, err
			}
			start := time.Now()
			err = x.start(ctx)
			took := ms(time.Since(start))
			return took, errors.Join(err, x.drop(ctx))
		}
	}
	for _, f := range fewers {
		a, c, err := turns(b.times(60, 4), 2, timed(), timed(f.change))
		if err != nil {
			return err
		}
		b.add(row("security_start_cost", oci.Runc, "ms", a, f.without, c, goal{maxOver: f.over}))
	}
	return nil
}

// securityCalls: system calls on runc with both filters, against fewer. The guest makes
// each call many times and takes the median of some batches.
func securityCalls(ctx context.Context, b *bench) (err error) {
	if !slices.Contains(runtimes, oci.Runc) {
		return nil
	}
	all, end, err := b.caller(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	for _, f := range fewers {
		few, end, err := b.caller(ctx, f.change)
		if err != nil {
			return err
		}
		for _, call := range []string{"getpid", "read", "open", "connect"} {
			ours, theirs := func() (float64, error) { return all(call) }, func() (float64, error) { return few(call) }
			a, c, err := turns(b.times(15, 2), 1, ours, theirs)
			if err != nil {
				return errors.Join(err, end())
			}
			b.add(row("security_syscall_cost_"+call, oci.Runc, "ns", a, f.without, c, goal{maxRatio: f.ratio}))
		}
		if err := end(); err != nil {
			return err
		}
	}
	return nil
}

// caller starts a box on runc. timed returns how many ns a system call takes there.
func (b *bench) caller(ctx context.Context, changes ...func(*specs.Spec)) (timed func(call string) (float64, error),
	end func() error, err error,
) {
	x, err := b.bare.prepare(ctx, oci.Runc, append(changes, func(s *specs.Spec) {
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: "/guest", Type: "bind", Source: filepath.Join(b.root, "build", "bench-guest"), Options: []string{"bind", "ro"},
		})
	})...)
	if err != nil {
		return nil, nil, err
	}
	end = func() error { return x.drop(ctx) }
	if err := x.start(ctx); err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return func(call string) (ns float64, err error) {
		var out bytes.Buffer
		if _, err := askFor(ctx, x.agent, &out, "/guest", "time", call); err != nil {
			return 0, err
		}
		if err := json.Unmarshal(out.Bytes(), &ns); err != nil {
			return 0, fmt.Errorf("guest time %s printed %q: %w", call, out.String(), err)
		}
		return ns, nil
	}, end, nil
}
