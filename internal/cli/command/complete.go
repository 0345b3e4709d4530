package command

import (
	"context"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// CompletionLimit is how long a person may wait for the Tab key. Tests of what is
// completed wait for longer.
var CompletionLimit = 500 * time.Millisecond

// wanted are the states of the sandboxes that are offered to a command. A command
// that is not listed is offered all.
var wanted = map[string][]string{
	"exec":      {wire.Running},
	"shell":     {wire.Running},
	"attach":    {wire.Running},
	"cp":        {wire.Running},
	"pause":     {wire.Running},
	"hibernate": {wire.Running, wire.Paused},
	"stop":      {wire.Running, wire.Paused},
	"kill":      {wire.Running, wire.Paused},
	"start":     {wire.Terminated, wire.Failed},
	"resume":    {wire.Paused},
	"stats":     {wire.Running, wire.Paused},
	"top":       {wire.Running, wire.Paused},
}

// complete makes every command below cmd complete its arguments by the words of its
// usage line: SANDBOX, SNAPSHOT, SANDBOX|SNAPSHOT, VOLUME, IMAGE and, after SANDBOX, SECRET and BINDING are
// completed from what the daemon has, PATH and FILE by the shell, other words not at all. A new command needs no code
// for this.
func (p *Program) complete(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		p.complete(sub)
	}
	if words := arguments(cmd.Use); cmd.ValidArgsFunction == nil && cmd.ValidArgs == nil && cmd.Runnable() {
		cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
			return p.candidates(cmd, argument(words, len(args)), args, typed)
		}
	}
	for flag, kind := range map[string]string{
		"from": "SNAPSHOT", "image": "IMAGE", "from-image": "IMAGE", "policy": policyOrFile,
	} {
		if cmd.Flags().Lookup(flag) == nil {
			continue
		}
		_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return p.candidates(cmd, kind, nil, typed)
		})
	}
}

// policyOrFile is what --policy takes, except where it takes files only
// (MarkFlagFilename).
const policyOrFile = "POLICY|FILE"

// arguments lists the words that stand for arguments in a usage line, as SANDBOX or
// SANDBOX...; it reads the first of alternatives only.
func arguments(use string) (words []string) {
	use, _, _ = strings.Cut(use, " | ")
	use = flagsOf.ReplaceAllString(use, "")
	for _, w := range strings.Fields(use)[1:] {
		if w = strings.Trim(w, "[]"); w != "flags" && w != "--" {
			words = append(words, w)
		}
	}
	return words
}

// flagsOf finds the flags in a usage line, as "[-f]" and "[--image IMAGE]",
// and not "[--]" or "[-- COMMAND]".
var flagsOf = regexp.MustCompile(`\[--?[a-z][^\]]*\]`)

// argument is the word for the n-th argument, or "".
func argument(words []string, n int) string {
	if n < len(words) {
		return strings.TrimSuffix(words[n], "...")
	}
	if last := len(words) - 1; last >= 0 && strings.HasSuffix(words[last], "...") {
		return argument(words, last)
	}
	return ""
}

