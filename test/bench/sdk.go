package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/test/official"
)

// accepted: how long the answer to a creation takes if the client prefers it at once
// (Prefer: respond-async). The daemon answers before it creates anything.
func accepted(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		var took []float64
		for i := range b.times(60, 6) + 3 {
			start := time.Now()
			sb, err := b.cl.Create(ctx, request(rt), false)
			if err != nil {
				return err
			}
			if i >= 3 { // the first three warm up
				took = append(took, ms(time.Since(start)))
			}
			if _, err := b.exec(ctx, sb.ID, "true"); err != nil { // waits until it runs
				return errors.Join(err, b.drop(ctx, sb.ID))
			}
			if err := b.drop(ctx, sb.ID); err != nil {
				return err
			}
		}
		b.add(row("create_202", rt, "ms", took, "", nil, goal{maxP50: 10}))
	}
	return nil
}

// An sdk is a program that uses an official client and takes commands, one per line.
type sdk struct {
	name string
	cmd  *exec.Cmd
	in   *os.File
	out  *bufio.Scanner
}

// sdks starts the programs of test/bench/sdk, with clients installed as in test/compat. The
// caller ends them.
func (b *bench) sdks(ctx context.Context) (all []*sdk, err error) {
	installed, compat, here := filepath.Join(b.dir, "..", "compat"), filepath.Join(b.root, "test", "compat"),
		filepath.Join(b.root, "test", "bench", "sdk")
	python, err := official.Python(ctx, filepath.Join(compat, "python", "requirements.txt"))
	if err != nil {
		return nil, err
	}
	program, err := official.Node(ctx, installed, filepath.Join(here, "sdk.mjs"), filepath.Join(compat, "javascript"))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, endAll(all))
		}
	}()
	for _, s := range []struct {
		name string
		argv []string
	}{
		{"python", []string{python, filepath.Join(here, "sdk.py"), "sync"}},
		{"python_async", []string{python, filepath.Join(here, "sdk.py"), "async"}},
		{"javascript", []string{"node", program}},
	} {
		one, err := b.startSDK(ctx, s.name, s.argv)
		if err != nil {
			return all, err
		}
		all = append(all, one)
	}
	return all, nil
}

func (b *bench) startSDK(ctx context.Context, name string, argv []string) (*sdk, error) {
	s := &sdk{name: name, cmd: exec.CommandContext(ctx, argv[0], argv[1:]...)}
	s.cmd.Env = append(os.Environ(), "OPEN_SANDBOX_DOMAIN="+b.tcp, "OPEN_SANDBOX_API_KEY="+key)
	s.cmd.Stderr = os.Stderr
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	s.in, s.cmd.Stdin = w, r
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		w.Close()
		return nil, err
	}
	s.out = bufio.NewScanner(out)
	if err := s.cmd.Start(); err != nil {
		w.Close()
		return nil, err
	}
	return s, nil
}

func endAll(all []*sdk) error {
	var errz []error
	for _, s := range all {
		s.in.Close()
		if err := s.cmd.Wait(); err != nil {
			errz = append(errz, fmt.Errorf("the SDK program %s: %w", s.name, err))
		}
	}
	return errors.Join(errz...)
}

// ask sends the program a command and reads its answer into fields.
func (s *sdk) ask(line string, fields ...any) error {
	if _, err := fmt.Fprintln(s.in, line); err != nil {
		return fmt.Errorf("ask the SDK program %s: %w", s.name, err)
	}
	if !s.out.Scan() {
		return fmt.Errorf("the SDK program %s ended at %q; it said why above", s.name, line)
	}
	if _, err := fmt.Sscan(s.out.Text(), fields...); err != nil {
		return fmt.Errorf("the SDK program %s answers %q to %q: %w", s.name, s.out.Text(), line, err)
	}
	return nil
}

