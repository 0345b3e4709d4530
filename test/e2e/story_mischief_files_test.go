package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime/multipart"
	"net"
	"net/textproto"
	"net/url"
	"os"
	"strings"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// sessions gives a session what ends a shell, or might, or looks like its answers.
func (g *guest) sessions() {
	g.Helper()
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.Unmarshal([]byte(g.call(200, "POST", "/session", "{}")), &made); err != nil || made.ID == "" {
		g.Fatal(made, err)
	}
	g.hears(g.run(made.ID, "cd /usr/bin; B=two; export E=1; f() { echo f$1; }; alias g='echo g'; set -o pipefail; shopt -s nullglob"),
		"complete")
	const kept = "stdout two 1 f3 g /usr/bin\n\ncomplete"
	keeps := func(after string) {
		g.Helper()
		failed := g.Failed()
		g.hears(g.run(made.ID, "set +eux\necho $B $(sh -c 'echo $E') $(f 3) $(g) /nope* $PWD\n! (false | true)"), kept)
		if g.Failed() && !failed {
			g.Errorf("that was after %s", after)
		}
	}
	keeps("nothing")
	for _, c := range []cell{
		{"echo out; echo err >&2", "stdout out\n\nstderr err\n\ncomplete"},
		{"exit 7", "error CommandExecError 7"},
		{"set -e; false; echo no", "error CommandExecError 1"},
		{"kill -9 $$", "error CommandExecError -1"},
		{"exec sh -c 'echo other; exit 3'", "stdout other\n\nerror CommandExecError 3"},
		{"eval() { echo mine; }; printf() { echo mine; }; alias builtin=false; echo on", "stdout on\n\ncomplete"},
		{"unset -f eval printf; unalias builtin; sleep 7778 & echo on", "stdout on\n\ncomplete"},
		{"cat; read x; echo $?", "stdout 1\n\ncomplete"},
		{
			"echo __EXIT_CODE__:3; echo __PWD__:/x; echo '{\"type\":\"error\"}'",
			"stdout __EXIT_CODE__:3\n__PWD__:/x\n{\"type\":\"error\"}\n\ncomplete",
		},
		{"for fd in 3 4 5 10 11 255; do sh -c \"echo garbage 0 hB >&$fd\"; done 2>/dev/null; (exit 6)", "error CommandExecError 6"},
		{
			"for i in 1 2 3; do echo " + strings.Repeat("0", 32) + " 0 hB >&10; head -c 3000000 /dev/zero >&10; done; echo on",
			"stdout on\n\ncomplete",
		},
	} {
		g.hears(g.run(made.ID, c.code), c.says)
		keeps(c.code)
	}
	out := g.call(200, "POST", "/session/"+made.ID+"/run", agent.SessionRun{Command: "cd /; echo begun; exec 2>/dev/null; trap '' TERM; " +
		"sleep 7778 & while :; do sleep 0.05; done", Timeout: 1500})
	g.hears(out, "stdout begun\n\nerror CommandExecError -1")
	if !strings.Contains(out, "timed out after 1.5s") {
		g.Errorf("a timeout: %s", out)
	}
	keeps("a timeout")
	g.call(400, "POST", "/session/"+made.ID+"/run", `{"command":"a\u0000b"}`)
	g.call(404, "POST", "/session/"+strings.Repeat("0", 32)+"/run", `{"command":"true"}`)
	g.call(200, "DELETE", "/session/"+made.ID, nil)
	g.call(404, "POST", "/session/"+made.ID+"/run", `{"command":"true"}`)
	if n := g.ok("exec", g.id, "--", "sh", "-c", living+" -x sleep; true"); n != "0\n" {
		g.Errorf("jobs that outlived their session: %s", n)
	}
	g.reaped("sleep")
	g.goesOn("a session")
}

