package compat_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// quickstarts are programs of OpenSandbox's documentation and what they print.
var quickstarts = []struct {
	file   string // below quickstarts
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
	{"javascript/04-quick-start.ts", []string{"Hello Sandbox!"}},
	{"javascript/05-1-lifecycle-management.ts", []string{"State: Running", "Expires: 20"}},
	{"javascript/06-1-lifecycle-management.ts", nil},
	{"javascript/07-2-custom-health-check.ts", nil},
	{"javascript/09-4-comprehensive-file-operations.ts", []string{"Content: Hello World", "/tmp/demo/hello.txt"}},
	{"javascript/10-5-endpoints.ts", nil},
	{"javascript/12-7-sandbox-management-admin.ts", []string{"'t"}}, // ids of test daemons begin so
}

// TestQuickstarts runs programs of OpenSandbox's documentation as they stand:
// the daemon is api.opensandbox.io at port 80 to them, takes the key
// "your-api-key", and has images of the names they use.
func TestQuickstarts(t *testing.T) {
	hosttest.Root(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) { readme(t, runtime) })
	}
}

// readme runs them on a daemon whose default is one runtime.
func readme(t *testing.T, runtime string) {
	t.Helper()
	python, javascript := venv(t, requirements), node(t, "javascript/quickstart.mjs")
	d := daemontest.NewWith(t, daemontest.Options{
		TCP: "127.64.0.80:80", Key: "your-api-key",
		Config: []string{"[runtime]", fmt.Sprintf("default = %q", runtime)},
	})
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	for _, name := range []string{"ubuntu", "nginx"} {
		alias(t, d, c, name)
	}
	defer empty(t, c)
	hosts := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(hosts, []byte("127.0.0.1 localhost\n127.64.0.80 api.opensandbox.io\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, q := range quickstarts {
		t.Run(q.file, func(t *testing.T) {
			file, err := filepath.Abs(filepath.Join("quickstarts", q.file))
			if err != nil {
				t.Fatal(err)
			}
			argv := []string{"-m", "sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, hosts}
			switch {
			case strings.HasSuffix(file, ".ts"):
				argv = append(argv, "node", javascript, file)
			case strings.HasSuffix(file, "quick-start.py"):
				argv = append(argv, python, file)
			default:
				argv = append(argv, python, "python/quickstart.py", file)
			}
			ctx, cancel := context.WithTimeout(t.Context(), hosttest.Patient(time.Minute))
			defer cancel()
			out, err := exec.CommandContext(ctx, "unshare", argv...).CombinedOutput()
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

// alias gives the image base one more name until the test ends.
func alias(t *testing.T, d *daemontest.Daemon, c *client.Client, name string) {
	t.Helper()
	ensureImage(t, d, "base")
	file, err := os.Create(filepath.Join(t.TempDir(), "base.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := c.ExportImage(t.Context(), "base", file); err != nil {
		t.Fatal(err)
	}
	if _, err := file.Seek(0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := c.ImportImage(t.Context(), client.Archive{Name: name, Body: file}, func(client.ImportProgress) {}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.RemoveImage(context.WithoutCancel(t.Context()), name); err != nil {
			t.Error(err)
		}
	})
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
