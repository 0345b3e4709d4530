package files

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/internal/cli/command"
)

// progress counts the bytes of a tar, and shows them if standard error is a terminal.
type progress struct {
	what  string
	total int64 // 0: not known
	quiet bool

	mu    sync.Mutex
	n     int64
	bar   *command.Bar // nil: none
	shown time.Time
}

// showEvery is the time between two changes of the bar.
const showEvery = 75 * time.Millisecond

func (c *copying) progress(what string, total int64) *progress {
	p := &progress{what: what, total: total, quiet: c.quiet}
	if !c.quiet && command.IsTerminal(os.Stderr) {
		p.bar = &command.Bar{On: os.Stderr}
	}
	return p
}

// of counts what is read from r.
func (p *progress) of(r io.Reader) io.Reader { return counted{r, p} }

type counted struct {
	io.Reader
	p *progress
}

func (c counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.p.add(n)
	return n, err
}

func (p *progress) add(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n += int64(n)
	if p.bar != nil && time.Since(p.shown) >= showEvery {
		p.shown = time.Now()
		p.bar.Show(p.what, p.n, p.total)
	}
}

// end removes the bar, and returns how many bytes were read.
func (p *progress) end() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar != nil {
		p.bar.Clear()
		p.bar = nil // a request that broke may still read its body
	}
	return p.n
}

// summary says what was copied, in docker's words.
func (p *progress) summary(content, sent int64, to string) {
	if p.quiet {
		return
	}
	size := units.HumanSizeWithPrecision(float64(content), 3)
	if content != sent {
		size += fmt.Sprintf(" (transferred %s)", units.HumanSizeWithPrecision(float64(sent), 3))
	}
	fmt.Fprintf(os.Stderr, "Successfully copied %s to %s\n", size, to)
}