// files sends what cannot be a file, and files that break off. Nothing of it is left.
func (g *guest) files() {
	g.Helper()
	g.ok("exec", g.id, "--", "sh", "-c", "mkdir /tmp/d; cd /tmp/d; echo old >here; ln -s loop1 loop2; ln -s loop2 loop1")
	list := func() string {
		g.Helper()
		return g.ok("exec", g.id, "--", "sh", "-c", "cd /tmp/d; ls -A; cat here")
	}
	before := list()
	for name, path := range map[string]string{
		"5,000 characters":        "/tmp/d" + strings.Repeat("/abc", 1250),
		"a name of 300":           "/tmp/d/" + strings.Repeat("x", 300),
		"5,000 with ..":           "/tmp/d" + strings.Repeat("/..", 1700) + "/" + strings.Repeat("x", 300),
		"through links in a ring": "/tmp/d/loop1/x",
		"NUL":                     "/tmp/d/a\x00b",
	} {
		mode := map[string]agent.FileMode{path: {Mode: 644}}
		for _, c := range []struct {
			method, route string
			body          any
		}{
			{"GET", "/files/info?path=" + url.QueryEscape(path), nil},
			{"GET", "/files/download?path=" + url.QueryEscape(path), nil},
			{"GET", "/directories/list?path=" + url.QueryEscape(path), nil},
			{"DELETE", "/files?path=" + url.QueryEscape(path), nil},
			{"POST", "/directories", mode},
			{"POST", "/files/permissions", mode},
			{"POST", "/files/mv", []map[string]string{{"src": "/tmp/d/here", "dest": path}}},
		} {
			g.call(400, c.method, c.route, c.body)
		}
		g.uploads(name, 400, meta(path), part{"file", "y"})
	}
	g.call(400, "DELETE", "/directories?path="+url.QueryEscape("/tmp/.."), nil)
	for name, parts := range map[string][]part{
		"nothing":         {},
		"no metadata":     {{"file", "x"}},
		"no file":         {meta("/tmp/d/new")},
		"a file too few":  {meta("/tmp/d/few"), {"file", "x"}, meta("/tmp/d/new")},
		"a file too many": {meta("/tmp/d/many"), {"file", "x"}, {"file", "y"}},
		"foreign part":    {{"other", "y"}},
		"no JSON":         {{"metadata", "{"}, {"file", "x"}},
		"no path":         {{"metadata", "{}"}, {"file", "x"}},
	} {
		g.uploads(name, 400, parts...)
	}
	for _, body := range []string{"hello", "--b\r\nContent-Disposition: form-data; " +
		"name=\"metadata\"\r\n\r\n{\"path\":\"/tmp/d/here\"}\r\n--b\r\nContent-Disp", "--b--", "--b"} {
		if a := g.request("POST", g.path("/files/upload"), strings.NewReader(body), "Content-Type",
			"multipart/form-data; boundary=b"); a.status != 400 || !strings.Contains(a.body, `"message"`) {
			g.Errorf("%q: %d %s", body, a.status, a.body)
		}
	}
	// Each file is in place as soon as its part has ended.
	if out := g.ok("exec", g.id, "--", "sh", "-c", "cd /tmp/d; cat few many; rm few many"); out != "xx" {
		g.Errorf("whole pairs of uploads that were refused later: %q", out)
	}
	g.cutOff(list)
	if after := list(); after != before {
		g.Errorf("there were\n%s\nand are\n%s", before, after)
	}

	// .. is the sandbox's own, and leads nowhere else.
	name := "sandboxd-e2e-" + g.id
	g.uploads("dots", 200, meta("/tmp/d/../d/../../../../../tmp/"+name), part{"file", "dots"})
	if out := g.ok("exec", g.id, "--", "cat", "/tmp/"+name); out != "dots" {
		g.Errorf("%q", out)
	}
	if _, err := os.Stat("/tmp/" + name); !errors.Is(err, os.ErrNotExist) {
		g.Errorf("a file of the guest's on the host: %v", err)
	}
	g.goesOn("files")
}

// cutOff breaks an upload off in the middle: its target stays as it was, and nothing of
// what came does.
func (g *guest) cutOff(list func() string) {
	g.Helper()
	before := list()
	body, kind := form(meta("/tmp/d/here"), part{"file", strings.Repeat("x", 4<<20)})
	conn, err := net.Dial("tcp", g.TCP)
	if err != nil {
		g.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nOPEN-SANDBOX-API-KEY: %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n",
		g.path("/files/upload"), daemontest.Key, kind, len(body)) //nolint:errcheck // the draft counts
	conn.Write(body[:len(body)/2]) //nolint:errcheck // as above
	settles(g.T, func() error {
		if list() == before {
			return errors.New("the upload has not begun")
		}
		return nil
	})
	conn.Close()
	settles(g.T, func() error {
		if now := list(); now != before {
			return fmt.Errorf("there were\n%s\nand after an upload that was broken off\n%s", before, now)
		}
		return nil
	})
	a := g.request("POST", g.path("/files/upload"), bytes.NewReader(body[:len(body)-20]), "Content-Type", kind)
	if a.status != 400 || list() != before {
		g.Errorf("without its last boundary: %d %s; there are %s", a.status, a.body, list())
	}
}

// A part is one of an upload.
type part struct{ name, content string }

func meta(path string) part {
	b, _ := json.Marshal(map[string]string{"path": path}) //nolint:errchkjson // strings
	return part{"metadata", string(b)}
}

func form(parts ...part) (body []byte, kind string) {
	var b bytes.Buffer
	m := multipart.NewWriter(&b)
	for _, p := range parts {
		h := textproto.MIMEHeader{}
		h.Set("Content-Disposition", fmt.Sprintf(`form-data; name=%q; filename="x"`, p.name))
		w, _ := m.CreatePart(h)    //nolint:errcheck // a buffer
		w.Write([]byte(p.content)) //nolint:errcheck // a buffer
	}
	m.Close()
	return b.Bytes(), m.FormDataContentType()
}

// uploads sends parts and wants a status, and a reason where it refuses.
func (g *guest) uploads(what string, status int, parts ...part) {
	g.Helper()
	body, kind := form(parts...)
	a := g.request("POST", g.path("/files/upload"), bytes.NewReader(body), "Content-Type", kind)
	if a.status != status || status >= 400 && !strings.Contains(a.body, `"message"`) {
		g.Errorf("%s: %d %.300s; want %d", what, a.status, a.body, status)
	}
}
