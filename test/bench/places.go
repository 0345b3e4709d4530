package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// benchImage has the servers and databases that are measured.
const benchImage = "bench"

// A place runs programs of the image: a sandbox, or the host. In both /mnt is a directory
// in which they may write, and /mnt/guest the program of the bench.
type place struct {
	// run runs a program to its end and returns what it printed.
	run func(ctx context.Context, argv ...string) (string, error)
	// start starts a program that runs until stop.
	start func(ctx context.Context, argv ...string) (stop func() error, err error)
}

// roomy makes a sandbox with the host's CPUs, as the programs on the host have them. It is
// not one-shot: those make nothing durable.
func roomy(ctx context.Context, b *bench, rt string) (id string, err error) {
	if err := b.ensureImage(ctx, benchImage); err != nil {
		return "", err
	}
	r := request(rt)
	r.Image.URI = benchImage
	delete(r.Extensions, wire.ExtOneShot)
	r.ResourceLimits = map[string]string{"cpu": strconv.Itoa(runtime.NumCPU()), "memory": "1Gi"}
	sb, err := b.createOf(ctx, r)
	if err != nil {
		return "", err
	}
	return sb.ID, putGuest(ctx, b, sb.ID, "/mnt/guest")
}

// inside is a sandbox as a place.
func inside(b *bench, id string) place {
	return place{
		run: func(ctx context.Context, argv ...string) (string, error) {
			p, err := b.cl.Start(ctx, id, client.Command{Argv: argv})
			if err != nil {
				return "", err
			}
			var out, words bytes.Buffer
			exit, err := p.Wait(&out, &words)
			if err == nil && exit.Code != 0 {
				err = fmt.Errorf("%q: exit status %d: %s", argv, exit.Code, words.Bytes())
			}
			return out.String(), err
		},
		start: func(ctx context.Context, argv ...string) (func() error, error) {
			p, err := b.cl.Start(ctx, id, client.Command{Argv: argv})
			if err != nil {
				return nil, err
			}
			return func() error {
				err := p.Signal(context.WithoutCancel(ctx), "SIGINT")
				_, waitErr := p.Wait(io.Discard, io.Discard)
				return errors.Join(err, waitErr)
			}, nil
		},
	}
}

// enter, a script, runs a program of a layer on the host, in a mount namespace with the
// layer read-only at its root. It keeps no other mount: a program that outlives the bench
// does not hold the pool. Its arguments are the layer, an empty directory, and what is at
// /mnt.
const enter = `mount --bind "$1" "$2"
mount --bind "$3" "$2/mnt"
mount --rbind /proc "$2/proc"
mount --rbind /dev "$2/dev"
mount -t tmpfs tmpfs "$2/tmp"
mount -o remount,bind,ro "$2"
cd "$2"
mkdir tmp/host
pivot_root . tmp/host
shift 3
exec chroot . sh -ec 'umount --lazy /tmp/host; exec "$@"' sh "$@"`

// outside is the host as a place: the same programs from the same layer. Its /mnt lies
// beside the state directory's other files, on the same file system. The caller calls end.
func outside(ctx context.Context, b *bench, id string) (p place, end func() error, err error) {
	in, err := b.cl.Inspect(ctx, id)
	if err != nil {
		return p, nil, err
	}
	layer := filepath.Join(inst.StateDir(), "layers", in.Layers[0][len("sha256:"):])
	dir, err := os.MkdirTemp(inst.StateDir(), "bench-outside-")
	if err != nil {
		return p, nil, err
	}
	root, disk := filepath.Join(dir, "root"), filepath.Join(dir, "disk")
	if err := errors.Join(os.Mkdir(root, 0o755), os.Mkdir(disk, 0o755)); err != nil {
		return p, nil, err
	}
	if out, err := exec.CommandContext(ctx, "cp", guestProgram(b), filepath.Join(disk, "guest")).CombinedOutput(); err != nil {
		return p, nil, fmt.Errorf("copy the guest: %w: %s", err, out)
	}
	command := func(ctx context.Context, argv []string) *exec.Cmd {
		return exec.CommandContext(ctx, "unshare", append([]string{"--mount", "sh", "-ec", enter, "sh", layer, root, disk}, argv...)...)
	}
	p.run = func(ctx context.Context, argv ...string) (string, error) {
		var words bytes.Buffer
		cmd := command(ctx, argv)
		cmd.Stderr = &words
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%q on the host: %w: %s", argv, err, words.Bytes())
		}
		return string(out), err
	}
	p.start = func(ctx context.Context, argv ...string) (func() error, error) {
		cmd := command(ctx, argv)
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		return func() error {
			err := cmd.Process.Signal(syscall.SIGINT)
			cmd.Wait() //nolint:errcheck // of the signal
			return err
		}, nil
	}
	return p, func() error { return os.RemoveAll(dir) }, nil
}

