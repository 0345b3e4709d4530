package cli

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestVerbs: docker's words print what docker's print, and ask the daemon for what they
// say.
func TestVerbs(t *testing.T) {
	zero, three := 0, 3
	const rmi = "Untagged: python:latest\nDeleted: sha256:1\nDeleted: sha256:2\n"
	for args, c := range map[string]struct {
		state  wire.Status
		code   *int
		idle   bool
		want   result
		asked  []string
		signal string
	}{
		"kill lab":                 {want: result{out: "lab\n"}, asked: []string{"POST /sandboxes/lab/stop"}},
		"kill -s 9 lab":            {want: result{out: "lab\n"}, asked: []string{"POST /sandboxes/lab/stop"}},
		"kill -s HUP lab":          {want: result{out: "lab\n"}, signal: "SIGHUP"},
		"kill -s 10 lab":           {want: result{out: "lab\n"}, signal: "SIGUSR1"},
		"kill --signal sigint lab": {want: result{out: "lab\n"}, signal: "SIGINT"},
		"kill -s TERM lab":         {idle: true, want: result{code: 125, errout: "without an entrypoint"}},
		"kill -s TERM lib":         {want: result{code: 125, errout: "not found"}},
		"kill lab lib": {
			state: wire.Status{State: wire.Paused},
			want:  result{code: 125, errout: "does not run"},
		},
		"restart lab": {want: result{out: "lab\n"}, asked: []string{"POST /sandboxes/lab/stop", "POST /sandboxes/lab/start"}},
		"restart -t 3 lab": {
			state: wire.Status{State: wire.Terminated}, want: result{out: "lab\n"},
			asked: []string{"POST /sandboxes/lab/stop", "GET /sandboxes/lab", "POST /sandboxes/lab/start"},
		},
		"restart lab lib": {
			state: wire.Status{State: wire.Pausing}, want: result{code: 125, errout: "does not run"},
		},
		"wait lab": {state: wire.Status{State: wire.Failed}, code: &three, want: result{out: "3\n"}},
		"wait lab lab": {
			state: wire.Status{State: wire.Terminated}, code: &zero,
			want: result{out: "0\n0\n"},
		},
		"wait lib lab": {
			state: wire.Status{State: wire.Terminated, Reason: "stopped"},
			want:  result{code: 125, out: "137\n", errout: "not found"},
		},
		"images -q":             {want: result{out: "python:latest\n"}, asked: []string{"GET /images"}},
		"rmi python":            {want: result{out: rmi}},
		"rmi nope python":       {want: result{code: 125, out: rmi, errout: "not found"}},
		"tag python mine":       {asked: []string{"POST /images/python/tag"}},
		"image tag python mine": {asked: []string{"POST /images/python/tag"}},
		"rename lab old":        {asked: []string{"POST /sandboxes/lab/rename"}},
		"rename lib old":        {want: result{code: 125, errout: "not found"}},
		"--version":             {want: result{out: "sandboxctl unknown\n"}},
		"image rm python":       {want: result{out: "python\n"}},
	} {
		t.Run(args, func(t *testing.T) {
			d := newDaemon(t)
			if c.state.State != "" {
				d.state = c.state
			}
			d.code, d.idle = c.code, c.idle
			r := d.run(t, strings.Fields(args)...)
			if r.code != c.want.code || r.out != c.want.out || !strings.Contains(r.errout, c.want.errout) ||
				(r.errout == "") != (c.want.errout == "") {
				t.Errorf("%+v, want %+v", r, c.want)
			}
			if asked := d.asked(); c.asked != nil && !slices.Equal(asked, c.asked) {
				t.Errorf("asked %q, want %q", asked, c.asked)
			}
			select {
			case sig := <-d.signals:
				if sig != c.signal {
					t.Errorf("signal %q", sig)
				}
			default:
				if c.signal != "" {
					t.Error("no signal was sent")
				}
			}
		})
	}
}

