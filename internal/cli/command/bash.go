package command

import (
	"fmt"

	"github.com/spf13/cobra"
)

// bashWords replaces the function by which cobra's script for bash finds the words of the
// line: without the package bash-completion that one prints errors into the line. Here
// the words are split at blanks, and not at = and :, which names of images and paths in
// sandboxes have.
const bashWords = `
__%[1]s_init_completion()
{
    COMPREPLY=()
    if declare -F _get_comp_words_by_ref >/dev/null 2>&1; then
        _get_comp_words_by_ref "$@" cur prev words cword
        return
    fi
    local line=${COMP_LINE:0:COMP_POINT}
    read -ra words <<<"$line"
    if [[ $line == *[[:blank:]] ]]; then
        words+=("")
    fi
    cword=$((${#words[@]} - 1))
    cur=${words[cword]}
    prev=${words[cword > 0 ? cword - 1 : 0]}
}
`

// completeInBash makes `completion bash` print a script that works without the package
// bash-completion, too.
func completeInBash(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	cmd, _, err := root.Find([]string{"completion", "bash"})
	if err != nil || cmd.RunE == nil {
		return
	}
	cmd.Long = fmt.Sprintf(`Generate the autocompletion script for the bash shell. To load completions in the
present shell:

	source <(%[1]s completion bash)

To load them in every new shell, add that line to ~/.bashrc, or, where the package
bash-completion is installed:

	%[1]s completion bash >/etc/bash_completion.d/%[1]s
`, root.Name())
	script := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := script(cmd, args); err != nil {
			return err
		}
		_, err := fmt.Printf(bashWords, root.Name())
		return err
	}
}
