package cli

import (
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

var (
	// live are the states of what has not ended.
	live   = []string{client.Pending, client.Running, client.Pausing, client.Paused, client.Resuming, client.Stopping}
	states = append(slices.Clone(live), client.Terminated, client.Failed)
)

func newPs(c *cli) *cobra.Command {
	var (
		o       output
		all     bool
		filters []string
	)
	cmd := &cobra.Command{
		Use:     "ps",
		Aliases: []string{"ls"},
		Short:   "List sandboxes",
		Example: `  sandboxctl ps
  sandboxctl ps -a --filter state=Failed
  sandboxctl ps -q --filter label=team=a`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			f, names, err := parseFilters(filters)
			if err != nil {
				return err
			}
			if f.States == nil && !all {
				f.States = live
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			list, err := cl.List(cmd.Context(), f)
			if err != nil {
				return err
			}
			list = slices.DeleteFunc(list, func(sb client.Sandbox) bool {
				return len(names) > 0 && !slices.Contains(names, nameOf(sb)) && !slices.Contains(names, sb.ID)
			})
			return sandboxes(&o).show(os.Stdout, &o, list)
		},
	}
	o.flags(cmd, true)
	cmd.Flags().BoolVarP(&all, "all", "a", false, "those that have ended, too")
	cmd.Flags().StringArrayVarP(&filters, "filter", "f", nil, "state=Running, label=KEY=VALUE or name=NAME")
	cmd.Flags().BoolVar(&o.noTrunc, "no-trunc", false, "do not shorten columns")
	return cmd
}

func parseFilters(list []string) (f client.Filter, names []string, err error) {
	for _, s := range list {
		k, v, _ := strings.Cut(s, "=")
		switch k {
		case "state", "status":
			i := slices.IndexFunc(states, func(st string) bool { return strings.EqualFold(st, v) })
			if i < 0 {
				return f, nil, errs.New(errs.Invalid, "--filter %q: there is no such state; the states are %s", clip(s, 60), strings.Join(states, ", "))
			}
			f.States = append(f.States, states[i])
		case "name", "id":
			names = append(names, v)
		case "label":
			lk, lv, ok := strings.Cut(v, "=")
			if !ok {
				return f, nil, errs.New(errs.Invalid, "--filter %q: want label=KEY=VALUE", clip(s, 60))
			}
			if f.Metadata == nil {
				f.Metadata = map[string]string{}
			}
			f.Metadata[lk] = lv
		default:
			return f, nil, errs.New(errs.Invalid, "--filter %q: want state=…, label=KEY=VALUE or name=…", clip(s, 60))
		}
	}
	return f, names, nil
}

func nameOf(sb client.Sandbox) string {
	if sb.Sandboxd == nil {
		return ""
	}
	return sb.Sandboxd.Name
}

func sandboxes(o *output) listing[client.Sandbox] {
	return listing[client.Sandbox]{
		name:   func(sb client.Sandbox) string { return sb.ID },
		header: []string{"ID", "NAME", "IMAGE", "RUNTIME", "STATE", "ENTRYPOINT", "CREATED", "EXPIRES"},
		row: func(sb client.Sandbox) []string {
			row := []string{sb.ID, nameOf(sb), "", "", stateOf(sb), strings.Join(sb.Entrypoint, " "), ago(sb.CreatedAt), until(sb.ExpiresAt)}
			if sb.Image != nil {
				row[2] = sb.Image.URI
			}
			if sb.Sandboxd != nil {
				if sb.Image == nil {
					row[2] = sb.Sandboxd.ImageName // it was made from a snapshot
				}
				row[3] = sb.Sandboxd.Runtime
			}
			if !o.noTrunc {
				row[5] = clip(row[5], 24)
			}
			return row
		},
	}
}
