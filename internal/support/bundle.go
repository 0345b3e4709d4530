// Package support writes the file that goes with a bug report: the findings of the
// doctor, the state of the daemon, and its resources on the host.
//
// Strangers read the file. So it has no environment, no arguments, no labels, no output
// of any sandbox, no key and no token. From the log it has only fields with the
// daemon's own words (openLog). Every text goes through a scrubber that knows the
// secrets of this host.
package support

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/doctor"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

const (
	maxMember   = 4 << 20          // bytes of one file in the bundle
	partLimit   = 30 * time.Second // for one part
	journalSize = 5000             // lines
)

const readme = `A support bundle of sandboxd. It contains: the findings of "sandboxd doctor", versions, the
configuration (without the keys that it refers to), sandboxes (ids, states, reasons, times,
limits), the operations, warnings and errors of the log, and the resources of this instance on
the host: firewall rules (with the addresses that sandboxes may reach), sets, links, cgroups,
mounts. It does not contain: names, environments, arguments, labels and output of sandboxes,
keys, tokens.

The log in the bundle has no requests, no refused flows and no names that sandboxes looked up.
In the other lines, "[redacted]" replaces images, the reason why a request was refused, all
quoted text in other errors, and every field that may contain text of a client. Unquoted text
in errors of the host or of a runtime is not changed, except for values of existing sandboxes.

errors.txt, if it exists, lists the parts that could not be collected.
`

// A part is one file of the bundle.
type part struct {
	name string
	get  func(context.Context) ([]byte, error)
}

