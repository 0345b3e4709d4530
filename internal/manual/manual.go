// Package manual turns a tree of commands into man pages, and holds the rules for a
// command's texts. Only tests import it, so that no program contains the generator:
// `make man` runs the tests with MAN_DIR set.
package manual

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Test checks every command of root and writes its pages for this section of the manual
// to $MAN_DIR. Without MAN_DIR it writes them to a temporary directory, to check that
// they can be made.
func Test(t *testing.T, root *cobra.Command, section string) {
	t.Helper()
	check(t, root)
	dir := os.Getenv("MAN_DIR")
	if dir == "" {
		dir = t.TempDir()
	} else if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	root.DisableAutoGenTag = true
	if err := doc.GenManTree(root, &doc.GenManHeader{Section: section, Source: "sandboxd", Manual: "sandboxd"}, dir); err != nil {
		t.Fatal(err)
	}
	pages(t, root, dir, section)
}

// check holds that every command has a title of one line, and an example that begins
// with the command itself.
func check(t *testing.T, cmd *cobra.Command) {
	t.Helper()
	if cmd.Name() == "completion" || cmd.Name() == "help" || cmd.Hidden {
		return // cobra's own, whose long text has the examples
	}
	if cmd.Short == "" {
		t.Errorf("%s has no description: set Short", cmd.CommandPath())
	}
	if strings.HasSuffix(cmd.Short, ".") {
		t.Errorf("%s: Short is a title, without a full stop: %q", cmd.CommandPath(), cmd.Short)
	}
	if !strings.Contains(cmd.Example, cmd.CommandPath()) {
		t.Errorf("%s has no example: set Example, with lines such as \"  %s …\"", cmd.CommandPath(), cmd.CommandPath())
	}
	for line := range strings.Lines(cmd.Example) {
		if !strings.HasPrefix(line, "  ") {
			t.Errorf("%s: an example is indented by two spaces: %q", cmd.CommandPath(), line)
		}
		if len(strings.TrimRight(line, "\n")) > 100 {
			t.Errorf("%s: an example is longer than 100 characters: %q", cmd.CommandPath(), line)
		}
	}
	if cmd.Runnable() && cmd.HasSubCommands() && cmd != cmd.Root() {
		t.Errorf("%s runs and has subcommands: its arguments would be taken for subcommands", cmd.CommandPath())
	}
	for _, sub := range cmd.Commands() {
		check(t, sub)
	}
}

// pages holds that every command has a page, with its flags and examples.
func pages(t *testing.T, cmd *cobra.Command, dir, section string) {
	t.Helper()
	if !cmd.IsAvailableCommand() && cmd.HasParent() || cmd.IsAdditionalHelpTopicCommand() {
		return
	}
	name := strings.ReplaceAll(cmd.CommandPath(), " ", "-") + "." + section
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Errorf("%s has no page: %v", cmd.CommandPath(), err)
	}
	for _, want := range []string{".SH NAME", ".SH SYNOPSIS", ".SH EXAMPLE"} {
		if cmd.Example != "" && !strings.Contains(string(b), want) {
			t.Errorf("%s: no %q in the page", cmd.CommandPath(), want)
		}
	}
	for _, sub := range cmd.Commands() {
		pages(t, sub, dir, section)
	}
}

// Groups holds that every command of root that has subcommands succeeds when it is called
// alone, and fails after a name that is no subcommand. execute runs the whole program.
func Groups(t *testing.T, root *cobra.Command, execute func(args []string) error) {
	t.Helper()
	groups(t, root, nil, execute)
}

func groups(t *testing.T, cmd *cobra.Command, path []string, execute func(args []string) error) {
	t.Helper()
	if !cmd.HasSubCommands() {
		return
	}
	if err := execute(path); err != nil {
		t.Errorf("%s: %v", cmd.CommandPath(), err)
	}
	const none = "qqqqqqq"
	if err := execute(append(slices.Clone(path), none)); err == nil || !strings.Contains(err.Error(), none) {
		t.Errorf("%s %s: %v; want an error that names it", cmd.CommandPath(), none, err)
	}
	for _, sub := range cmd.Commands() {
		groups(t, sub, append(slices.Clone(path), sub.Name()), execute)
	}
}
