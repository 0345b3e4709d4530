package names

import (
	"sync"
	"time"

	"github.com/miekg/dns"
)

// Bounds of the cache, which all sandboxes share.
const (
	maxEntries = 8192
	// maxRecords is how many records an answer in the cache may have, so that a server cannot
	// fill the child's memory: 8,192 answers of 64 records of some 200 bytes are 100 MiB.
	maxRecords = 64
	// maxData is how long the records of such an answer may be, in bytes.
	maxData = 4096
)

type key struct {
	name string
	typ  uint16
}

// cache keeps answers for as long as their servers said.
type cache struct {
	mu sync.Mutex
	m  map[key]*entry
}

func (c *cache) get(name string, typ uint16, now time.Time) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := key{name, typ}
	e := c.m[k]
	if e == nil {
		return nil
	}
	if e.left(now) == 0 {
		delete(c.m, k)
		return nil
	}
	return e
}

// put keeps e, which from now on nobody changes.
func (c *cache) put(name string, typ uint16, e *entry, now time.Time) {
	e.expires = now.Add(time.Duration(e.ttl) * time.Second)
	if e.ttl == 0 || e.rcode != dns.RcodeSuccess && e.rcode != dns.RcodeNameError || len(e.answer) > maxRecords {
		return
	}
	size := 0
	for _, rr := range e.answer {
		size += dns.Len(rr)
	}
	if size > maxData {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = map[key]*entry{}
	}
	for k := range c.m { // in random order
		if len(c.m) < maxEntries {
			break
		}
		delete(c.m, k)
	}
	c.m[key{name, typ}] = e
}