// sdkFirst: from an SDK's create to the end of its first command, against the same calls
// with curl: one process creates; another one, on one connection, asks for the two
// endpoints, pings and runs the command.
func sdkFirst(ctx context.Context, b *bench) (err error) {
	all, err := b.sdks(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, endAll(all)) }()
	for _, rt := range runtimes {
		for _, s := range all {
			ours := func() (float64, error) {
				var took float64
				var id string
				if err := s.ask("first "+rt, &took, &id); err != nil {
					return 0, err
				}
				return took, b.drop(ctx, id)
			}
			theirs := func() (float64, error) {
				start := time.Now()
				id, err := b.curlFirst(ctx, rt)
				took := ms(time.Since(start))
				if id != "" {
					err = errors.Join(err, b.drop(ctx, id))
				}
				return took, err
			}
			a, c, err := turns(b.times(20, 3), 2, ours, theirs)
			if err != nil {
				return err
			}
			b.add(row("sdk_create_to_first_command_"+s.name, rt, "ms", a, "the same calls with curl, two processes", c,
				goal{maxP50: pick(rt, 80.0, 150.0), maxRatio: 1.3}))
		}
	}
	return nil
}

// sdkRequest is the body of an SDK's create.
func sdkRequest(rt string) string {
	return fmt.Sprintf(`{"image":{"uri":"base"},"entrypoint":["tail","-f","/dev/null"],"timeout":600,`+
		`"resourceLimits":{"cpu":"1","memory":"512Mi"},"extensions":{"sandboxd.runtime":%q}}`, rt)
}

// curlFirst makes the calls of an SDK with curl.
func (b *bench) curlFirst(ctx context.Context, rt string) (id string, err error) {
	base := "http://" + b.tcp + "/v1/sandboxes"
	common := []string{"-sS", "--fail-with-body", "-H", "OPEN-SANDBOX-API-KEY: " + key, "-H", "Content-Type: application/json"}
	out, err := exec.CommandContext(ctx, "curl", append(common, "-d", sdkRequest(rt), base)...).Output()
	if err != nil {
		return "", fmt.Errorf("curl %s: %w: %s", base, err, out)
	}
	var sb wire.Sandbox
	if err := json.Unmarshal(out, &sb); err != nil {
		return "", fmt.Errorf("%s answers %q: %w", base, out, err)
	}
	one, agent := base+"/"+sb.ID, base+"/"+sb.ID+"/proxy/44772"
	var argv []string
	for i, call := range [][]string{
		{one + "/endpoints/44772"},
		{one + "/endpoints/18080"},
		{agent + "/ping"},
		{"-d", `{"command":"echo hello"}`, agent + "/command"},
	} {
		if i > 0 {
			argv = append(argv, "--next")
		}
		argv = append(append(argv, common...), call...)
	}
	out, err = exec.CommandContext(ctx, "curl", argv...).Output()
	if err != nil {
		return sb.ID, fmt.Errorf("curl %s: %w: %s", agent, err, out)
	}
	if !bytes.Contains(out, []byte(`"execution_complete"`)) {
		err = fmt.Errorf("the command did not end well: %s", out)
	}
	return sb.ID, err
}

// sdkFailing: how long it takes until a create of the Python SDK fails whose entrypoint is
// missing, against creates that work: one of the bench's own client, and one of the SDK.
func sdkFailing(ctx context.Context, b *bench) (err error) {
	python, err := official.Python(ctx, filepath.Join(b.root, "test", "compat", "python", "requirements.txt"))
	if err != nil {
		return err
	}
	s, err := b.startSDK(ctx, "python", []string{python, filepath.Join(b.root, "test", "bench", "sdk", "sdk.py"), "sync"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, endAll([]*sdk{s})) }()
	for _, rt := range runtimes {
		failing := func() (float64, error) {
			var took float64
			if err := s.ask("failing "+rt, &took); err != nil {
				return 0, err
			}
			kept, err := b.cl.List(ctx, client.Filter{}) // the failed one, until it is deleted
			for i := range kept {
				err = errors.Join(err, b.drop(ctx, kept[i].ID))
			}
			return took, err
		}
		works := func() (float64, error) { return createOnce(ctx, b, request(rt)) }
		worksBySDK := func() (float64, error) {
			var took float64
			var id string
			if err := s.ask("create "+rt, &took, &id); err != nil {
				return 0, err
			}
			return took, b.drop(ctx, id)
		}
		for _, c := range []struct {
			baseline string
			create   func() (float64, error)
			g        goal
		}{{"a create that works", works, goal{maxOver: 20}}, {"a create of the same SDK that works", worksBySDK, goal{}}} {
			a, t, err := turns(b.times(12, 2), 2, failing, c.create)
			if err != nil {
				return err
			}
			b.add(row("sdk_create_failing", rt, "ms", a, c.baseline, t, c.g))
		}
	}
	return nil
}

