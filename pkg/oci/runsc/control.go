package runsc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// call calls a method of the sentry of id, on the socket that its `runsc` commands use: one
// JSON object there and one back (gvisor.dev/gvisor/pkg/urpc), with files beside the first
// byte. It asks for no result. A command would do the same, and start a process for it, which
// takes some 20 ms.
func (d *Driver) call(ctx context.Context, id, method string, arg any, files ...*os.File) error {
	err := d.converse(ctx, id, method, arg, files)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = errors.Join(context.Cause(ctx), err)
	}
	return fmt.Errorf("%s of sandbox %s on runsc: %w", method, id, err)
}

// maxAnswer bounds what a sentry, which a guest may have taken over, can answer, in bytes.
const maxAnswer = 64 << 10

func (d *Driver) converse(ctx context.Context, id, method string, arg any, files []*os.File) error {
	request, err := json.Marshal(struct {
		Method string `json:"method"`
		Arg    any    `json:"arg"`
	}{method, arg})
	if err != nil {
		return err
	}
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", filepath.Join(d.c.Root, "runsc-"+id+".sock"))
	if err != nil {
		return err
	}
	defer c.Close()
	conn := c.(*net.UnixConn)
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })() //nolint:errcheck // it is closed then
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := conn.WriteMsgUnix(request, rights, nil); err != nil {
		return err
	}
	var answer struct {
		Success bool   `json:"success"`
		Err     string `json:"err"`
	}
	if err := json.NewDecoder(io.LimitReader(conn, maxAnswer)).Decode(&answer); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	if !answer.Success {
		return remote(answer.Err)
	}
	return nil
}

// maxRemote is how much of what a sentry answers is repeated, in bytes: of its end, which has the
// cause.
const maxRemote = 500

// remote is the error that a sentry answers with. That a disk is full arrives as words only.
func remote(text string) error {
	text = strings.ToValidUTF8(text[max(0, len(text)-maxRemote):], "\uFFFD")
	if before, ok := strings.CutSuffix(text, unix.ENOSPC.Error()); ok {
		return fmt.Errorf("%s%w", before, unix.ENOSPC)
	}
	return errors.New(text)
}
