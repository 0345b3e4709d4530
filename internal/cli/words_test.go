package cli

import (
	"regexp"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/cli/group"
	"github.com/sandboxd/sandboxd/internal/cli/words"
)

// habits are lines that people type by docker's habit. Each runs here ("runs"), or its error has want.
var habits = []struct{ line, want string }{
	{"login -u me", "[[registries]]"},
	{"logout", "[[registries]]"},
	{"push mine:1", "save IMAGE -o"},
	{"image push mine:1", "save IMAGE -o"},
	{"pull -q alpine", "runs"},
	{"pull -a alpine", "each tag by itself"},
	{"load -i x.tar", "runs"},
	{"save -o x.tar base", "runs"},
	{"import x.tar mine", "runs"},
	{"export -o x.tar lab", "cp NAME:/ -"},
	{"build -f Dockerfile .", "Dockerfile"},
	{"build -t mine:1 .", "Dockerfile"},
	{"image build -t mine:1 .", "Dockerfile"},
	{"buildx build .", "Dockerfile"},
	{"container ls -a", "runs"},
	{"container run base true", "runs"},
	{"container inspect lab", "runs"},
	{"container prune -f", "system prune"},
	{"compose -f x.yml up -d", "compose files"},
	{"history base", "image inspect"},
	{"search alpine", "no registry"},
	{"info", "runs"},
	{"run --entrypoint sh base -c true", "runs"},
	{"run python -c true", "put flags of sandboxctl run before it"},
	{"run -h lab base true", "runs"},
	{"run --init base true", "runs"},
	{"run --platform linux/s390x base true", "kind of its host"},
	{"run --privileged base", "no sandbox is privileged"},
	{"exec --privileged lab sh", "no sandbox is privileged"},
	{"run --net open base true", "runs"},
	{"run --cap-add ALL base", "--security"},
	{"run --gpus all base", "no device"},
	{"run --add-host a:192.0.2.1 base", "egress"},
	{"run --dns 192.0.2.1 base", "egress"},
	{"run --ulimit nofile=1024 base", "--pids"},
	{"run -P base", "endpoint"},
	{"run --pid host base", "namespaces"},
	{"run --stop-timeout 5 base", "stop -t"},
	{"run --cidfile x base", "print the id"},
	{"run --volumes-from lab base", "-v NAME"},
	{"run --memory-swap 1g base", "no swap"},
	{"run --no-healthcheck base", "--ready-cmd"},
	{"run -td base", "no terminal"},
	{"run -v", "flag needs an argument"},
	{"create base sh -c true", "-- sh …"},
	{"create --init base", "runs"},
	{"ps -l", "runs"},
	{"ps -n 5", "runs"},
	{"ps -s", "stats"},
	{"ps -a --filter status=exited", "runs"},
	{"top lab", "exec lab -- ps"},
	{"inspect --type container lab", "runs"},
	{"inspect --type image base", "image inspect"},
	{"rm -fv lab", "runs"},
	{"commit -m x lab mine:1", "no message"},
	{"images -a", "runs"},
	{"images --filter dangling=true", "-o json"},
	{"start -ai lab", "logs -f"},
	{"volume create --name v", "volume create NAME"},
	{"system df -v", "volume ls"},
	{"network ls", "--network none"},
	{"network create n", "--network none"},
	{"secret create s f", "secret set"},
	{"context use x", "-H"},
	{"--context x ps", "-H"},
	{"-D ps", "journalctl"},
	{"swarm init", "one host"},
	{"-H tcp://127.0.0.1:1 login", "[[registries]]"},
	{"help login", "[[registries]]"},
	{"prune", "`sandboxctl system prune`"},
	{"explain lab a", "`sandboxctl egress explain`"},
	{"egress prune", "`sandboxctl "},
	{"bogus --flag", `unknown command "bogus"`},
}

// TestHabits holds that no line that people know from docker is refused without a word on what to use, or misleads.
func TestHabits(t *testing.T) {
	for _, h := range habits {
		r := newDaemon(t).run(t, strings.Fields(h.line)...)
		refused := strings.Contains(r.errout, "has no") || strings.Contains(r.errout, "unknown") || strings.Contains(r.errout, "usage:")
		if h.want == "runs" && refused {
			t.Errorf("%s: exit %d: %s%s; want that it runs", h.line, r.code, r.out, r.errout)
		}
		if h.want != "runs" && (r.code == 0 || !strings.Contains(r.errout, h.want)) {
			t.Errorf("%s: exit %d: %s%s; want %s", h.line, r.code, r.out, r.errout, h.want)
		}
	}
}

var ours = regexp.MustCompile("sandboxctl((?: [a-z]+)+)")

// TestWords holds that the tables of docker's words are about this program: what they refuse is not here, and what they
// name is.
func TestWords(t *testing.T) {
	root := newRoot("unknown")
	group.Strict(root)
	help, _, err := root.Find([]string{"docker"})
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, m := range ours.FindAllStringSubmatch(help.Long, -1) {
		line, err := words.Line(strings.Fields(m[1]))
		if err != nil {
			t.Error(err)
			continue
		}
		cmd, rest, err := root.Find(line)
		if err != nil || cmd == root || cmd.HasSubCommands() && len(rest) > 0 {
			t.Errorf("the text names `sandboxctl%s`, which is no command", m[1])
		}
		named++
	}
	if named < 20 {
		t.Errorf("found %d commands in the text:\n%s", named, help.Long)
	}
	_, refused, _ := strings.Cut(help.Long, "These do not:\n")
	refused, flags, _ := strings.Cut(refused, "These flags are taken")
	for line := range strings.Lines(refused) {
		typed := strings.Fields(line)
		if strings.HasPrefix(line, "   ") || len(typed) == 0 {
			continue
		}
		if cmd, rest, _ := root.Find(typed); cmd != root && len(rest) == 0 {
			t.Errorf("%q is refused, and is a command here", typed)
		}
	}
	_, flags, _ = strings.Cut(flags, "These flags are not:\n")
	for line := range strings.Lines(flags) {
		at := strings.Index(line, "-")
		if strings.HasPrefix(line, "   ") || at < 0 {
			continue
		}
		for of := range strings.SplitSeq(strings.TrimSpace(line[:at]), ", ") {
			cmd, _, err := root.Find(strings.Fields(of))
			if err != nil || of != "" && cmd == root {
				t.Errorf("flags of %q, which is no command", of)
				continue
			}
			for name := range strings.SplitSeq(strings.TrimSpace(line[at:]), ", ") {
				bare := strings.TrimLeft(name, "-")
				if cmd.Flags().Lookup(bare) != nil || len(bare) == 1 && cmd.Flags().ShorthandLookup(bare) != nil {
					t.Errorf("%s is refused of %q, and is a flag there", name, of)
				}
			}
		}
	}
}