// Write writes a bundle. It notes missing parts in the bundle and returns no error for
// them.
func Write(ctx context.Context, w io.Writer, cfg *config.Config, version string) error {
	b := bundle{cfg: cfg, version: version}
	if c, err := client.New("unix://"+cfg.Listen.Socket, ""); err == nil {
		defer c.Close()
		b.api = c
	}
	all, err := b.records(ctx)
	if err != nil {
		// Without the records the secrets in the log are not known.
		b.failed = append(b.failed, fmt.Sprintf("records: %v; without the records, the log is left out too", err))
	}
	scrub := scrubber(cfg, all)
	parts := b.parts(all, err == nil)
	zw := gzip.NewWriter(w)
	tw := tar.NewWriter(zw)
	add := func(name string, text []byte) error {
		text = []byte(scrub.Replace(string(text)))
		h := tar.Header{Name: "sandboxd-support/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: time.Now()}
		if err := tw.WriteHeader(&h); err != nil {
			return err
		}
		_, err := tw.Write(text)
		return err
	}
	for _, p := range parts {
		pctx, cancel := context.WithTimeout(ctx, partLimit)
		text, err := p.get(pctx)
		cancel()
		if err != nil {
			b.failed = append(b.failed, fmt.Sprintf("%s: %v", p.name, err))
		}
		if len(text) == 0 {
			continue
		}
		if err := add(p.name, text); err != nil {
			return fmt.Errorf("write support bundle: %w", err)
		}
	}
	if b.failed != nil {
		err = add("errors.txt", []byte(strings.Join(b.failed, "\n")+"\n"))
	} else {
		err = nil
	}
	if err = errors.Join(err, tw.Close(), zw.Close()); err != nil {
		return fmt.Errorf("write support bundle: %w", err)
	}
	return nil
}

type bundle struct {
	cfg     *config.Config
	version string
	api     *client.Client
	failed  []string
}

func (b *bundle) parts(all []record.Record, log bool) []part {
	parts := []part{
		{"README", func(context.Context) ([]byte, error) { return []byte(readme), nil }},
		{"versions.json", b.versions},
		{"config.json", func(context.Context) ([]byte, error) { return asJSON(b.cfg) }},
		{"doctor.json", func(ctx context.Context) ([]byte, error) { return asJSON(doctor.Examine(ctx, b.cfg, "")) }},
		{"sandboxes.json", func(context.Context) ([]byte, error) {
			list := []sandbox{}
			for _, r := range all {
				list = append(list, redacted(r))
			}
			return asJSON(list)
		}},
		{"system-info.json", func(ctx context.Context) ([]byte, error) { return answer(ctx, b.api.System().Info) }},
		{"rules.txt", b.filtered("iptables-save")},
		{"sets.txt", b.filtered("ipset", "save")},
		{"links.txt", b.filtered("ip", "-o", "-s", "link")},
		{"routes.txt", b.filtered("ip", "-o", "route")},
		{"mounts.txt", b.mounts},
		{"cgroups.txt", b.cgroups},
	}
	if log {
		parts = append(parts, part{"journal.txt", func(ctx context.Context) ([]byte, error) {
			if _, err := os.Stat("/run/systemd/journal"); err != nil {
				return nil, errors.New("this host has no systemd journal; the log is where sandboxd's stderr goes")
			}
			text, err := run(ctx, "journalctl", "--unit", "sandboxd", "--lines", fmt.Sprint(journalSize), "--no-pager", "--output",
				"short-iso")
			return openLog(text), err
		}})
	}
	return parts
}

// records come from a backup of the daemon, or from the store if no daemon runs.
func (b *bundle) records(ctx context.Context) ([]record.Record, error) {
	dir, err := os.MkdirTemp("", "sandboxd-support-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	var archive bytes.Buffer
	if err := b.api.System().Backup(ctx, &archive); err != nil {
		path := filepath.Join(b.cfg.StateDir, "sandboxd.db")
		if _, serr := os.Stat(path); errors.Is(serr, fs.ErrNotExist) {
			return nil, nil // no daemon ever ran: there are no records
		}
		all, serr := store.Records(path)
		if serr != nil {
			serr = errors.Join(err, serr)
		}
		return all, serr
	}
	path := filepath.Join(dir, "sandboxd.db")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	_, err = backup.Read(&archive, f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return store.Records(path)
}

func (b *bundle) versions(ctx context.Context) ([]byte, error) {
	v := map[string]string{"sandboxd": b.version}
	for _, p := range []string{"runsc", "sandboxd-runc", "agent/sandbox-agent"} {
		info, err := buildinfo.ReadFile(filepath.Join(b.cfg.LibexecDir, p))
		if err != nil {
			v[p] = err.Error()
			continue
		}
		v[p] = info.GoVersion
		for _, d := range info.Deps {
			if d.Path == "gvisor.dev/gvisor" || d.Path == "github.com/opencontainers/runc" {
				v[p] += " " + d.Path + " " + d.Version
			}
		}
	}
	for name, argv := range map[string][]string{
		"uname": {"uname", "-a"}, "iptables": {"iptables", "-V"},
		"systemd": {"systemctl", "--version"},
	} {
		out, _ := run(ctx, argv...)
		v[name] = strings.TrimSpace(string(out))
	}
	release, _ := os.ReadFile("/etc/os-release")
	v["os"] = string(release)
	return asJSON(v)
}

// filtered is the output of a command, reduced to the lines that name something of this
// instance: the others may be private.
func (b *bundle) filtered(argv ...string) func(context.Context) ([]byte, error) {
	i := b.cfg.Instance
	return func(ctx context.Context) ([]byte, error) {
		out, err := run(ctx, argv...)
		return keep(out, i.Chain(""), i.Set(""), i.LinkPrefix(), b.cfg.Network.Pool.Masked().String(), i.Gateway().String()), err
	}
}

func (b *bundle) mounts(context.Context) ([]byte, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	return keep(text, " "+b.cfg.StateDir, " "+b.cfg.RunDir), err
}

// cgroups lists the groups of sandboxes and how many tasks each has.
func (b *bundle) cgroups(ctx context.Context) ([]byte, error) {
	const top, depth = "/sys/fs/cgroup", 6
	var out bytes.Buffer
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if cerr := ctx.Err(); cerr != nil {
			return cerr
		}
		if err != nil || !d.IsDir() {
			return nil //nolint:nilerr // groups come and go
		}
		if id := d.Name(); record.IsID(id) && strings.HasPrefix(id, b.cfg.Instance.String()) {
			tasks, _ := os.ReadFile(filepath.Join(path, "pids.current"))
			fmt.Fprintf(&out, "%s %s\n", path, strings.TrimSpace(string(tasks)))
			return fs.SkipDir
		}
		if strings.Count(strings.TrimPrefix(path, top), "/") >= depth {
			return fs.SkipDir
		}
		return nil
	})
	return out.Bytes(), err
}

func keep(text []byte, any ...string) []byte {
	var out bytes.Buffer
	for line := range bytes.Lines(text) {
		for _, s := range any {
			if bytes.Contains(line, []byte(s)) {
				out.Write(line)
				break
			}
		}
	}
	return out.Bytes()
}

// run is the output of a command. If it is too long, its beginning is cut off.
func run(ctx context.Context, argv ...string) ([]byte, error) {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
	return out[max(0, len(out)-maxMember):], err
}

func answer[T any](ctx context.Context, ask func(context.Context) (T, error)) ([]byte, error) {
	v, err := ask(ctx)
	if err != nil {
		return nil, err
	}
	return asJSON(v)
}

func asJSON(v any) ([]byte, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	return append(b, '\n'), err
}