// candidates asks the daemon for what an argument may be. It is silent when
// that fails: an error would stand in the middle of what somebody types.
func (p *Program) candidates(cmd *cobra.Command, kind string, have []string, typed string) ([]string, cobra.ShellCompDirective) {
	const none = cobra.ShellCompDirectiveNoFileComp
	isPath := func(part string) bool { return strings.Contains(kind, part) }
	also := strings.HasPrefix(kind, "SANDBOX:") || kind == policyOrFile // a path, and something of the daemon's
	if !also && slices.ContainsFunc([]string{"PATH", "FILE", "DIR", "ARCHIVE"}, isPath) {
		return nil, cobra.ShellCompDirectiveDefault
	}
	cl, err := p.Client()
	if err != nil {
		return nil, none
	}
	ctx, cancel := context.WithTimeout(context.Background(), CompletionLimit)
	defer cancel()
	var all []string
	directive := none
	switch {
	case kind == "SANDBOX":
		all = sandboxNames(ctx, cl, wanted[cmd.Name()], "")
	case strings.HasPrefix(kind, "SANDBOX:"): // an argument of cp; a file of this host will do as well
		all, directive = sandboxNames(ctx, cl, wanted[cmd.Name()], ":"), cobra.ShellCompDirectiveNoSpace
	case kind == "SANDBOX|SNAPSHOT":
		all = append(sandboxNames(ctx, cl, wanted[cmd.Name()], ""), snapshotNames(ctx, cl)...)
	case kind == "SNAPSHOT":
		all = snapshotNames(ctx, cl)
	case kind == "VOLUME":
		all = volumeNames(ctx, cl)
	case kind == "POLICY":
		all = policyNames(ctx, cl)
	case kind == policyOrFile:
		all, directive = policyNames(ctx, cl), cobra.ShellCompDirectiveDefault
	case kind == "SECRET" && len(have) > 0:
		all = secretNames(ctx, cl, have[0])
	case kind == "BINDING" && len(have) > 0:
		all = bindingNames(ctx, cl, have[0])
	case kind == "IMAGE":
		all = imageNames(ctx, cl)
	}
	return slices.DeleteFunc(all, func(s string) bool {
		name, _, _ := strings.Cut(s, "\t")
		return !strings.HasPrefix(name, typed) || slices.Contains(have, name)
	}), directive
}

// sandboxNames lists names and IDs, each with suffix and a description.
func sandboxNames(ctx context.Context, cl *client.Client, states []string, suffix string) (out []string) {
	list, err := cl.List(ctx, client.Filter{States: states})
	if err != nil {
		return nil
	}
	for _, sb := range list {
		about := sb.Status.State
		if sb.Image != nil {
			about = sb.Image.URI + ", " + about
		}
		if name := NameOf(sb); name != "" {
			out = append(out, candidate(name+suffix, about))
			about = name + ", " + about
		}
		out = append(out, candidate(sb.ID+suffix, about))
	}
	return out
}

// snapshotNames lists names and IDs.
func snapshotNames(ctx context.Context, cl *client.Client) (out []string) {
	list, err := cl.Snapshots().List(ctx, "")
	if err != nil {
		return nil
	}
	for _, s := range list {
		about := "of " + s.SandboxID + ", " + s.Status.State
		if s.Name != "" {
			out = append(out, candidate(s.Name, about))
		}
		out = append(out, candidate(s.ID, about))
	}
	return out
}

func volumeNames(ctx context.Context, cl *client.Client) (out []string) {
	list, err := cl.Volumes().List(ctx)
	if err != nil {
		return nil
	}
	for _, v := range list {
		out = append(out, v.Name)
	}
	return out
}

func policyNames(ctx context.Context, cl *client.Client) (out []string) {
	list, err := cl.Policies().List(ctx)
	if err != nil {
		return nil
	}
	for _, p := range list {
		out = append(out, candidate(p.Name, "version "+strconv.Itoa(p.Version)+", "+errs.Count(p.Rules, "rule", "rules")))
	}
	return out
}

func secretNames(ctx context.Context, cl *client.Client, sandbox string) (out []string) {
	v, err := cl.Vault(sandbox).Get(ctx)
	if err != nil {
		return nil
	}
	for _, c := range v.Credentials {
		out = append(out, c.Name)
	}
	return out
}

func bindingNames(ctx context.Context, cl *client.Client, sandbox string) (out []string) {
	v, err := cl.Vault(sandbox).Get(ctx)
	if err != nil {
		return nil
	}
	for _, b := range v.Bindings {
		out = append(out, candidate(b.Name, strings.Join(b.Match.Hosts, ",")))
	}
	return out
}

func imageNames(ctx context.Context, cl *client.Client) (out []string) {
	list, err := cl.Images().List(ctx)
	if err != nil {
		return nil
	}
	for _, i := range list {
		name := i.Name
		if i.Tag != "latest" {
			name += ":" + i.Tag
		}
		out = append(out, candidate(name, text.Bytes(i.Bytes)))
	}
	return out
}

// candidate is a word and what the shell shows beside it.
func candidate(word, about string) string {
	return text.Printable(word) + "\t" + text.Printable(about)
}
