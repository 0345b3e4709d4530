//go:build all

package year

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// What is made on a day is gone on the next, except what is stopped, which has this longer time.
const (
	aDay    = "20h"
	longer  = "60h"
	layers  = 1 << 18 // bytes of an imported image
	refused = "203.0.113.9"
)

// A step is one part of a day's load. It may be begun again after the daemon was killed in it.
type step struct {
	name string
	run  func(ctx context.Context, day int) error
}

func (b *box) steps() []step {
	return []step{
		{"counters", b.count},
		{"a sandbox on runc", b.short},
		{"a sandbox on gVisor", b.guest},
		{"a sandbox that ends", b.ending},
		{"a sandbox that is stopped", b.stopped},
		{"a snapshot", b.snapshot},
		{"a fork", b.fork},
		{"hibernation", b.nap},
		{"an import", b.importing},
		{"a commit", b.commit},
		{"a pull", b.pull},
		{"a key, a policy, and the usage of disks", b.settings},
		{"files and sessions", b.files},
	}
}

// begin makes the sandboxes that live all year.
func (b *box) begin(ctx context.Context) error {
	for _, c := range []struct{ name, runtime string }{{"life-runc", "runc"}, {"life-runsc", "runsc"}, {"nap", "runsc"}} {
		r := spec(c.runtime, c.name)
		if c.runtime == "runc" {
			delete(r.Extensions, wire.ExtNetwork)
			r.Extensions[wire.ExtPolicy] = "year"
			if _, err := b.api.Policies().Put(ctx, "year", policy(0)); err != nil {
				return err
			}
		}
		sb, err := b.api.Create(ctx, r, true)
		if err != nil {
			return fmt.Errorf("create %s: %w", c.name, err)
		}
		p, err := b.api.Start(ctx, sb.ID, client.Command{
			// read waits without another process.
			Shell: "mkfifo /tmp/f; exec 3<>/tmp/f; i=0; while :; do read -rt 0.2 -u 3; echo $((++i)); done", Background: true,
		})
		if err != nil {
			return fmt.Errorf("count in %s: %w", c.name, err)
		}
		b.lives = append(b.lives, &counter{id: sb.ID, name: c.name, command: p.ID})
		p.Close() //nolint:errcheck // the command goes on
	}
	return nil
}

