// Suite runs the tests of this repository side by side and writes the output of each job
// to build/test/JOB.json, in the form of `go test -json`. test/summary reads these files.
//
//	suite push    what `make test` runs
//	suite all     everything there is: `make test-all`
//
// A job (plan.go) is a check, a package, or one test of a large package. Jobs run in
// lanes, one at a time in each. A lane (lane.go) looks like a host of its own to a test:
// it has its own network, its own mounts and its own instances of sandboxd. Jobs that
// measure time run at the end, one after the other.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
)

func main() {
	if len(os.Args) > 3 && os.Args[1] == jobCommand {
		fmt.Fprintln(os.Stderr, "suite:", becomeJob(os.Args[2], os.Args[3:]))
		os.Exit(1)
	}
	lanes := flag.Int("lanes", min(runtime.NumCPU()+1, len(instances)), "how many jobs run at a time")
	part := flag.String("part", "", "K/N: run only the K-th of N parts of about the same length, which together are all jobs")
	only := flag.String("only", "", "run only jobs whose name matches this pattern")
	race := flag.Bool("race", false, "compile the tests below test/ with the race detector, too")
	flag.Parse()
	if flag.NArg() != 1 || flag.Arg(0) != "push" && flag.Arg(0) != "all" {
		fmt.Fprintln(os.Stderr, "usage: suite [-lanes N] [-part K/N] [-only PATTERN] push|all")
		os.Exit(2)
	}
	// Jobs start with no signal ignored, even if this process ignores some (nohup, `&`).
	// They die with this process.
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		fmt.Fprintln(os.Stderr, "suite:", <-stop)
		os.Exit(130)
	}()
	if err := run(flag.Arg(0) == "all", *race, *lanes, *only, *part); err != nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
		os.Exit(1)
	}
}

// run makes the plan and runs its jobs. It fails only if a job could not be run;
// test/summary judges the results of the tests.
func run(all, race bool, lanes int, only, part string) error {
	top, err := os.Getwd()
	if err != nil {
		return err
	}
	if err := checkLanes(lanes); err != nil {
		return err
	}
	logs := filepath.Join(top, "build", "test")
	if err := os.RemoveAll(logs); err != nil {
		return err
	}
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return err
	}
	jobs, err := plan(top, all, race, only, part)
	if err != nil {
		return err
	}
	return carryOut(jobs, lanes, logs)
}