// TestImageCommand: run does with ENTRYPOINT and CMD of an image what docker does;
// create does so only with --image-command.
func TestImageCommand(t *testing.T) {
	entry, cmd := []string{"/entry", "-v"}, []string{"serve"}
	for _, c := range []struct {
		args       string
		entrypoint []string
		cmd        []string
		want       string // what is run; of a create its entrypoint
		own        bool   // the daemon puts the image's own before it
		code       int
	}{
		{"run base", entry, cmd, "/entry -v serve", false, 0},
		{"run base x y", entry, cmd, "/entry -v x y", false, 0},
		{"run base -- x -y", nil, cmd, "x -y", false, 0},
		{"run base", nil, cmd, "serve", false, 0},
		{"run --entrypoint z base", entry, cmd, "z", false, 0},
		{"run --entrypoint z base x", entry, cmd, "z x", false, 0},
		{"run --entrypoint= base x", entry, cmd, "x", false, 0},
		{"run --entrypoint= base", entry, cmd, "", false, 125},
		{"run --rm=false base", nil, nil, "", false, 125},
		{"run -d base", entry, cmd, "", true, 0},
		{"run -d base x", entry, cmd, "x", true, 0},
		{"run -d --entrypoint z base x", entry, cmd, "z x", false, 0},
		{"create base", entry, cmd, "", false, 0},
		{"create base -- x", entry, cmd, "x", false, 0},
		{"create --image-command base", entry, cmd, "", true, 0},
		{"create --image-command base -- x", entry, cmd, "x", true, 0},
		{"create --image-command --entrypoint z base", entry, cmd, "", false, 125},
	} {
		t.Run(c.args, func(t *testing.T) {
			d := newDaemon(t)
			d.image.ImageEntrypoint, d.image.ImageCmd = c.entrypoint, c.cmd
			r := d.run(t, strings.Fields(c.args)...)
			got, kept := d.create.Entrypoint, strings.HasPrefix(c.args, "create") || strings.HasPrefix(c.args, "run -d")
			if !kept {
				got = d.command.Argv
			}
			e := d.create.Extensions
			if r.code != c.code || strings.Join(got, " ") != c.want || (e[wire.ExtImageCommand] == "true") != c.own ||
				kept && c.code == 0 && (e[wire.ExtIdle] == "true") != (c.want == "" && !c.own) {
				t.Errorf("%+v runs %q with %v", r, got, e)
			}
			if c.code != 0 && slices.Contains(d.asked(), "POST /sandboxes") && !slices.Contains(d.asked(), "DELETE /sandboxes/"+testID) {
				t.Errorf("what nothing ran in is left: %q", d.asked())
			}
		})
	}
}

// TestDockersFormat: --format prints docker's names and ours, in lists, of one thing and
// in streams.
func TestDockersFormat(t *testing.T) {
	d := newDaemon(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"ps", "--format", "{{.ID}} {{.Names}} {{.Image}} {{.State}} {{.Command}}"}, testID + ` lab python:latest running "a\x1b[2Jb"`},
		{[]string{"ps", "--format", `table {{.Names}}\t{{.Runtime}}`}, "NAMES   RUNTIME\nlab     runsc"},
		{[]string{"ps", "--format", "{{.sandboxd.name}} {{.status.state}}"}, "lab Running"},
		{
			[]string{"inspect", "-f", "{{.State.Status}} {{.State.Running}} {{.Name}} {{.sandboxd.memoryBytes}}", "lab"},
			"running true lab 67108864",
		},
		{[]string{"images", "--format", "{{.Repository}}:{{.Tag}} {{.ID}} {{.Size}}"}, "python:latest 0123456789ab 1MiB"},
		{[]string{"image", "ls", "--format", "{{.name}}"}, "python"},
		{[]string{"stats", "--no-stream", "--format", "{{.Name}} {{.MemPerc}}", "lab"}, "lab 0.0%"},
		{[]string{"image", "inspect", "--format", "{{.Config.Labels.team}} {{json .labels}}", "python"}, `a {"team":"a"}`},
		{
			[]string{"image", "inspect", "--format", "{{.Config.StopSignal}} {{json .Config.ExposedPorts}} {{json .unused}}", "python"},
			`SIGQUIT {"80/tcp":{}} {"ExposedPorts":{"80/tcp":{}}}`,
		},
	} {
		if r := d.run(t, c.args...); r.code != 0 || strings.TrimSuffix(r.out, "\n") != c.want || r.errout != "" {
			t.Errorf("%q: %+v, want %q", c.args, r, c.want)
		}
	}
	if r := d.run(t, "ps", "--format", "json"); strings.Count(r.out, "\n") != 1 || !strings.HasPrefix(r.out, `{"id":"`+testID) {
		t.Errorf("%+v", r)
	}
	d = newDaemon(t)
	for args, want := range map[string]string{
		"ps --format {{.Foo}}":        "there is no .Foo",
		"ps --format {{.ID}} -q":      "--format and --quiet exclude each other",
		"ps --format {{.ID}} -o json": "--format and --output exclude each other",
		"inspect -f {{ lab":           "unclosed action",
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != 125 || !strings.Contains(r.errout, want) || len(d.asked()) > 0 {
			t.Errorf("%s: %+v, want %q", args, r, want)
		}
	}
}

