package auth

import (
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// rates bounds how many requests each client may send, in a second and at once.
type rates struct {
	perSecond int // 0: no bound
	now       func() time.Time
	mu        sync.Mutex
	of        map[string]*rate.Limiter // guarded by mu
}

// maxRates is how many clients are remembered. When there are more, idle ones are
// forgotten.
const maxRates = 4096

// allow fails with the status 429 if client has sent too many.
func (l *rates) allow(client string) error {
	if l.perSecond == 0 {
		return nil
	}
	now := l.now()
	l.mu.Lock()
	lim := l.of[client]
	if lim == nil {
		if len(l.of) >= maxRates {
			for c, old := range l.of {
				if old.TokensAt(now) >= float64(l.perSecond) {
					delete(l.of, c)
				}
			}
		}
		lim = rate.NewLimiter(rate.Limit(l.perSecond), l.perSecond)
		l.of[client] = lim
	}
	l.mu.Unlock()
	turn := lim.ReserveN(now, 1)
	wait := turn.DelayFrom(now)
	if wait == 0 {
		return nil
	}
	turn.CancelAt(now)
	err := errs.New(errs.Exhausted, "%s sends more than %s per second, the limit of each client "+
		"(limits.requests_per_second); try again in %s", client, errs.Count(l.perSecond, "request", "requests"),
		wait.Round(time.Millisecond))
	return httperr.With(http.StatusTooManyRequests, errs.Retry(errs.Wire(err, "SANDBOX::RATE_LIMITED"), wait))
}