// Durable rows have a pool of their own, small enough to be written through. The daemon's is
// kept meanwhile.
const durablePool = "2Gi"

var keptPool = pool.Image(inst.StateDir()) + ".kept"

// durable: writes that must survive a power cut, in a sandbox and on the host's own file
// system. The rows with _new are of a pool that was just made; the others of the same one
// after each block of its file was written once, as a pool is after a while.
func durable(ctx context.Context, b *bench) (err error) {
	file := pool.Image(inst.StateDir())
	if err := b.stop(); err != nil {
		return err
	}
	if err := os.Rename(file, keptPool); err != nil {
		return err
	}
	b.pool = durablePool
	defer func() {
		b.pool = poolSize
		err = errors.Join(err, b.stop(), os.Rename(keptPool, file), b.restart(context.WithoutCancel(ctx), 0))
	}()
	if err := b.restart(ctx, 0); err != nil {
		return err
	}
	if err := durableRows(ctx, b, "_new"); err != nil {
		return err
	}
	if err := b.stop(); err != nil {
		return err
	}
	// The same bytes again, in place. The pool is unmounted.
	out, err := exec.CommandContext(ctx, "dd", "if="+file, "of="+file, "bs=4M", "conv=notrunc,fsync").CombinedOutput()
	if err != nil {
		return fmt.Errorf("write the pool through: %w: %s", err, out)
	}
	if err := b.restart(ctx, 0); err != nil {
		return err
	}
	return durableRows(ctx, b, "")
}

// insert makes one row in each transaction, for a second, and prints how many.
const insert = `import os, sqlite3, time
db = sqlite3.connect("/mnt/sqlite", isolation_level=None)
db.execute("create table t (id integer primary key, v text)")
n, start = 0, time.monotonic()
while time.monotonic() - start < 1:
    db.execute("insert into t (v) values (?)", ("x" * 100,))
    n += 1
print(n)
db.close()
os.remove("/mnt/sqlite")`

