package systemd

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
)

// How long systemd may take to say something about the host: at the start of a daemon, and while a
// sandbox ends. A busy host was seen to take seconds.
const (
	startLimit = jobLimit
	endLimit   = 10 * time.Second
)

// Ending reports whether this host ends: a reboot, a power off, a kexec or a soft reboot has
// begun, so systemd ends everything. It knows before systemd ends the first process: that is of
// the same transaction as the start of shutdown.target (systemd.special(7)).
func Ending(ctx context.Context) (bool, error) {
	if !Booted() {
		return false, nil
	}
	// The last act of a shutdown: PID 1 is this program then, and answers nobody.
	if name, err := os.ReadFile("/proc/1/comm"); err == nil && strings.HasPrefix(string(name), "systemd-shutdow") {
		return true, nil
	}
	// SystemState of the manager is no answer: until the boot is over, old releases say "starting".
	p, err := unitProperties(ctx, "shutdown.target", endLimit)
	if err != nil {
		return false, fmt.Errorf("ask systemd whether the host ends: %w", err)
	}
	state, _ := p["ActiveState"].(string)
	job, _ := p["Job"].([]any) // its number and its path; number 0: there is none
	queued := len(job) > 0 && job[0] != uint32(0)
	return queued || state == "active" || state == "activating", nil
}

// Userspace names the present user space of the host. It is another one after a soft reboot, which
// leaves the kernel, its boot ID and /run as they are and ends all processes
// (systemd-soft-reboot.service(8)), and after a restart of a container that is the host.
func Userspace(ctx context.Context) (string, error) {
	if !Booted() {
		return startOfInit()
	}
	// Nothing but an end of the user space stops this target. A systemd that is executed anew keeps the ID.
	p, err := unitProperties(ctx, "sysinit.target", startLimit)
	if err != nil {
		return "", fmt.Errorf("ask systemd which user space this is: %w", err)
	}
	id, _ := p["InvocationID"].([]byte)
	if len(id) == 0 {
		return "", errors.New("ask systemd which user space this is: sysinit.target was never started")
	}
	return hex.EncodeToString(id), nil
}

func unitProperties(ctx context.Context, unit string, limit time.Duration) (map[string]any, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it did not answer within %s", limit))
	defer cancel()
	c, err := dbus.NewSystemdConnectionContext(ctx) // not by the bus, which may have ended
	if err != nil {
		return nil, errors.Join(context.Cause(ctx), err)
	}
	defer c.Close()
	p, err := c.GetUnitPropertiesContext(ctx, unit)
	if err != nil {
		return nil, errors.Join(context.Cause(ctx), err)
	}
	return p, nil
}

// startOfInit is when PID 1 began, in ticks since the boot: field 22 of proc_pid_stat(5).
func startOfInit() (string, error) {
	text, err := os.ReadFile("/proc/1/stat")
	if err != nil {
		return "", fmt.Errorf("read when PID 1 began: %w", err)
	}
	s := string(text)
	fields := strings.Fields(s[strings.LastIndex(s, ")")+1:]) // the name before may have spaces and parentheses
	if len(fields) < 20 {
		return "", fmt.Errorf("read when PID 1 began: /proc/1/stat has %d fields after the name", len(fields))
	}
	if _, err := strconv.ParseUint(fields[19], 10, 64); err != nil {
		return "", fmt.Errorf("read when PID 1 began: %w", err)
	}
	return "init-" + fields[19], nil
}

// ownUnit is the unit of this process, "" if it has none.
func ownUnit() string {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	return unitOf(string(text))
}

// unitOf finds the unit in the lines of /proc/PID/cgroup (cgroups(7)): the first service or scope on
// the way down. What lies below it is none of this systemd's.
func unitOf(lines string) string {
	for line := range strings.Lines(lines) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || parts[1] != "" && parts[1] != "name=systemd" {
			continue
		}
		for name := range strings.SplitSeq(parts[2], "/") {
			if strings.HasSuffix(name, ".service") || strings.HasSuffix(name, ".scope") {
				return name
			}
		}
	}
	return ""
}
