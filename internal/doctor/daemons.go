package doctor

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// lastingStates asks the daemon for states that last until an operator ends them.
var lastingStates = check{
	name: "lasting-states", protects: "creates, expiry and the sweep, which stand while such a state lasts", root: true,
	run: func(ctx context.Context, h *host) Finding {
		if h.daemon() == 0 {
			return skipped("no daemon runs that could be asked")
		}
		c, err := client.New("unix://"+h.cfg.Listen.Socket, "")
		if err != nil {
			return skipped("%v", err)
		}
		defer c.Close()
		info, err := c.System().Info(ctx)
		if err != nil {
			return skipped("%v", err)
		}
		return judgeLasting(info)
	},
}

// judgeLasting says in which such states a daemon is.
func judgeLasting(i wire.SystemInfo) Finding {
	var said, mend []string
	if i.NoSweep != "" {
		said = append(said, "nothing is swept and no sandbox expires: "+i.NoSweep)
		mend = append(mend, "do what is said of the state")
	}
	if i.DrainingSince != nil {
		said = append(said, "the host drains since "+i.DrainingSince.Format(time.RFC3339))
		mend = append(mend, "sandboxctl system drain --off")
	}
	if n := len(i.Unreadable); n > 0 {
		said = append(said, fmt.Sprintf("%s cannot be read: %s", errs.Count(n, "record", "records"), strings.Join(i.Unreadable, " ")))
		mend = append(mend, "sandboxctl rm, snapshot rm or image rm")
	}
	detail, fix := strings.Join(said, ". "), strings.Join(mend, "; ")
	switch {
	case len(said) == 0:
		return ok("the daemon is in none")
	case i.NoSweep != "":
		return fail(fix, "%s", detail)
	}
	return warn(fix, "%s", detail)
}

// A daemon is a sandboxd that runs on this host.
type daemon struct {
	instance string
	pid      int
	config   string // file that its command line names; "": none, or it is unknown
}

func (d daemon) String() string {
	s := fmt.Sprintf("instance %s, pid %d", d.instance, d.pid)
	if d.config != "" {
		s += ", --config " + d.config
	}
	return s
}

// Read loads the configuration for which the host is to be checked, and reports which
// that is: the file at path, or without one that of the only daemon that runs, or else the
// defaults.
func Read(path string) (*config.Config, Finding, error) { return read(path, daemons("/run", "/proc")) }

func read(path string, running []daemon) (*config.Config, Finding, error) {
	what := "read " + path
	if path == "" {
		what = "the defaults: there is no /etc/sandboxd/config.toml, and no --config"
		if len(running) == 1 && running[0].config != "" {
			path = running[0].config
			what = "read " + path + ", which the running daemon uses"
		}
	}
	cfg, err := config.Load(path)
	if err != nil {
		return nil, Finding{}, err
	}
	what += fmt.Sprintf("; instance %s, ", cfg.Instance)
	own, others := "no daemon of it runs", ""
	for _, d := range running {
		if d.instance == cfg.Instance.String() {
			own = fmt.Sprintf("its daemon runs, pid %d", d.pid)
		} else {
			others += fmt.Sprintf("; another daemon runs (%s)", d)
		}
	}
	f := ok("%s", what+own+others)
	if len(cfg.Warnings) > 0 {
		f = warn("edit the file: it still works, and a later release refuses it", "%s; "+
			"%s", what+own+others, strings.Join(cfg.Warnings, "; "))
	}
	f.Check, f.Protects = "configuration", "the other checks: they are about this configuration"
	return cfg, f, nil
}

// lockPrefix begins the name of the lock that each daemon holds, by its instance.
const lockPrefix = "sandboxd-"

// daemons lists the daemons of this host, by the locks in run that processes hold.
func daemons(run, proc string) (all []daemon) {
	locks, _ := filepath.Glob(filepath.Join(run, lockPrefix+"?.lock")) // its only error is a bad pattern
	for _, lock := range locks {
		pid := holder(lock)
		if pid == 0 {
			continue
		}
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(lock), lockPrefix), ".lock")
		all = append(all, daemon{name, pid, configOf(filepath.Join(proc, fmt.Sprint(pid)))})
	}
	return all
}

// holder is the pid of the process that holds a lock file; 0 if there is none or it is
// unknown.
func holder(lock string) int {
	f, err := os.Open(lock)
	if err != nil {
		return 0
	}
	defer f.Close()
	l := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &l); err != nil || l.Type == unix.F_UNLCK {
		return 0
	}
	return int(l.Pid)
}

// configOf is the argument of --config of a process, which has its directory in /proc at
// dir.
func configOf(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return ""
	}
	args, path := strings.Split(string(bytes.TrimSuffix(b, []byte{0})), "\x00"), ""
	for i, arg := range args {
		if value, ok := strings.CutPrefix(arg, "--config="); ok {
			path = value
		} else if arg == "--config" && i+1 < len(args) {
			path = args[i+1]
		}
	}
	if path != "" && !filepath.IsAbs(path) {
		cwd, err := os.Readlink(filepath.Join(dir, "cwd"))
		if err != nil {
			return ""
		}
		path = filepath.Join(cwd, path)
	}
	return path
}
