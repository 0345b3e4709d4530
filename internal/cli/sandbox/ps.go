package sandbox

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

var (
	// live are the states of sandboxes that have not ended.
	live = []string{
		wire.Pending, wire.Running, wire.Pausing, wire.Paused, wire.Resuming, wire.Stopping,
	}
	states = append(slices.Clone(live), wire.Terminated, wire.Failed)

	// dockerStates are docker's words for states that have other names here.
	dockerStates = map[string][]string{
		"created": {wire.Pending}, "restarting": {wire.Pending}, "removing": {wire.Stopping},
		"exited": {wire.Terminated, wire.Failed}, "dead": {wire.Failed},
	}
)

func newPs(p *command.Program) *cobra.Command {
	var (
		o       command.Output
		all     bool
		filters []string
		last    int
		latest  bool
	)
	cmd := &cobra.Command{
		Use:     "ps",
		Aliases: []string{"ls"},
		Short:   "List sandboxes",
		Example: `  sandboxctl ps
  sandboxctl ps -a --filter state=Failed
  sandboxctl ps -q --filter label=team=a
  sandboxctl ps --format 'table {{.ID}}\t{{.Names}}\t{{.Status}}'`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			f, names, err := parseFilters(filters)
			if err != nil {
				return err
			}
			if latest {
				last = 1
			}
			if f.States == nil && !all && last == 0 {
				f.States = live
			}
			list, err := cl.List(ctx, f)
			if err != nil {
				return err
			}
			list = slices.DeleteFunc(list, func(sb wire.Sandbox) bool {
				return len(names) > 0 && !slices.Contains(names, command.NameOf(sb)) && !slices.Contains(names, sb.ID)
			})
			if last > 0 {
				slices.SortStableFunc(list, func(a, b wire.Sandbox) int { return b.CreatedAt.Compare(a.CreatedAt) })
				list = list[:min(last, len(list))]
			}
			return sandboxes(&o).Show(os.Stdout, &o, list)
		}),
	}
	o.Flags(cmd, true)
	sandboxes(&o).FormatFlag(cmd, &o)
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also list sandboxes that have ended")
	cmd.Flags().StringArrayVarP(&filters, "filter", "f", nil, "list only sandboxes with state=Running, label=KEY=VALUE or name=NAME")
	cmd.Flags().BoolVar(&o.Full, "no-trunc", false, "do not truncate columns")
	cmd.Flags().IntVarP(&last, "last", "n", 0, "list only the N sandboxes that were created last, in any state")
	cmd.Flags().BoolVarP(&latest, "latest", "l", false, "the same as -n 1")
	return cmd
}

// parseFilters reads the values of --filter. The API has no filter by name, so
// names are returned by themselves.
func parseFilters(list []string) (f client.Filter, names []string, err error) {
	for _, s := range list {
		k, v, _ := strings.Cut(s, "=")
		switch k {
		case "state", "status":
			i := slices.IndexFunc(states, func(st string) bool { return strings.EqualFold(st, v) })
			known := dockerStates[strings.ToLower(v)]
			if i >= 0 {
				known = states[i : i+1]
			}
			if known == nil {
				return f, nil, errs.New(errs.Invalid, "--filter %q: there is no such state; the states are %s",
					text.Clip(s, 60), strings.Join(states, ", "))
			}
			f.States = append(f.States, known...)
		case "name", "id":
			names = append(names, v)
		case "label":
			lk, lv, ok := strings.Cut(v, "=")
			if !ok {
				return f, nil, errs.New(errs.Invalid, "--filter %q: want label=KEY=VALUE", text.Clip(s, 60))
			}
			if f.Metadata == nil {
				f.Metadata = map[string]string{}
			}
			f.Metadata[lk] = lv
		default:
			return f, nil, errs.New(errs.Invalid, "--filter %q: want state=…, label=KEY=VALUE or name=…", text.Clip(s, 60))
		}
	}
	return f, names, nil
}

// sandboxes is how sandboxes are listed.
func sandboxes(o *command.Output) command.Listing[wire.Sandbox] {
	return command.Listing[wire.Sandbox]{
		Name:   func(sb wire.Sandbox) string { return sb.ID },
		Header: []string{"ID", "NAME", "IMAGE", "RUNTIME", "STATE", "ENTRYPOINT", "CREATED", "EXPIRES"},
		Drop:   []string{"ENTRYPOINT", "RUNTIME", "EXPIRES", "CREATED", "IMAGE"},
		State:  func(sb wire.Sandbox) string { return sb.Status.State },
		Row: func(sb wire.Sandbox) []string {
			row := []string{
				sb.ID, command.NameOf(sb), imageOf(sb), "", stateOf(sb), strings.Join(sb.Entrypoint, " "),
				text.Ago(sb.CreatedAt), text.Until(sb.ExpiresAt),
			}
			if sb.Sandboxd != nil {
				row[3] = sb.Sandboxd.Runtime
			}
			if !o.Full {
				row[5] = text.Clip(row[5], 24)
			}
			return row
		},
		Docker: func(sb wire.Sandbox) command.Fields {
			line := strings.Join(sb.Entrypoint, " ")
			if !o.Full {
				line = text.Clip(line, 20)
			}
			f := command.Fields{
				"ID": sb.ID, "Names": command.NameOf(sb), "Image": imageOf(sb), "Command": strconv.Quote(line), "State": dockerState(sb),
				"Status": stateOf(sb), "CreatedAt": sb.CreatedAt.Local().Format(time.RFC3339), "RunningFor": text.Ago(sb.CreatedAt),
				"Labels": labels(sb.Metadata), "Ports": "", "Networks": "", "Runtime": "", "Expires": text.Until(sb.ExpiresAt),
			}
			if info := sb.Sandboxd; info != nil {
				var ports []string
				for _, p := range info.Ports {
					ports = append(ports, fmt.Sprintf("%s:%d->%d/%s", p.HostIP, p.HostPort, p.Port, p.Protocol))
				}
				f["Ports"], f["Networks"], f["Runtime"] = strings.Join(ports, ", "), info.Network, info.Runtime
			}
			return f
		},
	}
}

// imageOf is the image of a sandbox as its client wrote it, or the one below the
// snapshot that it was made from.
func imageOf(sb wire.Sandbox) string {
	switch {
	case sb.Image != nil:
		return sb.Image.URI
	case sb.Sandboxd != nil:
		return sb.Sandboxd.ImageName
	}
	return ""
}

// labels are those of a sandbox, as docker ps prints them.
func labels(m map[string]string) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		all = append(all, k+"="+m[k])
	}
	return strings.Join(all, ",")
}
