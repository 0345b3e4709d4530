package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// Durable rows have a pool of their own, small enough to be written through.
const durablePool = "2Gi"

// durable: writes that must survive a power cut, in a sandbox and on the host's own file
// system. The rows with _new are of a pool that was just made; the others of the same one
// after each block of its file was written once, as a pool is after a while.
func durable(ctx context.Context, b *bench) (err error) {
	kept := pool.Image(inst.StateDir()) + ".kept"
	if err := b.stop(); err != nil {
		return err
	}
	if err := os.Rename(pool.Image(inst.StateDir()), kept); err != nil {
		return err
	}
	b.pool = durablePool
	defer func() {
		b.pool = poolSize
		err = errors.Join(err, b.stop(), os.Rename(kept, pool.Image(inst.StateDir())), b.restart(context.WithoutCancel(ctx), 0))
	}()
	if err := b.restart(ctx, 0); err != nil {
		return err
	}
	if err := b.durableRows(ctx, "_new"); err != nil {
		return err
	}
	if err := b.stop(); err != nil {
		return err
	}
	file := pool.Image(inst.StateDir())
	// The same bytes again, in place. The pool is unmounted.
	out, err := exec.CommandContext(ctx, "dd", "if="+file, "of="+file, "bs=4M", "conv=notrunc,fsync").CombinedOutput()
	if err != nil {
		return fmt.Errorf("write the pool through: %w: %s", err, out)
	}
	if err := b.restart(ctx, 0); err != nil {
		return err
	}
	return b.durableRows(ctx, "")
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

func (b *bench) durableRows(ctx context.Context, suffix string) error {
	for _, rt := range runtimes {
		err := b.bothPlaces(ctx, rt, func(in, out place) error {
			for _, w := range []struct {
				name string
				argv []string
			}{
				{"fsync_append_4k", []string{"/mnt/guest", "append", "/mnt/appended"}},
				{"sqlite_insert", []string{"python3", "-c", insert}},
			} {
				err := b.ratesOf(ctx, w.name+suffix, rt, b.times(5, 1), in, out, goal{minRatio: 0.6}, number, w.argv...)
				if err != nil {
					return err
				}
			}
			return b.postgresRows(ctx, rt, suffix, in, out)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// bothPlaces calls f with a sandbox and the host.
func (b *bench) bothPlaces(ctx context.Context, rt string, f func(in, out place) error) (err error) {
	id, err := b.roomy(ctx, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(ctx, id)) }()
	out, end, err := b.outside(ctx, id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	return f(b.inside(id), out)
}

// ratesOf runs a program that prints a rate in both places, in turns.
func (b *bench) ratesOf(
	ctx context.Context, name, rt string, n int, in, out place, g goal, rate func(string) (float64, error), argv ...string,
) error {
	of := func(p place) func() (float64, error) {
		return func() (float64, error) {
			said, err := p.run(ctx, argv...)
			if err != nil {
				return 0, err
			}
			return rate(said)
		}
	}
	a, c, err := turns(n, 1, of(in), of(out))
	if err != nil {
		return err
	}
	b.add(row(name, rt, "1/s", a, "the same on the host's own file system", c, g))
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
func (b *bench) postgresRows(ctx context.Context, rt, suffix string, in, out place) (err error) {
	for _, p := range []place{in, out} {
		stop, err := postgres(ctx, p)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	pgbench := asPostgres("pgbench", "--host=/mnt/pg", "--no-vacuum", "--time=1")
	err = b.ratesOf(ctx, "pgbench_write"+suffix, rt, b.times(4, 1), in, out, goal{minRatio: 0.6}, after("tps = "),
		append(pgbench, "postgres")...)
	if err != nil || suffix != "" {
		return err
	}
	// One client and its server are two to three times as fast on one CPU as on two, and the
	// kernel takes either. Four keep both CPUs busy.
	return b.ratesOf(ctx, "postgres_read", rt, b.times(4, 1), in, out, goal{}, after("tps = "),
		append(pgbench, "--select-only", "--client=4", "postgres")...)
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