func durableRows(ctx context.Context, b *bench, suffix string) error {
	for _, rt := range runtimes {
		err := bothPlaces(ctx, b, rt, func(in, out place) error {
			for _, w := range []struct {
				name string
				argv []string
			}{
				{"fsync_append_4k", []string{"/mnt/guest", "append", "/mnt/appended"}},
				{"sqlite_insert", []string{"python3", "-c", insert}},
			} {
				p := pair{in, out, rt, b.times(5, 1), number}
				if err := p.row(ctx, b, w.name+suffix, goal{minRatio: 0.6}, w.argv...); err != nil {
					return err
				}
			}
			return postgresRows(ctx, b, suffix, pair{in, out, rt, b.times(4, 1), after("tps = ")})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// bothPlaces calls f with a sandbox and the host.
func bothPlaces(ctx context.Context, b *bench, rt string, f func(in, out place) error) (err error) {
	id, err := roomy(ctx, b, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(ctx, id)) }()
	out, end, err := outside(ctx, b, id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	return f(inside(b, id), out)
}

// A pair compares a program that prints a rate in a sandbox and on the host.
type pair struct {
	in, out place
	rt      string
	n       int // turns
	rate    func(said string) (float64, error)
}

// row runs the program in both places, in turns.
func (p pair) row(ctx context.Context, b *bench, name string, g goal, argv ...string) error {
	of := func(at place) func() (float64, error) {
		return func() (float64, error) {
			said, err := at.run(ctx, argv...)
			if err != nil {
				return 0, err
			}
			return p.rate(said)
		}
	}
	a, c, err := turns(p.n, 1, of(p.in), of(p.out))
	if err != nil {
		return err
	}
	b.add(row(name, p.rt, "1/s", a, "the same on the host's own file system", c, g))
	return nil
}

func number(said string) (float64, error) { return strconv.ParseFloat(strings.TrimSpace(said), 64) }

// after returns what stands behind the words, up to the next space.
func after(words string) func(said string) (float64, error) {
	return func(said string) (float64, error) {
		_, rest, found := strings.Cut(said, words)
		if fields := strings.Fields(rest); found && len(fields) > 0 {
			return strconv.ParseFloat(fields[0], 64)
		}
		return 0, fmt.Errorf("no %q in %q", words, said)
	}
}

// postgresRows: transactions of pgbench, with a server in the same place.
func postgresRows(ctx context.Context, b *bench, suffix string, p pair) (err error) {
	for _, at := range []place{p.in, p.out} {
		stop, startErr := postgres(ctx, at)
		if startErr != nil {
			return startErr
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	pgbench := asPostgres("pgbench", "--host=/mnt/pg", "--no-vacuum", "--time=1")
	err = p.row(ctx, b, "pgbench_write"+suffix, goal{minRatio: 0.6}, append(pgbench, "postgres")...)
	if err != nil || suffix != "" {
		return err
	}
	// One client and its server are two to three times as fast on one CPU as on two, and the
	// kernel takes either. Four keep both CPUs busy.
	return p.row(ctx, b, "postgres_read", goal{}, append(pgbench, "--select-only", "--client=4", "postgres")...)
}

// asPostgres is the command line of one of PostgreSQL's programs, which refuse root.
func asPostgres(program string, args ...string) []string {
	return append([]string{
		"setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "/opt/postgresql/" + program,
	}, args...)
}

// postgres starts a server with the tables of pgbench.
func postgres(ctx context.Context, p place) (stop func() error, err error) {
	for _, argv := range [][]string{
		{"install", "--directory", "--owner=postgres", "/mnt/pg"},
		asPostgres("initdb", "--no-sync", "--auth=trust", "--pgdata=/mnt/pg/data"),
	} {
		if _, err := p.run(ctx, argv...); err != nil {
			return nil, err
		}
	}
	stop, err = p.start(ctx, asPostgres("postgres", "-D", "/mnt/pg/data", "-k", "/mnt/pg", "-h", "")...)
	if err != nil {
		return nil, err
	}
	_, err = p.run(ctx, "sh", "-c", "until /opt/postgresql/pg_isready --quiet --host=/mnt/pg; do sleep 0.05; done")
	if err == nil {
		_, err = p.run(ctx, asPostgres("pgbench", "--host=/mnt/pg", "--initialize", "--quiet", "--scale=2", "postgres")...)
	}
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}

// server answers two bytes to everything.
const server = `require("http").createServer((q, s) => s.end("ok")).listen(Number(process.argv[1]), process.argv[2])`

// nodeEndpoint: requests for a second to a server of node in a sandbox, by ab on the host
// with 20 connections, against the same server on the host.
func nodeEndpoint(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		if err := nodeEndpointOn(ctx, b, rt); err != nil {
			return err
		}
	}
	return nil
}

func nodeEndpointOn(ctx context.Context, b *bench, rt string) (err error) {
	id, err := roomy(ctx, b, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(ctx, id)) }()
	host, end, err := outside(ctx, b, id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	in, err := b.cl.Inspect(ctx, id)
	if err != nil {
		return err
	}
	local, err := freePort()
	if err != nil {
		return err
	}
	var rates [2]func() (float64, error)
	for i, s := range []struct {
		place
		address string
	}{{inside(b, id), net.JoinHostPort(in.Host["address"], strconv.Itoa(guestPort))}, {host, local}} {
		ip, port, err := net.SplitHostPort(s.address)
		if err != nil {
			return err
		}
		stop, startErr := s.start(ctx, "node", "-e", server, port, ip)
		if startErr != nil {
			return startErr
		}
		defer func() { err = errors.Join(err, stop()) }()
		if err := (site{"http://" + s.address, &http.Client{}}).await(ctx); err != nil {
			return err
		}
		rates[i] = func() (float64, error) {
			said, err := host.run(ctx, "ab", "-q", "-k", "-c", "20", "-t", "1", "-n", "1000000", "http://"+s.address+"/")
			if err != nil {
				return 0, err
			}
			return after("Requests per second:")(said)
		}
	}
	a, c, err := turns(b.times(6, 1), 1, rates[0], rates[1])
	if err != nil {
		return err
	}
	b.add(row("node_endpoint", rt, "1/s", a, "the same server on the host", c, goal{}))
	return nil
}
