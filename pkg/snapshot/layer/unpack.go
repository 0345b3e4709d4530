package layer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// UnpackVerb is the verb of the child that unpacks a layer: the program's main gives
// [Unpack] to confine.Main under this name.
const UnpackVerb = "unpack"

// report is one line of a child that unpacks.
type report struct {
	Opaque []byte `json:"opaque,omitempty"` // a directory that hides the layers below it
	Done   bool   `json:"done,omitempty"`   // the last line
	Bytes  int64  `json:"bytes,omitempty"`  // with Done: of all files
}

// maxReport bounds one line: a name in base64, and the JSON around it.
const maxReport = 16 << 10

// Unpack is the child: it unpacks the tar on standard input into its root.
func Unpack(args []string) error {
	var l limits
	if len(args) != 1 || json.Unmarshal([]byte(args[0]), &l) != nil {
		return fmt.Errorf("arguments %q: want limits", args)
	}
	root, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/", Err: err}
	}
	out := json.NewEncoder(os.Stdout)
	x := newExtractor(root, 0, l, func(dir string) error { return out.Encode(report{Opaque: []byte(dir)}) })
	in := bufio.NewReaderSize(os.Stdin, copySize)
	err = x.extract(in)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errs.Wrap(err, errs.Exhausted, "%s", diskFull)
	}
	if err != nil {
		return err
	}
	// The digest is of all of the tar, padding included.
	if _, err := io.Copy(io.Discard, in); err != nil {
		return err
	}
	return out.Encode(report{Done: true, Bytes: x.bytes})
}

const diskFull = "the disk of the state directory is full: free space, or remove images (sandboxctl image prune)"

// unpack feeds a tar to a child that unpacks it into dir, and returns the bytes
// of its files. If reading in fails, that is the error, whatever the child reports.
func unpack(ctx context.Context, dir string, in io.Reader) (bytes int64, err error) {
	limits, err := json.Marshal(layerLimits)
	if err != nil {
		return 0, err
	}
	p, err := confine.Start(ctx, confine.Child{Verb: UnpackVerb, Args: []string{string(limits)}, Root: dir})
	if err != nil {
		return 0, err
	}
	defer p.Close()
	type result struct {
		bytes int64
		err   error
	}
	reported := make(chan result, 1)
	go func() {
		n, err := followReports(dir, p.Out)
		if err != nil {
			p.Kill() // nobody reads its output any more
		}
		reported <- result{n, err}
	}()
	_, err = io.CopyBuffer(struct{ io.Writer }{p.In}, in, make([]byte, copySize/4))
	if err != nil {
		p.Kill()
	}
	p.In.Close()
	end := <-reported
	died := p.Wait()
	if errors.Is(err, unix.EPIPE) { // the child ended first, and its error says why
		err = nil
	}
	switch {
	case err != nil:
		return 0, err
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case died != nil && errs.CodeOf(died) != errs.Internal:
		return 0, died
	}
	return end.bytes, errors.Join(end.err, died)
}

// followReports reads what the child reports until it ends, and sets the marks that
// only the daemon may set.
func followReports(dir string, r io.Reader) (bytes int64, err error) {
	done := false
	err = tree.WithDir(dir, func(root int) error {
		lines := bufio.NewScanner(r)
		lines.Buffer(nil, maxReport)
		for lines.Scan() {
			var rep report
			if err := json.Unmarshal(lines.Bytes(), &rep); err != nil {
				return fmt.Errorf("decode a report of the unpacking child: %w", err)
			}
			if rep.Opaque != nil {
				if err := setOpaque(root, string(rep.Opaque)); err != nil {
					return err
				}
			}
			done, bytes = rep.Done, rep.Bytes
		}
		return lines.Err()
	})
	if err == nil && (!done || bytes < 0 || bytes > layerLimits.Bytes) {
		err = errors.New("the unpacking child ended without a result")
	}
	return bytes, err
}