// A goSDK makes the calls of the official Go SDK in their order and with its pauses: its
// module is not among the clients that the bench installs. Like the SDK it has one
// transport for the API and one for the agent.
type goSDK struct {
	base       string // of the API
	api, agent http.Client
}

// The pauses of the SDK (CreateSandbox in sandbox.go): when the state is not Running, and
// when a ping fails.
const (
	statePause = 2 * time.Second
	pingPause  = 200 * time.Millisecond
)

// goFirst is from CreateSandbox to the end of the first command. It returns the ID also
// with an error.
func goFirst(ctx context.Context, b *bench, rt string) (took float64, id string, err error) {
	s := goSDK{base: "http://" + b.tcp + "/v1/sandboxes"}
	s.api.Transport, s.agent.Transport = &http.Transport{}, &http.Transport{}
	defer s.api.CloseIdleConnections()
	defer s.agent.CloseIdleConnections()
	start := time.Now()
	var made wire.Sandbox
	err = s.call(ctx, &s.api, http.MethodPost, s.base, sdkRequest(rt), &made)
	if err == nil {
		err = s.first(ctx, s.base+"/"+made.ID)
	}
	return ms(time.Since(start)), made.ID, err
}

func (s *goSDK) first(ctx context.Context, one string) error {
	for {
		var now wire.Sandbox
		if err := s.call(ctx, &s.api, http.MethodGet, one, "", &now); err != nil {
			return err
		}
		if now.Status.State == wire.Running {
			break
		}
		time.Sleep(statePause)
	}
	if err := s.call(ctx, &s.api, http.MethodGet, one+"/endpoints/44772?use_server_proxy=true", "", &wire.Endpoint{}); err != nil {
		return err
	}
	for s.call(ctx, &s.agent, http.MethodGet, one+"/proxy/44772/ping", "", nil) != nil && ctx.Err() == nil {
		time.Sleep(pingPause)
	}
	return s.call(ctx, &s.agent, http.MethodPost, one+"/proxy/44772/command", `{"command":"echo hello"}`, nil)
}

// call makes one request. Its answer goes into the value, or to the end of a stream.
func (s *goSDK) call(ctx context.Context, c *http.Client, method, url, body string, into any) error {
	r, err := http.NewRequestWithContext(ctx, method, url, bytes.NewBufferString(body))
	if err != nil {
		return err
	}
	r.Header.Set(wire.HeaderAPIKey, key)
	r.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said := bufio.NewReader(resp.Body)
	if resp.StatusCode/100 != 2 {
		words, _ := io.ReadAll(said)
		return fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, words)
	}
	if into != nil {
		err = json.NewDecoder(said).Decode(into)
	}
	_, restErr := io.Copy(io.Discard, said)
	if err == nil {
		err = restErr
	}
	return err
}

// sdkGo: the Go SDK's create with its first command, against cold_create_first_command.
func sdkGo(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		ours := func() (float64, error) {
			took, id, err := goFirst(ctx, b, rt)
			if id != "" {
				err = errors.Join(err, b.drop(ctx, id))
			}
			return took, err
		}
		theirs := func() (float64, error) { return b.firstCommand(ctx, rt) }
		a, c, err := turns(b.times(20, 2), 2, ours, theirs)
		if err != nil {
			return err
		}
		b.add(row("sdk_create_to_first_command_go", rt, "ms", a, "cold_create_first_command", c, goal{maxOver: 20}))
	}
	return nil
}
