package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
)

// readyEnv names the descriptor on which a detached daemon says that it serves.
const readyEnv = "SANDBOXD_READY_FD"

var ready = []byte("READY=1\n")

// detached is `serve --detach`: the same daemon as a child in a session of its
// own, awaited until it says that it serves.
type detached struct {
	on               bool
	pidFile, logFile string
}

func (d detached) start(configPath string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("detach: %w", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("detach: %w", err)
	}
	defer r.Close()
	log := os.Stderr
	var logged int64
	if d.logFile != "" {
		if log, err = os.OpenFile(d.logFile, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600); err != nil {
			return fmt.Errorf("detach: %w", err)
		}
		defer log.Close()
		if fi, err := log.Stat(); err == nil {
			logged = fi.Size()
		}
	}
	args := []string{"serve"}
	if configPath != "" {
		if configPath, err = filepath.Abs(configPath); err != nil {
			return fmt.Errorf("detach: %w", err)
		}
		args = append(args, "--config", configPath)
	}
	cmd := exec.Command(self, args...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{w}
	cmd.Env = append(os.Environ(), readyEnv+"=3")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("detach: %w", err)
	}
	w.Close()
	pid, err := d.writePID(cmd.Process.Pid) // at once: a caller that gives up waiting can kill the daemon
	if err != nil {
		cmd.Process.Kill() //nolint:errcheck // Wait tells
		return errors.Join(fmt.Errorf("detach: %w", err), cmd.Wait())
	}
	if said, _ := io.ReadAll(io.LimitReader(r, int64(len(ready)))); !bytes.Equal(said, ready) {
		err := cmd.Wait()
		restored := pid.restore()
		if d.logFile == "" {
			return errors.Join(fmt.Errorf("the daemon ended before it was ready (%w)", err), restored)
		}
		said, _ := io.ReadAll(io.NewSectionReader(log, logged, 1<<20))
		return errors.Join(fmt.Errorf("the daemon ended before it was ready (%v); its log:\n%s", err, said), restored)
	}
	return nil
}

// pidFile is a pid file that has been written, and its content before that.
type pidFile struct {
	path   string // empty: none was asked for
	before []byte // nil: there was no file
}

func (d detached) writePID(pid int) (pidFile, error) {
	if d.pidFile == "" {
		return pidFile{}, nil
	}
	before, err := os.ReadFile(d.pidFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return pidFile{}, err
	}
	return pidFile{path: d.pidFile, before: before}, writeFile(d.pidFile, strconv.Itoa(pid)+"\n")
}

// restore puts the content back that was there before: a daemon that fails to start because another one runs
// leaves the pid of the other one.
func (p pidFile) restore() error {
	switch {
	case p.path == "":
		return nil
	case p.before == nil:
		return os.Remove(p.path)
	default:
		return writeFile(p.path, string(p.before))
	}
}

func writeFile(path, text string) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// announceReady tells whoever started the daemon that it serves.
func announceReady() error {
	fd, err := strconv.Atoi(os.Getenv(readyEnv))
	if err != nil {
		return nil // nobody waits
	}
	f := os.NewFile(uintptr(fd), "ready")
	_, err = f.Write(ready)
	return errors.Join(err, f.Close())
}
