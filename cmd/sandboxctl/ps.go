package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// live are the states of what has not ended.
var live = []string{client.Pending, client.Running, client.Pausing, client.Paused, client.Resuming, client.Stopping}

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
		Args:    cobra.NoArgs,
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
			return o.sandboxes(list)
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
			f.States = append(f.States, v)
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

func (o *output) sandboxes(list []client.Sandbox) error {
	switch o.format {
	case "json":
		if list == nil {
			list = []client.Sandbox{}
		}
		return printJSON(os.Stdout, list)
	case "name":
		for _, sb := range list {
			fmt.Println(printable(sb.ID, false))
		}
		return nil
	}
	rows := make([][]string, 0, len(list))
	for _, sb := range list {
		row := []string{sb.ID, nameOf(sb), "", "", sb.Status.State, strings.Join(sb.Entrypoint, " "), ago(sb.CreatedAt), until(sb.ExpiresAt)}
		if sb.Image != nil {
			row[2] = sb.Image.URI
		}
		if sb.Sandboxd != nil {
			row[3] = sb.Sandboxd.Runtime
		}
		if st := sb.Status; st.State == client.Failed || st.State == client.Terminated {
			row[4] = fmt.Sprintf("%s (%s)", st.State, st.Reason)
		}
		if !o.noTrunc {
			row[5] = clip(row[5], 24)
		}
		rows = append(rows, row)
	}
	return table(os.Stdout, []string{"ID", "NAME", "IMAGE", "RUNTIME", "STATE", "ENTRYPOINT", "CREATED", "EXPIRES"}, rows)
}
