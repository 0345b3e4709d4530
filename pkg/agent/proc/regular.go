package proc

import (
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// NotRegular is the error of OpenRegular for what is there and is no regular file.
type NotRegular struct {
	Path string
	Kind string // "a directory", or "not a regular file"
}

func (e *NotRegular) Error() string { return e.Path + " is " + e.Kind }

// OpenRegular opens a regular file for reading; it does not hang on a FIFO.
func OpenRegular(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return nil, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		unix.Close(fd)
		kind := "not a regular file"
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			kind = "a directory"
		}
		return nil, &NotRegular{path, kind}
	}
	unix.FcntlInt(uintptr(fd), unix.F_SETFL, 0) //nolint:errcheck // O_NONBLOCK means nothing for regular files but to the poller
	return os.NewFile(uintptr(fd), path), nil
}
