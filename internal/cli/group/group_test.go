package group_test

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/group"
)

func tree() *cobra.Command {
	done := func(*cobra.Command, []string) error { return nil }
	root := &cobra.Command{Use: "prog", Short: "Do things", SilenceErrors: true, SilenceUsage: true}
	image := &cobra.Command{Use: "image", Short: "Images"}
	image.AddCommand(&cobra.Command{Use: "build NAME", RunE: done}, &cobra.Command{Use: "ls", RunE: done})
	deep := &cobra.Command{Use: "deep", Short: "Deeper"}
	deep.AddCommand(&cobra.Command{Use: "list", RunE: done})
	image.AddCommand(deep)
	root.AddCommand(image, &cobra.Command{Use: "run [ARG...]", RunE: done})
	root.PersistentFlags().String("host", "", "")
	return root
}

func execute(args ...string) (out string, err error) {
	root := tree()
	var b strings.Builder
	root.SetOut(&b)
	root.SetErr(io.Discard)
	root.SetArgs(args)
	group.Strict(root)
	err = root.Execute()
	return b.String(), err
}

func TestStrict(t *testing.T) {
	for _, c := range []struct {
		args string
		want string // in the error; "": none
	}{
		{"", ""},
		{"image", ""},
		{"image --host x", ""},
		{"image deep", ""},
		{"help image", ""},
		{"image --help", ""},
		{"image build", ""},
		{"run bild", ""},
		{"imgae", "unknown command \"imgae\" for \"prog\"; did you mean `prog image`? See `prog --help`"},
		{"image bild", "unknown command \"bild\" for \"prog image\"; did you mean `prog image build`? See `prog image --help`"},
		{"image --host x bild", "did you mean `prog image build`?"},
		{"image zzzzzz", "unknown command \"zzzzzz\" for \"prog image\"; see `prog image --help`"},
		{"image deep lst", "did you mean `prog image deep list`?"},
		{"help image bild", "did you mean `prog image build`?"},
		{"help imgae", "did you mean `prog image`?"},
		{"completion bsh", "did you mean `prog completion bash`"},
		{"imgae -x", "did you mean `prog image`?"},
		{"--host x imgae --yy z", "did you mean `prog image`?"},
		{"image bild -t x", "did you mean `prog image build`?"},
		{"-x imgae", "unknown shorthand flag: 'x'"},
		{"run -x", "unknown shorthand flag: 'x'"},
		{"list", "unknown command \"list\" for \"prog\"; did you mean `prog image deep list`? See `prog --help`"},
		{"build", "did you mean `prog image build`?"},
		{"image run", "did you mean `prog run`?"},
		{"rum", "did you mean `prog run`?"},
	} {
		out, err := execute(strings.Fields(c.args)...)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.args, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) ||
			strings.Contains(c.want, "flag") == errors.As(err, new(*group.Unknown))):
			t.Errorf("%s: %v, want %s", c.args, err, c.want)
		case c.want != "" && out != "":
			t.Errorf("%s prints %q beside its error", c.args, out)
		}
	}
}

// TestHelpStays: the help of a group is what it is without Strict.
func TestHelpStays(t *testing.T) {
	var want strings.Builder
	plain := tree()
	plain.SetOut(&want)
	plain.SetArgs([]string{"image", "--help"})
	if err := plain.Execute(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, args := range []string{"image", "image --help", "help image"} {
		out, err := execute(strings.Fields(args)...)
		if err != nil {
			t.Errorf("%s: %v", args, err)
		}
		got = append(got, out)
	}
	if i := slices.IndexFunc(got, func(s string) bool { return s != want.String() }); i >= 0 {
		t.Errorf("help says\n%s\nwant\n%s", got[i], want.String())
	}
}
