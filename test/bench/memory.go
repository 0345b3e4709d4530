package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/client"
)

// sample prints the memory of PID 1 of a sandbox, in kB, again and again: gVisor keeps
// no high-water mark.
const sample = `while :; do
  while read -r key kb _; do [ "$key" = VmRSS: ] && echo "$kb"; done </proc/1/status
  sleep 0.02
done`

// agentPeak runs f and returns the most memory that the agent of a sandbox had during f,
// in MiB. It slows f down.
func (b *bench) agentPeak(ctx context.Context, id string, f func() error) (float64, error) {
	p, err := b.cl.Start(ctx, id, client.Command{Argv: []string{"sh", "-c", sample}})
	if err != nil {
		return 0, err
	}
	var out bytes.Buffer
	ended := make(chan error, 1)
	go func() {
		_, err := p.Wait(&out, io.Discard)
		ended <- err
	}()
	err = errors.Join(f(), p.Signal(ctx, "SIGKILL"), <-ended)
	most := int64(0)
	for sc := bufio.NewScanner(&out); sc.Scan(); {
		kb, _ := strconv.ParseInt(sc.Text(), 10, 64) // the last line may be cut
		most = max(most, kb)
	}
	if err == nil && most == 0 {
		err = fmt.Errorf("sandbox %s says nothing of the memory of its PID 1", id)
	}
	return float64(most) / 1024, err
}

// daemonPeak runs f and returns the most memory that the daemon had during f, in MiB.
func (b *bench) daemonPeak(f func() error) (float64, error) {
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", b.pid), []byte("5"), 0); err != nil { // proc(5): resets the peak
		return 0, err
	}
	err := f()
	return float64(processKB(b.pid, "status", "VmHWM:")) / 1024, err
}
