package interpreter

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Self is the path of the program that runs, for Host.Start.
const Self = "/proc/self/exe"

// driveGo is the argument that makes this program the driver of a context of go.
const driveGo = "drive-go"

const (
	// killAfter is the time between the interrupt of a program and its kill: a program
	// may handle SIGINT, but within the context's grace.
	killAfter = time.Second
	// maxReport bounds what is kept of a compiler's words, in bytes.
	maxReport = 64 << 10
	// maxBinaries are kept to be run again: 1 to 10 MB each, on the sandbox's disk.
	maxBinaries = 8
)

// Drive runs a driver of a context of go, if this process was started as one; otherwise
// it returns at once. The driver compiles the code of each call and runs it as a
// program of its own. The driver is this program, so an image needs nothing but go.
func Drive(args []string) {
	if len(args) != 3 || args[1] != driveGo {
		return
	}
	// Programs die with the thread that started them: the first, which lives as long as the process.
	runtime.LockOSThread()
	debug.SetGCPercent(50)
	d := &goDriver{tool: args[2], channel: os.NewFile(3, "channel"), interrupts: make(chan int, 1)}
	unix.CloseOnExec(3)
	if err := d.serve(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

type goDriver struct {
	tool       string // the go command
	channel    *os.File
	secret     string
	interrupts chan int // the number of the call to stop

	binaries []binary // compiled lately; the one used last comes last

	mu      sync.Mutex
	running int // the process group of what runs, or 0
}

func (d *goDriver) serve() error {
	r := bufio.NewReader(d.channel)
	var memory int64
	if _, err := fmt.Fscanf(r, "%s\n%d\n", &d.secret, &memory); err != nil {
		return fmt.Errorf("read the secret of the context: %w", err)
	}
	if memory > 0 {
		limitMemory(memory)
	}
	calls := make(chan goCall)
	go func() {
		d.readCalls(r, calls)
		// The context has ended, and so does the program that runs.
		d.mu.Lock()
		d.kill(unix.SIGKILL)
		os.Exit(0)
	}()
	d.say(frame{Type: "ready"})
	for c := range calls {
		d.say(frame{Type: "done", Error: d.call(c)})
	}
	return nil
}

// limitMemory makes allocations fail in programs, which inherit the limit, before the
// sandbox has no memory left: see limit_memory in python.py. A program of go reserves
// as much address space as this one does.
func limitMemory(size int64) {
	limit := func(what int, soft uint64) {
		var lim unix.Rlimit
		if unix.Getrlimit(what, &lim) == nil {
			lim.Cur = min(soft, lim.Max)
			unix.Setrlimit(what, &lim) //nolint:errcheck // a convenience: the sandbox has its own limit
		}
	}
	limit(unix.RLIMIT_DATA, uint64(size-size/8)) //nolint:gosec // a limit, and so below: not negative
	var pages uint64
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		if _, err := fmt.Sscan(string(b), &pages); err == nil {
			limit(unix.RLIMIT_AS, pages*uint64(os.Getpagesize())+uint64(size)) //nolint:gosec // as above
		}
	}
}

// A goCall is a call of code.
type goCall struct {
	count int
	code  string
}

// readCalls passes on calls and interrupts, as sizedRequest and sizedInterrupt
// make them, until the channel ends.
func (d *goDriver) readCalls(r *bufio.Reader, calls chan<- goCall) {
	for {
		var count, size int
		if _, err := fmt.Fscanf(r, "%d %d\n", &count, &size); err != nil || size > MaxCode {
			return
		}
		if size < 0 {
			select {
			case <-d.interrupts: // of a call that had ended
			default:
			}
			d.interrupts <- count
			continue
		}
		code := make([]byte, size)
		if _, err := io.ReadFull(r, code); err != nil {
			return
		}
		calls <- goCall{count, string(code)}
	}
}

// say sends a frame, in a line with an empty one before it.
func (d *goDriver) say(f frame) {
	b, err := json.Marshal(f)
	if err == nil {
		_, err = d.channel.Write(fmt.Appendf(nil, "\n%s%s\n", d.secret, b))
	}
	if err != nil {
		os.Exit(1) // the agent is gone, or the code closed the channel: then the agent reports that the context died
	}
}

// call compiles and runs a program.
func (d *goDriver) call(c goCall) *Error {
	source, err := program(c.code)
	if err != nil {
		return compileError(err.Error())
	}
	binary := d.compiled(source)
	if binary == nil {
		var failed *Error
		if binary, failed = d.compile(c.count, source); failed != nil {
			return failed
		}
		defer d.keep(source, binary)
	}
	run := exec.Command(fmt.Sprintf("/proc/self/fd/%d", binary.Fd()))
	run.Args[0] = "main"
	run.Stdout, run.Stderr = os.Stdout, os.Stderr
	err = d.run(c.count, run)
	switch {
	case errors.Is(err, errInterrupted):
		return interruptError()
	case err != nil:
		return exitError(err)
	}
	return nil
}

// compile makes a program in a file that has no name any more, so nothing is left when
// the context is killed.
func (d *goDriver) compile(call int, source []byte) (*os.File, *Error) {
	dir, err := os.MkdirTemp("", "sandboxd-go-")
	if err != nil {
		return nil, osError("make a directory for the program", err)
	}
	defer os.RemoveAll(dir)
	file, binary := filepath.Join(dir, "main.go"), filepath.Join(dir, "main")
	if err := os.WriteFile(file, source, 0o600); err != nil {
		return nil, osError("write the program", err)
	}
	report := &head{limit: maxReport}
	// Nobody debugs the program, and linking takes half the time without debug symbols.
	build := exec.Command(d.tool, "build", "-ldflags=-s -w", "-gcflags=-dwarf=false", "-o", binary, file)
	build.Env, build.Stdout, build.Stderr = goEnv(dir), report, report
	if err := d.run(call, build); err != nil {
		if errors.Is(err, errInterrupted) {
			return nil, interruptError()
		}
		return nil, compileError(strings.TrimSpace(string(report.b) + "\n" + why(err)))
	}
	f, err := os.Open(binary)
	if err != nil {
		return nil, osError("open the program", err)
	}
	return f, nil
}

func osError(doing string, err error) *Error {
	return &Error{Name: "OSError", Value: doing + ": " + err.Error()}
}

// A binary is what a source was compiled to.
type binary struct {
	source [sha256.Size]byte
	f      *os.File
}

// compiled returns what source was compiled to lately, or nil. The go command
// takes 60 ms to find that a program has not changed, and 500 ms in gVisor.
func (d *goDriver) compiled(source []byte) *os.File {
	if !reusable(source) {
		return nil
	}
	sum := sha256.Sum256(source)
	for i, b := range d.binaries {
		if b.source == sum {
			d.binaries = append(slices.Delete(d.binaries, i, i+1), b) // the one used last comes last
			return b.f
		}
	}
	return nil
}

// keep keeps a program to be run again.
func (d *goDriver) keep(source []byte, f *os.File) {
	if !reusable(source) {
		f.Close()
		return
	}
	d.binaries = append(d.binaries, binary{sha256.Sum256(source), f})
	if len(d.binaries) > maxBinaries {
		d.binaries[0].f.Close()
		d.binaries = slices.Delete(d.binaries, 0, 1)
	}
}

// reusable reports whether a program is made of source and the standard library
// only: there is no module around, and no C.
func reusable(source []byte) bool {
	for _, name := range []string{"GO111MODULE", "GOFLAGS", "GOWORK"} {
		if os.Getenv(name) != "" {
			return false
		}
	}
	if bytes.Contains(source, []byte(`"C"`)) || bytes.Contains(source, []byte("`C`")) {
		return false
	}
	dir, err := os.Getwd()
	for err == nil {
		for _, name := range []string{"go.mod", "go.work"} {
			if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
				return false
			}
		}
		if dir == "/" {
			return true
		}
		dir = filepath.Dir(dir)
	}
	return false
}

