// Package words knows what docker's words are here. People type them by habit. A command of docker that has another
// name here is run by that name, and another one is answered by a sentence that says what to use. A flag of
// docker that asks for what is so in any case is taken.
//
// The tables are in table.go. `sandboxctl help docker` prints them.
package words

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Prepare adds to root, which has all commands, the flags that are taken, a help topic, and errors that know docker's
// flags.
func Prepare(root *cobra.Command) {
	for _, t := range taken {
		for _, name := range strings.Split(t.of, ", ") {
			cmd, _, err := root.Find(strings.Fields(name))
			if err != nil {
				panic(fmt.Sprintf("words: flag --%s is of %q: %v", t.name, name, err)) // a mistake in the table
			}
			if t.value != nil {
				cmd.Flags().Var(value(t.value), t.name, t.why)
			} else {
				cmd.Flags().BoolP(t.name, t.short, false, t.why)
			}
			_ = cmd.Flags().MarkHidden(t.name)
		}
	}
	root.AddCommand(&cobra.Command{
		Use: "docker", Short: "What docker's commands and flags are here", Long: text(),
		Example: "  sandboxctl docker",
	})
	before := root.FlagErrorFunc()
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
			if say := flagOf(cmd, unknown.GetSpecifiedName()); say != "" {
				return errs.New(errs.Invalid, "%s has no %s: %s", cmd.CommandPath(), dashed(unknown.GetSpecifiedName()), say)
			}
		}
		return before(cmd, err)
	})
}

// Line returns the arguments that do here what args do for docker: args itself, if they begin with no word of docker.
// The error says what to use instead.
func Line(args []string) ([]string, error) {
	start := global(args)
	if start == len(args) {
		return args, nil
	}
	head, rest := args[:start:start], args[start:]
	if rest[0] == "help" && len(rest) > 1 {
		head, rest = append(head, "help"), rest[1:]
	}
	for n := min(2, len(rest)); n > 0; n-- {
		typed := strings.Join(rest[:n], " ")
		i := slices.IndexFunc(commands, func(w word) bool { return w.docker == typed })
		switch {
		case i >= 0 && commands[i].here != "":
			return slices.Concat(head, strings.Fields(commands[i].here), rest[n:]), nil
		case i >= 0:
			return nil, errs.New(errs.Invalid, "sandboxctl has no %q: %s", typed, commands[i].say)
		}
	}
	if rest[0] == "container" && len(rest) > 1 {
		return Line(append(head, rest[1:]...))
	}
	return args, nil
}

// global returns how many of args are flags that stand before the command. What is no such flag is cobra's to refuse.
func global(args []string) int {
	i := 0
	for i < len(args) && strings.HasPrefix(args[i], "-") {
		switch {
		case args[i] == "-H" || args[i] == "--host":
			i++
		case !strings.HasPrefix(args[i], "-H") && !strings.HasPrefix(args[i], "--host="):
			return len(args)
		}
		i++
	}
	return min(i, len(args))
}

// flagOf returns what to use for a flag of docker that cmd has not; empty if docker has none either.
func flagOf(cmd *cobra.Command, name string) string {
	for _, f := range flags {
		if slices.Contains(strings.Split(f.names, ", "), name) && (f.of == "" || slices.Contains(strings.Split(f.of, ", "), below(cmd))) {
			return f.say
		}
	}
	return ""
}

// below is the path of a command without the program.
func below(cmd *cobra.Command) string {
	_, path, _ := strings.Cut(cmd.CommandPath(), " ")
	return path
}

func dashed(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// value is a flag that takes what its function has no error about.
type value func(s string) error

func (v value) Set(s string) error { return v(s) }
func (v value) String() string     { return "" }
func (v value) Type() string       { return "string" }

// platform takes the kind of machine that this program is for, which is that of a daemon on the same host.
func platform(s string) error {
	own := "linux/" + runtime.GOARCH
	if s != own && s != runtime.GOARCH && !strings.HasPrefix(s, own+"/") {
		return fmt.Errorf("a sandbox is of the kind of its host, here %s, and nothing translates programs of another one", own)
	}
	return nil
}

// kind takes the type of what inspect prints.
func kind(s string) error {
	if s != "container" {
		return fmt.Errorf("inspect prints sandboxes; for others: sandboxctl image inspect, volume inspect, snapshot inspect")
	}
	return nil
}

// text is the tables, for people.
func text() string {
	var b strings.Builder
	b.WriteString("Commands and flags of docker that are not here by the same words.\n\n")
	b.WriteString("These commands run:\n\n")
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "  container COMMAND\tsandboxctl COMMAND")
	for _, c := range commands {
		if c.here != "" {
			fmt.Fprintf(w, "  %s\tsandboxctl %s\n", c.docker, c.here)
		}
	}
	w.Flush() //nolint:errcheck // a strings.Builder has no errors
	b.WriteString("\nThese do not:\n")
	for _, c := range commands {
		if c.say != "" {
			fmt.Fprintf(&b, "\n  %s\n      %s\n", c.docker, c.say)
		}
	}
	b.WriteString("\nThese flags are taken and change nothing:\n\n")
	for _, t := range taken {
		fmt.Fprintf(w, "  %s --%s\t%s\n", t.of, t.name, t.why)
	}
	w.Flush() //nolint:errcheck // see above
	b.WriteString("\nThese flags are not:\n")
	for _, f := range flags {
		var names []string
		for _, name := range strings.Split(f.names, ", ") {
			names = append(names, dashed(name))
		}
		fmt.Fprintf(&b, "\n  %s\n      %s\n", strings.TrimSpace(f.of+" "+strings.Join(names, ", ")), f.say)
	}
	return strings.TrimRight(b.String(), "\n")
}
