package sealed

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// A page holds keys outside of Go's heap. It is locked, so it does not go to swap; it is
// left out of core dumps, and once filled it is read-only. The bytes are behind a function,
// which fmt cannot print: it follows pointers when a verb does not fit what they point to.
type page struct{ bytes func() []byte }

// newPage copies keys into a page. unlocked is why the kernel does not lock it or would
// dump it, such as a limit of 0 (RLIMIT_MEMLOCK, setrlimit(2)): the page is of use still.
func newPage(keys []byte) (p *page, unlocked, err error) {
	size := os.Getpagesize()
	if len(keys) > size {
		return nil, nil, fmt.Errorf("%d bytes of keys, more than a page of %d", len(keys), size)
	}
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, nil, fmt.Errorf("map a page for keys: %w", err)
	}
	p = &page{func() []byte { return b }}
	// The kernel clears a page before it gives it to another process.
	runtime.AddCleanup(p, func(b []byte) { _ = unix.Munmap(b) }, b)
	if err := unix.Mlock(b); err != nil {
		unlocked = fmt.Errorf("lock the page of keys: %w", err)
	}
	if err := unix.Madvise(b, unix.MADV_DONTDUMP); err != nil {
		unlocked = errors.Join(unlocked, fmt.Errorf("keep the page of keys out of core dumps: %w", err))
	}
	copy(b, keys)
	if err := unix.Mprotect(b, unix.PROT_READ); err != nil {
		return nil, nil, fmt.Errorf("protect the page of keys: %w", err)
	}
	return p, unlocked, nil
}

// at is the n-th key. It is there while p is: see runtime.KeepAlive.
func (p *page) at(n int) []byte { return p.bytes()[n*keySize : (n+1)*keySize] }