// program adds a package clause to code that has none. Lines and columns stay.
func program(code string) ([]byte, error) {
	var s scanner.Scanner
	src := []byte(code)
	s.Init(token.NewFileSet().AddFile("main.go", -1, len(src)), src, nil, 0)
	_, tok, _ := s.Scan()
	if tok != token.PACKAGE {
		return append([]byte("package main; /*line main.go:1:1*/"), src...), nil
	}
	if _, tok, name := s.Scan(); tok == token.IDENT && name != "main" {
		return nil, fmt.Errorf("main.go:1: package %s is not a program: use package main", name)
	}
	return src, nil
}

// goEnv is the environment of the go command. There may be no network, and a program
// that waits for one waits for minutes.
func goEnv(dir string) []string {
	env := os.Environ()
	add := func(name, value string) {
		if os.Getenv(name) == "" {
			env = append(env, name+"="+value)
		}
	}
	add("GOPROXY", "off")
	add("GOTOOLCHAIN", "local")
	if _, err := os.Stat("vendor/modules.txt"); err != nil {
		add("GOFLAGS", "-mod=mod")
	}
	if cache, err := os.UserCacheDir(); err != nil || !filepath.IsAbs(cache) { // no HOME
		add("GOCACHE", filepath.Join(filepath.Dir(dir), fmt.Sprintf("sandboxd-go-build-%d", os.Getuid())))
	}
	return append(env, "GOTMPDIR="+dir)
}

