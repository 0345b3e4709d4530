package e2e_test

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
)

// watched is output that a test reads while a process writes it.
type watched struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(b)
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

// has returns an error unless all of texts were written.
func (w *watched) has(texts ...string) error {
	all := w.String()
	for _, text := range texts {
		if !strings.Contains(all, text) {
			return fmt.Errorf("no %q in %q", text, all)
		}
	}
	return nil
}
