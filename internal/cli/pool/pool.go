// Package pool has the commands for pools of sandboxes that are kept ready. The flag that
// takes a member of one is that of run and create, in package sandbox.
package pool

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command { return []*cobra.Command{newPool(p)} }

func newPool(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "pool",
		Aliases: []string{"pools"},
		Short:   "Keep sandboxes ready before somebody asks for them",
		Long: `Keep sandboxes ready before somebody asks for them.

A member of a pool is a sandbox that runs already, with an agent that idles. A create with
--pool NAME takes one: name, environment, command, network policy and most limits are bound
then. What a member cannot take makes the create cold; a note, and sandboxctl inspect, say
why. Pools of the daemon's configuration are changed there.`,
		Example: `  sandboxctl pool create py --image python --min 2 --max 4 --limit 20
  sandboxctl run --pool py python -- python3 -c 'print(6*7)'
  sandboxctl pool ls`,
	}
	cmd.AddCommand(newCreate(p), newLs(p), newInspect(p), newRm(p))
	return cmd
}

func newCreate(p *command.Program) *cobra.Command {
	var (
		o                               command.Output
		image, runtime, security        string
		memory, cpu, warm, ready        string
		prestart                        []string
		least, most, leastAll, limitAll int
		maxAge                          time.Duration
	)
	cmd := &cobra.Command{
		Use:   "create [flags] NAME",
		Short: "Make a pool and print its name",
		Long: `Make a pool and print its name. Its members are made afterwards, while no sandbox comes up.

With fewer than --min ready members the daemon makes more, until there are --max. Ready
members and sandboxes of the pool are at most --limit together.`,
		Example: `  sandboxctl pool create py --image python --min 2 --max 4 --limit 20
  sandboxctl pool create data --image python --runtime runc --warm 'python3 -c "import json"'
  sandboxctl pool create web --image app --warm 'serve >/dev/null 2>&1 &' --ready 'test -e /up'`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			t := wire.PoolTemplate{Image: &wire.Image{URI: image}, ResourceLimits: map[string]string{}, Extensions: map[string]string{}}
			for k, v := range map[string]string{"memory": memory, "cpu": cpu} {
				if v != "" {
					t.ResourceLimits[k] = v
				}
			}
			for k, v := range map[string]string{
				wire.ExtRuntime: runtime, wire.ExtSecurity: security, wire.ExtPrestart: strings.Join(prestart, ","), wire.ExtPoolWarm: warm,
				wire.ExtPoolReady: ready,
			} {
				if v != "" {
					t.Extensions[k] = v
				}
			}
			if maxAge > 0 {
				t.Extensions[wire.ExtPoolMaxAge] = maxAge.String()
			}
			b, err := json.Marshal(t)
			if err != nil {
				return err
			}
			made, err := cl.System().Pools().Create(ctx, wire.PoolRequest{Name: args[0], Template: b, CapacitySpec: &wire.PoolCapacity{
				BufferMin: least, BufferMax: most, PoolMin: leastAll, PoolMax: limitAll,
			}})
			if err != nil {
				return err
			}
			return o.One(made, made.Name)
		}),
	}
	o.Flags(cmd, true)
	f := cmd.Flags()
	f.StringVar(&image, "image", "", "image of the members")
	cmd.MarkFlagRequired("image") //nolint:errcheck // the flag is there
	f.StringVar(&runtime, "runtime", "", "runtime: runsc (gVisor) or runc (default: that of the daemon)")
	command.Choices(cmd, "runtime", "runsc", "runc")
	f.StringVar(&security, "security", "", "level of security: strict, default or compat (default: that of the daemon)")
	command.Choices(cmd, "security", "strict", "default", "compat")
	f.StringVar(&memory, "memory", "", "memory limit, such as 256Mi (default: that of the daemon)")
	f.StringVar(&cpu, "cpu", "", "CPU limit, such as 500m or 2 (default: that of the daemon)")
	f.StringSliceVar(&prestart, "prestart", nil, "languages whose code contexts run already, such as python")
	f.StringVar(&warm, "warm", "", "command for the shell that each member runs once; a member in which it fails is not kept")
	f.StringVar(&ready, "ready", "", "command for the shell that is then tried in each member until it succeeds, for a minute at most")
	command.DurationFlag(f, &maxAge, "max-age", "", 0, "release members that nobody took for so long, such as 1h (default: never)")
	f.IntVar(&least, "min", 1, "ready members below which more are made")
	f.IntVar(&most, "max", 2, "ready members until which they are made")
	f.IntVar(&leastAll, "least", 0, "members and sandboxes of the pool below which members are made")
	f.IntVar(&limitAll, "limit", 10, "members and sandboxes of the pool together")
	return cmd
}

func newLs(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List pools",
		Example: `  sandboxctl pool ls
  sandboxctl pool ls -o json`,
		Args: cobra.NoArgs,
		RunE: pools.Of(p, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]wire.Pool, error) {
			return cl.System().Pools().List(ctx)
		}),
	}
	o.Flags(cmd, true)
	return cmd
}

// pools is how pools are listed.
var pools = command.Listing[wire.Pool]{
	Name:   func(p wire.Pool) string { return p.Name },
	Header: []string{"NAME", "READY", "SANDBOXES", "LIMIT", "HITS", "MISSES", "REFUSED", "SOURCE", "CREATED"},
	Row: func(p wire.Pool) []string {
		count := func(n uint64) string { return strconv.FormatUint(n, 10) }
		return []string{
			p.Name, fmt.Sprintf("%d of %d", p.Status.Available, p.CapacitySpec.BufferMax), strconv.Itoa(p.Status.Allocated),
			strconv.Itoa(p.CapacitySpec.PoolMax), count(p.Status.Hits), count(p.Status.Misses), count(p.Status.Refused), p.Source,
			text.Ago(p.CreatedAt),
		}
	},
}

func newInspect(p *command.Program) *cobra.Command {
	return command.Inspect(p, &cobra.Command{
		Use:     "inspect POOL...",
		Short:   "Print detailed information on pools, as JSON",
		Example: `  sandboxctl pool inspect py`,
	}, nil, func(ctx context.Context, cl *client.Client, name string) (wire.Pool, error) {
		return cl.System().Pools().Get(ctx, name)
	})
}

func newRm(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:   "rm POOL...",
		Short: "Remove pools; their sandboxes stay",
		Long: `Remove pools, and print their names. Members that nobody took are released; sandboxes
that took one stay.`,
		Example: `  sandboxctl pool rm py`,
	}, func(ctx context.Context, cl *client.Client, name string) error {
		return cl.System().Pools().Remove(ctx, name)
	})
}