var errInterrupted = errors.New("interrupted")

// run runs cmd, of a call, in a process group of its own. It passes an interrupt on,
// and kills the program a second later.
func (d *goDriver) run(call int, cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	d.mu.Lock()
	d.running = cmd.Process.Pid
	d.mu.Unlock()
	ended := make(chan error, 1)
	go func() { ended <- d.ended(cmd) }()
	var kill <-chan time.Time
	interrupted := false
	for {
		select {
		case err := <-ended:
			if interrupted {
				return errInterrupted
			}
			return err
		case n := <-d.interrupts:
			if n == call && !interrupted {
				interrupted, kill = true, time.After(killAfter)
				d.signal(unix.SIGINT)
			}
		case <-kill:
			d.signal(unix.SIGKILL)
		}
	}
}

// ended waits for cmd. From then on nobody signals its group, whose number may be used
// again.
func (d *goDriver) ended(cmd *exec.Cmd) error {
	var info unix.Siginfo
	for unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
		continue
	}
	d.mu.Lock()
	d.running = 0
	d.mu.Unlock()
	return cmd.Wait()
}

func (d *goDriver) signal(sig syscall.Signal) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kill(sig)
}

// kill signals the program that runs. The caller holds mu.
func (d *goDriver) kill(sig syscall.Signal) {
	if d.running != 0 {
		syscall.Kill(-d.running, sig) //nolint:errcheck // gone is what is wanted
	}
}

// ourFile matches the path of the program's file in messages of the compiler.
var ourFile = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?m)^\S*sandboxd-go-\d+/main\.go:`) })

// compileError makes an error of the go command's output, without the names of the
// agent's files.
func compileError(report string) *Error {
	report = ourFile().ReplaceAllString(report, "main.go:")
	var lines []string
	for line := range strings.Lines(report) {
		line = strings.TrimRight(line, "\n")
		if line != "" && line != "# command-line-arguments" && !strings.HasPrefix(line, "go: finding module ") {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		lines = []string{"the go command failed without any output"}
	}
	return &Error{Name: "CompileError", Value: lines[0], Traceback: lines}
}

func interruptError() *Error {
	return &Error{
		Name: "KeyboardInterrupt", Value: "the program was interrupted",
		Traceback: []string{"KeyboardInterrupt: the program was interrupted"},
	}
}

// exitError makes the error of a program that failed, in the form that a failed command
// has.
func exitError(err error) *Error {
	e := &Error{Name: "CommandExecError", Value: err.Error(), Traceback: []string{err.Error()}}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() >= 0 {
		e.Value = fmt.Sprint(exit.ExitCode())
	}
	return e
}

// why says how the go command ended, unless the compiler has said it.
func why(err error) string {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() >= 0 {
		return ""
	}
	return err.Error()
}

// A head keeps the first bytes written to it.
type head struct {
	b     []byte
	limit int
}

func (h *head) Write(b []byte) (int, error) {
	h.b = append(h.b, b[:min(len(b), h.limit-len(h.b))]...)
	return len(b), nil
}
