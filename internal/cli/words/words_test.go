package words

import (
	"runtime"
	"slices"
	"strings"
	"testing"
)

func TestLine(t *testing.T) {
	for _, c := range []struct {
		typed string
		want  string // the line that runs, or what stands in the error behind a "!"
	}{
		{"", ""},
		{"ps -a", "ps -a"},
		{"-H tcp://h:1", "-H tcp://h:1"},
		{"-H", "-H"},
		{"--version", "--version"},
		{"pull -q alpine", "image pull -q alpine"},
		{"-H tcp://h:1 load -i x.tar", "-H tcp://h:1 image load -i x.tar"},
		{"--host=tcp://h:1 info", "--host=tcp://h:1 system info"},
		{"-Htcp://h:1 container ls -a", "-Htcp://h:1 ps -a"},
		{"container rm -f lab", "rm -f lab"},
		{"container pull lab", "image pull lab"},
		{"container", "container"},
		{"container -x", "-x"},
		{"help save", "help image save"},
		{"help", "help"},
		{"run base pull x", "run base pull x"},
		{"exec lab login", "exec lab login"},
		{"-x pull", "-x pull"},
		{"container prune -f", "!system prune"},
		{"login -u me", "![[registries]]"},
		{"help compose", "!compose files"},
		{"network ls", "!--network none"},
		{"network", "network"},
		{"image push x", "!save IMAGE -o"},
		{"image ls", "image ls"},
	} {
		args := strings.Fields(c.typed)
		before := slices.Clone(args)
		got, err := Line(args)
		want, refused := strings.CutPrefix(c.want, "!")
		switch {
		case !slices.Equal(args, before):
			t.Errorf("%q was changed to %q", before, args)
		case refused && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%q: %v, want %s", c.typed, err, want)
		case !refused && (err != nil || strings.Join(got, " ") != want):
			t.Errorf("%q is %q, %v; want %q", c.typed, got, err, want)
		}
	}
}

func TestPlatform(t *testing.T) {
	for s, ok := range map[string]bool{
		"linux/" + runtime.GOARCH: true, runtime.GOARCH: true, "linux/" + runtime.GOARCH + "/v8": true,
		"linux/" + runtime.GOARCH + "x": false, "linux/s390x": false, "windows/" + runtime.GOARCH: false, "": false,
	} {
		if err := platform(s); (err == nil) != ok {
			t.Errorf("%q: %v", s, err)
		}
	}
}