// TestEventsSince: past events come first, and a note says what is missing.
func TestEventsSince(t *testing.T) {
	d := newDaemon(t)
	d.past = []wire.Event{{Type: "lost"}, {Type: "running", ID: testID}}
	for since, asked := range map[string]string{"": "", "1795000000": "since=2026-11-18T11%3A06%3A40Z"} {
		d.query = ""
		r := d.run(t, "events", "--format", "{{.type}}", "--since", since)
		want, noted := "running\n", true
		if since == "" {
			want, noted = "lost\nrunning\n", false
		}
		if r.out != want || strings.Contains(r.errout, "note: the daemon knows no events from before") != noted || d.query != asked {
			t.Errorf("%q: %+v, asked %q", since, r, d.query)
		}
	}
	if r := d.run(t, "events", "--since", "yesterday"); r.code != 125 || !strings.Contains(r.errout, "want a duration such as 10m") {
		t.Errorf("%+v", r)
	}
}

// TestPull: --pull asks for the image before there is a sandbox.
func TestPull(t *testing.T) {
	for args, c := range map[string]struct {
		code  int
		asked []string
	}{
		"create --pull always python":            {0, []string{"POST /images/pull", "POST /sandboxes"}},
		"create --pull missing python":           {0, []string{"POST /sandboxes"}},
		"create --pull never python":             {0, []string{"GET /images/python", "POST /sandboxes"}},
		"create --pull never far":                {125, []string{"GET /images/far"}},
		"run -d --pull never far true":           {125, []string{"GET /images/far"}},
		"create --pull sometimes python":         {125, nil},
		"create --hostname build.example python": {0, []string{"POST /sandboxes"}},
		"create --stop-signal RTMIN+3 python":    {0, []string{"POST /sandboxes"}},
	} {
		d := newDaemon(t)
		if r := d.run(t, strings.Fields(args)...); r.code != c.code || !slices.Equal(d.asked(), c.asked) {
			t.Errorf("%s: %+v, asked %q", args, r, d.asked())
		}
		if strings.Contains(args, "--hostname") && d.create.Extensions[wire.ExtHostname] != "build.example" {
			t.Errorf("%v", d.create.Extensions)
		}
		if strings.Contains(args, "--stop-signal") && d.create.Extensions[wire.ExtStopSignal] != "RTMIN+3" {
			t.Errorf("%v", d.create.Extensions)
		}
	}
}

// TestImageNotes: what an image asks for and does not get is a line on standard error.
func TestImageNotes(t *testing.T) {
	for _, args := range []string{"image load", "image import - noted", "image pull noted"} {
		d := newDaemon(t)
		d.notes = []string{"its HEALTHCHECK is \x1bnot run"}
		r := d.runWith(t, "an archive", strings.Fields(args)...)
		if r.code != 0 || !strings.HasSuffix(r.out, "\n") || !strings.Contains(r.errout, ":") ||
			!strings.Contains(r.errout, "its HEALTHCHECK is ") || strings.Contains(r.errout, "\x1b") {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

// TestWait: wait looks again while a sandbox lives or waits for its restart, and while
// the daemon is away; a sandbox that is removed meanwhile was killed.
func TestWait(t *testing.T) {
	seven := 7
	for name, c := range map[string]struct {
		then func(d *daemon)
		want string
	}{
		"ends":    {func(d *daemon) { d.state, d.code = wire.Status{State: wire.Failed, Reason: "exited"}, &seven }, "7\n"},
		"removed": {func(d *daemon) { d.gone = true }, "137\n"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDaemon(t)
			looks := 0
			d.before = func(r *http.Request) {
				if r.Method+" "+strings.Replace(r.URL.Path, testID, "lab", 1) != "GET /v1/sandboxes/lab" {
					return
				}
				switch looks++; looks {
				case 1:
					d.state = wire.Status{State: wire.Pending, Reason: "exited"}
				case 2:
					d.away = true
				case 3:
					d.away = false
					c.then(d)
				}
				d.news <- struct{}{}
			}
			if r := d.run(t, "wait", "lab"); r.code != 0 || r.out != c.want || r.errout != "" || looks != 3 {
				t.Errorf("%+v after %d looks", r, looks)
			}
		})
	}
}
