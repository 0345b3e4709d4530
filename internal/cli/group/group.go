// Package group makes a tree of commands strict about names. A command that has
// subcommands prints its help when it is called alone. An unknown subcommand is an error
// that names the likely ones. The programs sandboxctl and sandboxd both use it.
//
// What surprises: below the root, cobra by itself prints help after an unknown subcommand
// and succeeds. So a script with a typo would go on. And it reads flags first: of a command
// that does not exist it would say that its flags do not.
package group

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// Unknown is the error about a name that is no command.
type Unknown struct{ text string }

func (e *Unknown) Error() string { return e.text }

// Strict makes root, the commands below it, and cobra's own help and completion strict.
// Call it just before root is executed.
func Strict(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	strict(root)
	before := root.FlagErrorFunc()
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if args := cmd.Flags().Args(); cmd.HasSubCommands() && len(args) > 0 { // it stands before the flag
			return unknown(cmd, args[0])
		}
		return before(cmd, err)
	})
	print := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if cmd.HasSubCommands() {
			cmd.RunE = nil // else its usage would say that it can be run alone
		}
		print(cmd, args)
	})
	for _, cmd := range root.Commands() {
		if cmd.Name() == "help" {
			cmd.Run, cmd.RunE = nil, helpOn
		}
	}
}

func strict(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		strict(sub)
	}
	if !cmd.HasSubCommands() {
		return
	}
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		return unknown(cmd, args[0])
	}
}

// helpOn prints the help of the command that args name.
func helpOn(help *cobra.Command, args []string) error {
	cmd, rest, err := help.Root().Find(args)
	if err != nil {
		return err
	}
	if len(rest) > 0 {
		return unknown(cmd, rest[0])
	}
	cmd.InitDefaultHelpFlag() // so that it is shown
	return cmd.Help()
}

// unknown is the error that cmd has no subcommand of this name.
func unknown(cmd *cobra.Command, name string) error {
	like := elsewhere(cmd, name)
	if len(like) == 0 {
		cmd.SuggestionsMinimumDistance = 2 // as cobra has it for the root
		for _, near := range cmd.SuggestionsFor(name) {
			like = append(like, "`"+cmd.CommandPath()+" "+near+"`")
		}
	}
	hint := "see"
	if len(like) > 0 {
		hint = "did you mean " + strings.Join(like, " or ") + "? See"
	}
	return &Unknown{fmt.Sprintf("unknown command %q for %q; %s `%s --help`", name, cmd.CommandPath(), hint, cmd.CommandPath())}
}

// elsewhere lists the commands that have this very name, above or below cmd or beside it. Of very many it names none.
func elsewhere(cmd *cobra.Command, name string) (like []string) {
	var walk func(at *cobra.Command)
	walk = func(at *cobra.Command) {
		for _, sub := range at.Commands() {
			if sub.IsAvailableCommand() && (sub.Name() == name || sub.HasAlias(name)) {
				like = append(like, "`"+sub.CommandPath()+"`")
			}
			walk(sub)
		}
	}
	if walk(cmd); len(like) == 0 {
		walk(cmd.Root())
	}
	if len(like) > 3 {
		return nil
	}
	return like
}
