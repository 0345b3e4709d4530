package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
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
	if d.pidFile != "" { // at once: whoever gives up waiting for it can end it
		if err := writeFile(d.pidFile, strconv.Itoa(cmd.Process.Pid)+"\n"); err != nil {
			cmd.Process.Kill() //nolint:errcheck // Wait tells
			return errors.Join(fmt.Errorf("detach: %w", err), cmd.Wait())
		}
	}
	if said, _ := io.ReadAll(io.LimitReader(r, int64(len(ready)))); !bytes.Equal(said, ready) {
		err := cmd.Wait()
		if d.logFile == "" {
			return fmt.Errorf("the daemon ended before it was ready (%w)", err)
		}
		said, _ := io.ReadAll(io.NewSectionReader(log, logged, 1<<20))
		return fmt.Errorf("the daemon ended before it was ready (%v); its log:\n%s", err, said)
	}
	return nil
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
