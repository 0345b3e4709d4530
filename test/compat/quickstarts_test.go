package compat_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// quickstarts are programs of OpenSandbox's documentation and what they print.
var quickstarts = []struct {
	file   string // below quickstarts, or a directory of blocks that are one program
	prints []string
}{
	{"python/03-quick-start.py", []string{"Hello Sandbox!"}},
	{"python/04-synchronous-quick-start.py", []string{"Hello Sandbox!"}},
	{"python/09-1-lifecycle-management.py", []string{"State: Running", "Expires: 20"}},
	{"python/10-1-lifecycle-management.py", nil},
	{"python/11-2-custom-health-check.py", nil},
	{"python/12-3-command-execution-streaming.py", []string{"STDOUT: Count 1", "STDOUT: Count 5", "Command finished in "}},
	{"python/13-4-comprehensive-file-operations.py", []string{"Content: Hello World", "Found: /tmp/hello.txt"}},
	{"python/14-5-snapshots.py", nil},
	{"python/17-1-connection-configuration.py", nil},
	{"python/16-7-sandbox-management-admin.py", []string{"Found sandbox: "}}, // kills all that run
	{"code-interpreter/03-quick-start.py", []string{"4\n"}},
	{"code-interpreter/04-synchronous-quick-start.py", []string{"4\n"}},
	{"code-interpreter/06-0-run-with-language-default-language-context.py", nil},
	{"code-interpreter/07-0-run-with-language-default-language-context.py", nil},
	{"code-interpreter/08-1-java-code-execution.py", []string{"Calculating sum...", "Sum: 30"}},
	{"code-interpreter/09-2-python-with-state-persistence.py", nil},
	{"code-interpreter/10-3-streaming-output-handling.py", []string{"STDOUT: 0", "4\n"}}, // two prints may come as one event
	{"code-interpreter/11-4-multi-language-context-isolation.py", nil},
	{"osb", []string{`"config_file_exists": true`, "/tmp/dev.toml", "\n2\n", "\nhello\n"}},
	{"javascript/04-quick-start.ts", []string{"Hello Sandbox!"}},
	{"javascript/05-1-lifecycle-management.ts", []string{"State: Running", "Expires: 20"}},
	{"javascript/06-1-lifecycle-management.ts", nil},
	{"javascript/07-2-custom-health-check.ts", nil},
	{"javascript/08-3-command-execution-streaming.ts", []string{"STDOUT: Count 1", "STDOUT: Count 3", "Finished in "}},
	{"javascript/09-4-comprehensive-file-operations.ts", []string{"Content: Hello World", "/tmp/demo/hello.txt"}},
	{"javascript/10-5-endpoints.ts", nil},
	{"javascript/13-1-connection-configuration.ts", nil},
	{"javascript/12-7-sandbox-management-admin.ts", []string{"'" + daemontest.Instance.String()}}, // ids begin so
}

// quickstartsOn are the runtimes of the programs in `make test`; `make test-all` takes both.
// TestJudges and TestPythonCodeInterpreter call what these programs call on both.
var quickstartsOn = map[string]string{"python": "runsc", "code-interpreter": "runc", "osb": "runc", "javascript": "runsc"}

// TestQuickstarts runs programs of OpenSandbox's documentation as they stand:
// the daemon is api.opensandbox.io at port 80 to them, and localhost:8080, takes
// the key "your-api-key", and has aliases of the names they give images.
func TestQuickstarts(t *testing.T) {
	hosttest.Root(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) { readme(t, runtime) })
	}
}

const readmeHosts = "127.64.0.80 api.opensandbox.io localhost\n"

// alone runs a program with hosts of its own, and with a /tmp that forgets what
// it leaves there.
const alone = `mount --bind "$0" /etc/hosts
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=/tmp,upperdir=/mnt/upper,workdir=/mnt/work /tmp
exec "$@"`

// readme runs them on a daemon whose default is one runtime.
func readme(t *testing.T, runtime string) {
	t.Helper()
	python, javascript := venv(t, requirements), node(t, "javascript/quickstart.mjs")
	d := daemontest.NewWith(t, daemontest.Options{
		TCP: "127.64.0.80:80", Key: "your-api-key",
		Config: []string{"[runtime]", fmt.Sprintf("default = %q", runtime), "[images.aliases]", `"nginx:*" = "base"`},
	})
	for _, image := range []string{"base", "python", "code-interpreter"} {
		if everything || image != "code-interpreter" || quickstartsOn[image] == runtime {
			daemontest.Image(t, d, image)
		}
	}
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	passOn(t, "127.64.0.80:8080", d.TCP)
	defer empty(t, c)
	hosts := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(hosts, []byte(readmeHosts), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, q := range quickstarts {
		of, _, _ := strings.Cut(q.file, "/")
		on, ok := quickstartsOn[of]
		if !ok {
			t.Errorf("quickstartsOn has no runtime for %q, so `make test` would not run %s", of, q.file)
		}
		if !everything && on != runtime {
			continue
		}
		t.Run(q.file, func(t *testing.T) {
			file, err := filepath.Abs(filepath.Join("quickstarts", q.file))
			if err != nil {
				t.Fatal(err)
			}
			argv := []string{"-m", "sh", "-ec", alone, hosts}
			limit := hosttest.Patient(time.Minute) // of a program
			switch {
			case q.file == "osb":
				blocks, err := os.ReadDir(file)
				if err != nil {
					t.Fatal(err)
				}
				limit *= time.Duration(len(blocks))
				argv = append(argv, python, "python/quickstart_osb.py", file)
			case strings.HasSuffix(file, ".ts"):
				argv = append(argv, "node", javascript, file)
			case strings.HasSuffix(file, "quick-start.py"):
				argv = append(argv, python, file)
			default:
				argv = append(argv, python, "python/quickstart.py", file)
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			cmd := exec.CommandContext(ctx, "unshare", argv...)
			cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, want := range q.prints {
				if !strings.Contains(string(out), want) {
					t.Errorf("no %q in\n%s", want, out)
				}
			}
		})
	}
}

// passOn has one more address lead to another until the test ends.
func passOn(t *testing.T, from, to string) {
	t.Helper()
	ln, err := net.Listen("tcp", from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	half := func(dst, src net.Conn) {
		relay.Copy(dst, src) //nolint:errcheck // the program says what went wrong
		dst.(*net.TCPConn).CloseWrite()
	}
	go func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer in.Close()
				out, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer out.Close()
				go half(out, in)
				half(in, out)
			}()
		}
	}()
}

// empty deletes the sandboxes that programs left: some are about that.
func empty(t *testing.T, c *client.Client) {
	t.Helper()
	left, err := c.List(t.Context(), client.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range left {
		if err := c.Delete(t.Context(), sb.ID); err != nil {
			t.Error(err)
		}
	}
}