// count reads what the counters said since: no number is missing, and there are new ones.
func (b *box) count(ctx context.Context, _ int) error {
	for _, c := range b.lives {
		if c.asleep {
			continue
		}
		before := c.last
		err := eventually(ctx, func() error {
			var out bytes.Buffer
			next, err := b.api.Commands(c.id).Logs(ctx, c.command, c.cursor, &out)
			if err != nil {
				return err
			}
			for line := range strings.Lines(out.String()) {
				if n, err := strconv.Atoi(strings.TrimSpace(line)); err != nil || n != c.last+1 || !strings.HasSuffix(line, "\n") {
					return fmt.Errorf("%s says %q after %d", c.name, line, c.last)
				}
				c.last++
			}
			if c.cursor = next; c.last == before {
				return fmt.Errorf("%s counts no further than %d", c.name, c.last)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// make creates a sandbox, also if an earlier try has left one of its name.
func (b *box) make(ctx context.Context, r wire.CreateRequest, timeout string) (string, error) {
	if timeout != "" {
		r.Extensions[wire.ExtTimeout] = timeout
	}
	sb, err := b.api.Create(ctx, r, true)
	if errs.Is(err, errs.Exists) {
		if err := b.api.Delete(ctx, r.Extensions[wire.ExtName]); err != nil && !errs.Is(err, errs.NotFound) {
			return "", err
		}
		sb, err = b.api.Create(ctx, r, true)
	}
	return sb.ID, err
}

// short makes a sandbox with a volume and an open address, by a request with a key.
func (b *box) short(ctx context.Context, day int) error {
	volume := fmt.Sprintf("volume-%d", day)
	if old := fmt.Sprintf("volume-%d", day-cycle); day > cycle {
		if err := b.api.Volumes().Remove(ctx, old); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}
	if _, err := b.api.Volumes().Create(ctx, volume, "16Mi"); err != nil && !errs.Is(err, errs.Exists) {
		return err
	}
	r := spec("runc", fmt.Sprintf("short-%d", day))
	r.Extensions[wire.ExtAllow], r.Extensions[wire.ExtTimeout] = outside+":80", aDay
	r.Volumes = []wire.VolumeMount{{Name: "data", PVC: &wire.PVC{ClaimName: volume}, MountPath: "/data"}}
	if err := b.api.Delete(ctx, r.Extensions[wire.ExtName]); err != nil && !errs.Is(err, errs.NotFound) { // of a try before
		return err
	}
	// A daemon that was killed in the middle of a creation has it fail, and the key stands for that.
	id, err := b.createWithKey(ctx, fmt.Sprintf("key-of-day-%d-%d", day, b.deaths.Load()), r)
	if err != nil {
		return err
	}
	out, err := b.exec(ctx, id, `head -c 1000000 /dev/urandom >/data/bulk && exec 3<>/dev/tcp/`+outside+`/80 && echo hello >&3 && head -n 1 <&3`)
	if err == nil && out != "hello\n" {
		err = fmt.Errorf("the address outside answers %q", out)
	}
	return errors.Join(err, b.deniedTo(ctx, id))
}

// deniedTo tries an address and a name that no rule of the sandbox allows.
func (b *box) deniedTo(ctx context.Context, id string) error {
	out, err := b.exec(ctx, id, `(exec 3<>/dev/tcp/`+refused+`/443) 2>/dev/null && echo reached; getent hosts example.com; echo tried`)
	if err == nil && out != "tried\n" {
		err = fmt.Errorf("sandbox %s: what no rule allows: %q", id, out)
	}
	return err
}

// createWithKey sends a request with an Idempotency-Key, so it may be sent again.
func (b *box) createWithKey(ctx context.Context, key string, r wire.CreateRequest) (string, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandboxd/v1/sandboxes?wait=true", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set(wire.HeaderIdempotency, key)
	req.Header.Set("Content-Type", "application/json")
	c := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", b.Socket)
		},
	}}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	var sb wire.Sandbox
	if err := json.Unmarshal(text, &sb); err != nil || resp.StatusCode/100 != 2 {
		return "", fmt.Errorf("create with a key: %s: %s", resp.Status, text)
	}
	return sb.ID, nil
}

func (b *box) guest(ctx context.Context, day int) error {
	id, err := b.make(ctx, spec("runsc", fmt.Sprintf("guest-%d", day)), aDay)
	if err != nil {
		return err
	}
	if out, err := b.exec(ctx, id, "seq 1000 | tail -n 1"); err != nil || out != "1000\n" {
		return fmt.Errorf("it says %q, %w", out, err)
	}
	return b.deniedTo(ctx, id)
}

func (b *box) ending(ctx context.Context, day int) error {
	r := spec("runc", fmt.Sprintf("ended-%d", day))
	delete(r.Extensions, wire.ExtIdle)
	r.Entrypoint = []string{"sh", "-c", "echo over"}
	id, err := b.make(ctx, r, "")
	if err != nil {
		return err
	}
	return eventually(ctx, func() error {
		sb, err := b.api.Get(ctx, id)
		if err == nil && sb.Status.State != wire.Terminated {
			err = fmt.Errorf("it is %+v", sb.Status)
		}
		return err
	})
}

func (b *box) stopped(ctx context.Context, day int) error {
	id, err := b.make(ctx, spec("runc", fmt.Sprintf("stopped-%d", day)), longer)
	if err != nil {
		return err
	}
	return b.api.Stop(ctx, id, time.Second)
}

func (b *box) snapshot(ctx context.Context, day int) error {
	name := fmt.Sprintf("snapshot-%d", day)
	_, err := b.api.Snapshots().Create(ctx, "life-runc", name, true)
	if errs.Is(err, errs.Exists) {
		if err := b.api.Snapshots().Remove(ctx, name); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
		_, err = b.api.Snapshots().Create(ctx, "life-runc", name, true)
	}
	return err
}

// fork copies files, and once in a cycle memory, too.
func (b *box) fork(ctx context.Context, day int) error {
	source, mode, seconds := "life-runc", wire.ForkFiles, int64(20*time.Hour/time.Second)
	if day%cycle == 0 {
		source, mode = "life-runsc", wire.ForkMemory
	}
	f, err := b.api.Snapshots().Fork(ctx, source, wire.ForkRequest{Count: 1, Mode: mode, Timeout: &seconds}, true)
	if err == nil && (len(f.Sandboxes) != 1 || f.Sandboxes[0].State != wire.Running) {
		err = fmt.Errorf("the copies are %+v", f)
	}
	return err
}

// nap hibernates a sandbox, and wakes it two days later.
func (b *box) nap(ctx context.Context, day int) error {
	c := b.lives[slices.IndexFunc(b.lives, func(c *counter) bool { return c.name == "nap" })]
	sleeps := day%cycle != 0
	if sleeps == c.asleep {
		return nil
	}
	sb, err := b.api.Get(ctx, c.id)
	switch {
	case err != nil:
	case sleeps && sb.Status.State == wire.Running:
		err = client.Hibernate(ctx, b.api, c.id)
	case !sleeps && sb.Status.State == wire.Paused:
		err = b.api.Resume(ctx, c.id)
	}
	if err == nil {
		c.asleep = sleeps
	}
	return err
}

func (b *box) importing(ctx context.Context, day int) error {
	text, err := archive(layers)
	if err != nil {
		return err
	}
	a := client.Archive{Name: fmt.Sprintf("imported:%d", day%cycle), Format: "rootfs", Size: int64(len(text)), Body: bytes.NewReader(text)}
	if _, err := b.api.Images().Import(ctx, a, func(wire.ImportProgress) {}); err != nil {
		return err
	}
	_, err = b.api.Images().Remove(ctx, fmt.Sprintf("imported:%d", (day+1)%cycle))
	if errs.Is(err, errs.NotFound) {
		err = nil
	}
	return err
}

func (b *box) commit(ctx context.Context, day int) error {
	_, err := b.api.Commit(ctx, "life-runc", fmt.Sprintf("committed:%d", day%cycle))
	return err
}

// pull pulls an image and removes that of the day before. Once in a cycle a client gives up in the
// middle of a pull.
func (b *box) pull(ctx context.Context, day int) error {
	name := func(day int) string { return fmt.Sprintf("%s/new:%d", b.registry, day%cycle) }
	if day%cycle == 1 {
		some, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		_, err := b.api.Images().Pull(some, b.registry+"/torn:0", nil, func(p wire.ImportProgress) {
			if p.Bytes > 0 {
				cancel()
			}
		})
		if err == nil {
			return errors.New("a pull that never ended succeeded")
		}
		if !errors.Is(some.Err(), context.Canceled) {
			return err
		}
	}
	if _, err := b.api.Images().Pull(ctx, name(day), nil, func(wire.ImportProgress) {}); err != nil {
		return err
	}
	_, err := b.api.Images().Remove(ctx, name(day+cycle-1))
	if errs.Is(err, errs.NotFound) {
		err = nil
	}
	return err
}

// policy is one with another rule each day.
func policy(day int) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"defaultAction":"deny","egress":[{"action":"allow","target":"day-%d.example.com"}]}`, day))
}

func (b *box) settings(ctx context.Context, day int) error {
	if err := b.api.Keys().Remove(ctx, fmt.Sprintf("key-%d", day-1)); err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}
	_, err := b.api.Keys().Create(ctx, fmt.Sprintf("key-%d", day), "", b.clock.now().Add(48*time.Hour))
	if errs.Is(err, errs.Exists) {
		err = nil
	}
	_, perr := b.api.Policies().Put(ctx, "year", policy(day))
	_, derr := b.api.System().DiskUsage(ctx)
	return errors.Join(err, perr, derr)
}

func (b *box) files(ctx context.Context, day int) error {
	for _, c := range b.lives {
		if c.asleep {
			continue
		}
		text := fmt.Sprintf("day %d\n", day)
		err := b.api.Files(c.id).Put(ctx, []client.Upload{{
			Path: "/root/day", Mode: 644, Size: int64(len(text)),
			Open: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil },
		}})
		if err != nil {
			return err
		}
		if err := b.endSession(ctx, c); err != nil { // of a try before
			return err
		}
		s, err := b.api.Sessions(c.id).Create(ctx, "/root")
		if err != nil {
			return err
		}
		c.session = s.SessionID
		p, err := b.api.Sessions(c.id).Run(ctx, c.session, client.Line{Shell: "cat day"})
		if err != nil {
			return err
		}
		var out, words bytes.Buffer
		if _, err := p.Wait(&out, &words); err != nil || out.String() != text {
			return fmt.Errorf("%s has %q (%s), %w", c.name, out.String(), words.String(), err)
		}
		if err := b.endSession(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// endSession removes the session of a sandbox, which outlives the daemon.
func (b *box) endSession(ctx context.Context, c *counter) error {
	if c.session == "" {
		return nil
	}
	if err := b.api.Sessions(c.id).Remove(ctx, c.session); err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}
	c.session = ""
	return nil
}
