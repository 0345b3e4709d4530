package daemon

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
)

// TestDenials: a guest that is refused a hundred flows a second, each to another
// address than the last, gets few lines; its neighbour gets its own, none goes
// uncounted, and its history has what it had.
func TestDenials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said bytes.Buffer
		recorder, err := flowlog.NewRecorder("", "sb-", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		d := &Daemon{
			log: slog.New(slog.NewTextHandler(&said, nil)), history: history.New(), egress: &egress.Engine{FlowLog: recorder},
		}
		d.denials = newDenials(d.log)
		d.history.Open("flood")
		d.history.Open("quiet")
		deny := func(id string, i int) {
			d.onDeny(egress.Denial{
				ID: id, Proto: "tcp", Dst: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i % 2)}), 80),
				Rule: "default",
			})
		}
		const seconds, each = 60, 100
		for i := range seconds * each {
			deny("flood", i)
			if i%(20*each) == 0 {
				deny("quiet", i/each/20)
			}
			time.Sleep(time.Second / each)
		}
		time.Sleep(2 * moreEvery)
		synctest.Wait()
		lines := map[string]int{}
		more := 0
		for line := range strings.Lines(said.String()) {
			var id string
			for _, f := range strings.Fields(line) {
				if v, ok := strings.CutPrefix(f, "sandbox="); ok {
					id = v
				}
			}
			lines[id]++
			if _, after, ok := strings.Cut(line, `msg="more denied" sandbox=flood n=`); ok {
				var n int
				if _, err := fmt.Sscan(after, &n); err != nil {
					t.Fatal(err)
				}
				more += n
				lines["more"]++
			}
		}
		if most := denialBurst + seconds + 1 + lines["more"]; lines["flood"] > most || lines["more"] > seconds/10+1 {
			t.Errorf("%d lines for one sandbox in %d s, %d of them about more; want at most %d", lines["flood"], seconds, lines["more"],
				most)
		}
		if got := lines["flood"] - lines["more"] + more; got != seconds*each {
			t.Errorf("%d denials are told of, %d were", got, seconds*each)
		}
		if lines["quiet"] != 3 {
			t.Errorf("the neighbour has %d lines, want 3", lines["quiet"])
		}
		if entries, dropped := d.history.Of("flood", history.Network); len(entries)+dropped != seconds*each {
			t.Errorf("the history knows %d", len(entries)+dropped)
		}
		d.onEvent(sandbox.Event{ID: "flood", Type: sandbox.EventDeleted})
		if len(d.denials.ofs) != 1 {
			t.Errorf("remembered are %d sandboxes, one is there", len(d.denials.ofs))
		}
	})
}
