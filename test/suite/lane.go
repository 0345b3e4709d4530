package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// instances are the two instances of sandboxd of each lane: one for its daemon, one for a
// second daemon. The default pair, "tu", is not among them, so that a test run by hand
// does not wait for the suite. Letters that tests of packages use are not among them
// either.
var instances = []string{"bc", "fh", "qr", "op", "lm", "jk"}

func checkLanes(n int) error {
	if n < 1 || n > len(instances) {
		return fmt.Errorf("%d lanes: want 1 to %d (-lanes)", n, len(instances))
	}
	return nil
}

// carryOut runs the jobs, n at a time. The longest job that may begin comes first. Jobs
// that must run alone run after all others have ended.
func carryOut(jobs []*job, n int, logs string) error {
	slices.SortStableFunc(jobs, func(a, b *job) int { return cmp.Compare(b.cost, a.cost) })
	var side, alone []*job
	for _, j := range jobs {
		if j.alone {
			alone = append(alone, j)
		} else {
			side = append(side, j)
		}
	}
	q := &queue{waiting: side, logs: logs, owner: map[string]int{}}
	q.changed.L = &q.mu
	q.drain(n)
	q.waiting = alone
	q.drain(1)
	return q.err
}

// queue hands jobs to lanes.
type queue struct {
	logs string

	mu      sync.Mutex
	changed sync.Cond // signalled when a job has ended
	waiting []*job
	running []*job
	owner   map[string]int // the lane that has imported an image
	err     error          // why a job could not be run
}

// drain runs all waiting jobs in n lanes.
func (q *queue) drain(n int) {
	var lanes sync.WaitGroup
	for i := range n {
		lanes.Go(func() {
			runtime.LockOSThread() // a job dies with the thread that started it
			for j := q.next(i); j != nil; j = q.next(i) {
				err := j.run(instances[i], q.logs)
				q.mu.Lock()
				q.running = slices.DeleteFunc(q.running, func(r *job) bool { return r == j })
				if err != nil && q.err == nil {
					q.err = fmt.Errorf("%s: %w", j.name, err)
				}
				q.changed.Broadcast()
				q.mu.Unlock()
			}
		})
	}
	lanes.Wait()
}

// next takes the job that a lane does next; nil if none is left.
func (q *queue) next(lane int) *job {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		if i := q.choose(lane); i >= 0 {
			j := q.waiting[i]
			q.waiting = slices.Delete(q.waiting, i, i+1)
			q.running = append(q.running, j)
			if _, ok := q.owner[j.image]; !ok && j.image != "" {
				q.owner[j.image] = lane
			}
			return j
		}
		if len(q.waiting) == 0 {
			return nil
		}
		q.changed.Wait()
	}
}

// choose returns the index of the first waiting job that need not wait for another; -1 if
// there is none. Jobs with an image that the lane has imported come first, and jobs with an
// image that another lane has imported come last.
func (q *queue) choose(lane int) int {
	first, last := -1, -1
	for i, j := range q.waiting {
		if q.blocked(j) {
			continue
		}
		switch owner, owned := q.owner[j.image]; {
		case owned && owner == lane:
			return i
		case owned && last < 0:
			last = i
		case !owned && first < 0:
			first = i
		}
	}
	if first >= 0 {
		return first
	}
	return last
}

func (q *queue) blocked(j *job) bool {
	first := func(o *job) bool { return o.name == j.after }
	return j.after != "" && (slices.ContainsFunc(q.waiting, first) || slices.ContainsFunc(q.running, first))
}

// run runs the job in the lane of a pair of instances and prints how it ended.
func (j *job) run(pair, logs string) error {
	log, err := os.Create(filepath.Join(logs, strings.NewReplacer("/", "_", " ", "_").Replace(j.name)+".json"))
	if err != nil {
		return err
	}
	defer log.Close()
	argv, err := j.command()
	if err != nil {
		return err
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Dir, cmd.Stdout, cmd.Stderr = j.dir, log, log
	cmd.Env = append(append(os.Environ(), "SANDBOXD_TEST_INSTANCE="+pair), j.env...)
	said := &bytes.Buffer{}
	if j.script {
		cmd.Stdout, cmd.Stderr = said, said
	}
	start := time.Now()
	err = cmd.Run()
	took := time.Since(start)
	how := "pass"
	if err != nil {
		how = "fail"
	}
	if j.script {
		if err := scriptEvents(log, j.name, said, how, took); err != nil {
			return err
		}
	}
	used := 0.0 // by the job and the children it waited for, not by daemons that outlive a test
	if cmd.ProcessState != nil {
		used = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	}
	fmt.Printf("%s %6.1fs  CPU %6.1fs  %s\n", how, took.Seconds(), used, j.name)
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		return err
	}
	return nil
}

// scriptEvents writes a script's output as the events of a test, so that the script is
// counted.
func scriptEvents(log io.Writer, name string, said *bytes.Buffer, how string, took time.Duration) error {
	type event struct {
		Action, Package, Test, Output string
		Elapsed                       float64
	}
	to := json.NewEncoder(log)
	for line := range strings.Lines(said.String()) {
		if err := to.Encode(event{Action: "output", Package: "script", Test: name, Output: line}); err != nil {
			return err
		}
	}
	return to.Encode(event{Action: how, Package: "script", Test: name, Elapsed: took.Seconds()})
}

// command is the command line of the job. A test program is started by test2json, which
// turns its output into events, and by this program (becomeJob).
func (j *job) command() ([]string, error) {
	if j.pkg == "" {
		return j.argv, nil
	}
	self, err := os.Executable()
	where := onThisHost
	if j.lane {
		where = inLane
	}
	return append([]string{j.convert, "-t", "-p", j.pkg, self, jobCommand, where}, j.argv...), err
}

// jobCommand is the first argument of this program when it becomes a job. The second
// argument says where the job runs.
const (
	jobCommand = "job"
	inLane     = "in-lane"
	onThisHost = "on-this-host"
)

// becomeJob executes the program of argv, in a lane if where is inLane, with no signal
// ignored (test2json ignores SIGINT). It returns only on failure.
func becomeJob(where string, argv []string) error {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT) // exec resets a handler to the default
	if where == inLane {
		if err := makeLane(); err != nil {
			return err
		}
	}
	return syscall.Exec(argv[0], argv, os.Environ())
}

// makeLane gives this thread, and the program that it executes, a host of their own. Its
// default route leads nowhere.
func makeLane() error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a network and a mount namespace: %w", err)
	}
	if err := hosttest.OwnHost(); err != nil {
		return err
	}
	for _, args := range []string{
		"link add lane type veth peer name nowhere", "address add 192.0.2.2/24 dev lane", "link set lane up", "link set nowhere up",
		"neighbour add 192.0.2.1 lladdr 02:00:00:00:00:01 dev lane", "route add default via 192.0.2.1",
	} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", args, err, out)
		}
	}
	return nil
}
