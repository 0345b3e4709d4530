package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/validity"
)

// certificates checks which certificates and API keys end within the time of validity.Notice.
var certificates = check{
	name: "certificates", protects: "connections that end with the certificate or the key they need", root: true,
	run: func(ctx context.Context, h *host) Finding {
		return h.certificates(h.keys(ctx))
	},
}

// certificates is the check, with the API keys that the daemon tells; unasked says why there are none.
func (h *host) certificates(keys []record.Key, unasked string) Finding {
	now := h.now()
	var unread, due, past []string
	all := validity.Keys(keys, now)
	for _, f := range h.cfg.Certificates() {
		e, err := f.End(now)
		if err != nil {
			unread = append(unread, err.Error())
			continue
		}
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b validity.End) int { return a.At.Compare(b.At) })
	for _, e := range all {
		switch {
		case !now.Before(e.At):
			past = append(past, e.Text(now))
		case e.Due(now):
			due = append(due, e.Text(now))
		}
	}
	mend := "do what is said of each; `sandboxctl events` and the log say it once a day"
	switch bad := slices.Concat(past, due, unread); {
	case len(past) > 0 || len(unread) > 0:
		return fail(mend, "%s", strings.Join(bad, "; "))
	case len(due) > 0:
		return warn(mend, "%s", strings.Join(bad, "; "))
	case len(all) == 0:
		return ok("none has an end that is known%s", unasked)
	}
	return ok("of %d, the first ends at %s%s", len(all), all[0].At.UTC().Format(time.RFC3339), unasked)
}

// keys asks the daemon for its API keys.
func (h *host) keys(ctx context.Context) (all []record.Key, unasked string) {
	if h.daemon() == 0 {
		return nil, "; API keys are looked at while the daemon runs"
	}
	c, err := client.New("unix://"+h.cfg.Listen.Socket, "")
	if err != nil {
		return nil, fmt.Sprintf("; API keys are unknown: %v", err)
	}
	defer c.Close()
	list, err := c.Keys().List(ctx)
	if err != nil {
		return nil, fmt.Sprintf("; API keys are unknown: %v", err)
	}
	for _, k := range list {
		if k.ExpiresAt != nil && k.CreatedAt != nil {
			all = append(all, record.Key{Name: k.Name, Created: *k.CreatedAt, Expires: *k.ExpiresAt})
		}
	}
	return all, ""
}
