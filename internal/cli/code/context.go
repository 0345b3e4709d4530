package code

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newCode(p *command.Program) *cobra.Command {
	contexts := &cobra.Command{
		Use:   "context",
		Short: "Create, list and remove interpreters",
		Example: `  ctx=$(sandboxctl code context create -l python lab)
  sandboxctl eval --context $ctx lab 'x = 1'
  sandboxctl code context rm lab $ctx`,
	}
	contexts.AddCommand(newContextCreate(p), newContextLs(p), newContextRm(p))
	cmd := &cobra.Command{
		Use:     "code",
		Short:   "Manage the interpreters in which eval runs code",
		Example: `  sandboxctl code context ls lab`,
	}
	cmd.AddCommand(contexts)
	return cmd
}

func newContextCreate(p *command.Program) *cobra.Command {
	var (
		o             command.Output
		language, dir string
	)
	cmd := &cobra.Command{
		Use:   "create [flags] SANDBOX",
		Short: "Start an interpreter and print its id",
		Example: `  sandboxctl code context create -l python lab
  sandboxctl code context create -l bash -w /tmp lab`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			cc, err := cl.Interpreters(args[0]).Create(ctx, language, dir)
			if err != nil {
				return err
			}
			return o.One(cc, cc.ID)
		}),
	}
	o.Flags(cmd, false)
	languageFlag(cmd, &language, "python", "python, javascript, typescript, java, go or bash")
	cmd.Flags().StringVarP(&dir, "workdir", "w", "", "directory to start in (default: the image's)")
	return cmd
}

func newContextLs(p *command.Program) *cobra.Command {
	var (
		o        command.Output
		language string
	)
	cmd := &cobra.Command{
		Use:     "ls [flags] SANDBOX",
		Aliases: []string{"list"},
		Short:   "List running interpreters",
		Example: `  sandboxctl code context ls lab
  sandboxctl code context ls -l python -o json lab`,
		Args: cobra.ExactArgs(1),
		RunE: contexts.Of(p, &o, func(ctx context.Context, cl *client.Client, args []string) ([]agent.CodeContext, error) {
			if language != "" && !slices.Contains(agent.CodeLanguages, language) {
				return nil, errs.New(errs.Invalid, "--language %q: there is no such language; the languages are %s",
					text.Clip(language, 40), strings.Join(agent.CodeLanguages, ", "))
			}
			return cl.Interpreters(args[0]).List(ctx, language)
		}),
	}
	o.Flags(cmd, true)
	languageFlag(cmd, &language, "", "list only interpreters of this language")
	return cmd
}

var contexts = command.Listing[agent.CodeContext]{
	Name:   func(cc agent.CodeContext) string { return cc.ID },
	Header: []string{"CONTEXT", "LANGUAGE", "STARTED IN"},
	Row:    func(cc agent.CodeContext) []string { return []string{cc.ID, cc.Language, cc.Cwd} },
}

func newContextRm(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "rm SANDBOX CONTEXT...",
		Short:   "End interpreters and the code that runs in them",
		Example: `  sandboxctl code context rm lab $ctx`,
		Args:    cobra.MinimumNArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			return command.Each(args[1:], func(id string) error { return cl.Interpreters(args[0]).Remove(ctx, id) })
		}),
	}
}
