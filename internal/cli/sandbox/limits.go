package sandbox

import (
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// limits are the flags of run, create and update that bound a sandbox.
type limits struct {
	memory, cpu, cpus, disk string
	pids, pidsLimit, shares int64
	readBps, writeBps       string
	readIOPS, writeIOPS     string
}

func (l *limits) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVarP(&l.memory, "memory", "m", "", "memory limit: 256Mi, 1Gi; docker's 256m and 1g mean the same")
	f.StringVar(&l.cpu, "cpu", "", "CPU limit: 500m, 0.5 or 2")
	f.StringVar(&l.cpus, "cpus", "", "number of CPUs, the same as --cpu (docker's name)")
	f.Int64Var(&l.shares, "cpu-shares", 0, "relative weight among sandboxes when CPU time is short: 2 to 262144 (default 1024)")
	f.Int64Var(&l.pids, "pids", 0, "limit on processes and threads")
	f.Int64Var(&l.pidsLimit, "pids-limit", 0, "the same as --pids (docker's name)")
	f.StringVar(&l.disk, "disk", "", "disk limit: how much the sandbox may write, such as 1Gi")
	f.StringVar(&l.readBps, "io-read-bps", "",
		"limit on reading from the host's disks, in bytes per second, such as 10Mi; max for no limit")
	f.StringVar(&l.writeBps, "io-write-bps", "",
		"limit on writing to the host's disks, in bytes per second; on cgroup v1 for direct and synced writes only")
	f.StringVar(&l.readIOPS, "io-read-iops", "", "limit on reads from the host's disks, in operations per second")
	f.StringVar(&l.writeIOPS, "io-write-iops", "", "limit on writes to the host's disks, in operations per second")
}

// into writes the limits that were given into m, the resourceLimits of a request.
func (l *limits) into(m map[string]string) error {
	if l.cpu != "" && l.cpus != "" || l.pids != 0 && l.pidsLimit != 0 {
		return errs.New(errs.Invalid, "--cpu and --cpus, and --pids and --pids-limit, are the same; give one of them")
	}
	number := func(n int64) string {
		if n == 0 {
			return ""
		}
		return strconv.FormatInt(n, 10)
	}
	for k, v := range map[string]string{
		"memory": command.Size(l.memory), "disk": command.Size(l.disk), "cpu": l.cpu + l.cpus,
		"pids": number(l.pids + l.pidsLimit), "cpuShares": number(l.shares),
		"ioReadBps": command.Size(l.readBps), "ioWriteBps": command.Size(l.writeBps),
		"ioReadIops": l.readIOPS, "ioWriteIops": l.writeIOPS,
	} {
		if v != "" {
			m[k] = v
		}
	}
	return nil
}
