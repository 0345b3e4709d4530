package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-iptables/iptables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// script writes chains and hooks in the format of iptables-restore(8). That program
// applies a table at once or not at all. If rules were added one by one, an operator
// could flush half of them, and the other half would then refuse flows that the first
// half allowed.
func (c *chains) script(chains, hooks, mine rulesOf) string {
	var b strings.Builder
	for _, table := range tables {
		fmt.Fprintf(&b, "*%s\n", table)
		for _, name := range slices.Sorted(maps.Keys(chains[table])) {
			fmt.Fprintf(&b, ":%s - [0:0]\n", name)
		}
		for name, rules := range chains[table] {
			for _, r := range rules {
				fmt.Fprintf(&b, "-A %s %s\n", name, r)
			}
		}
		for name, rules := range hooks[table] {
			for _, r := range rules {
				if !strings.Contains(r, c.inst.Chain("")) && slices.Contains(mine[table][name], r) {
					continue // MASQUERADE: one is enough, at any position
				}
				fmt.Fprintf(&b, "-I %s 1 %s\n", name, r)
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

// restore runs script and leaves all other rules as they are.
func (c *chains) restore(ctx context.Context, script string) error {
	ctx, cancel := context.WithTimeout(ctx, restoreLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.restorer, "--noflush", "--wait", strconv.Itoa(xtablesWait))
	cmd.WaitDelay = time.Second // as in save
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("iptables-restore: %w: %s (the kernel may lack a module that a rule names: xt_…, or nft_compat)%s",
			cmp.Or(ctx.Err(), err), strings.TrimSpace(string(out)), blamed(script, out))
	}
	return nil
}

// restoreLimit is how long iptables-restore may take. It needs 10 ms, plus the wait for
// other programs. The first one after a boot also loads the kernel's modules: 4 s in an
// emulated machine (test/vm), and more than 15 s there when its host had a load of 9.
const restoreLimit = time.Minute

var blamedLine = regexp.MustCompile(`line:? (\d+)`)

// blamed quotes the line of script that iptables-restore rejects.
func blamed(script string, said []byte) string {
	m := blamedLine.FindSubmatch(said)
	if m == nil {
		return ""
	}
	n, err := strconv.Atoi(string(m[1]))
	lines := strings.Split(script, "\n")
	if err != nil || n < 1 || n > len(lines) {
		return ""
	}
	return fmt.Sprintf("; line %d is %q", n, lines[n-1])
}

// remove removes the hooks of a generation, then its chains. mine is what was read
// before.
func (c *chains) remove(mine rulesOf, generation int) error {
	chains, _ := wanted(c.inst, c.pool, c.gateway, generation)
	return c.removeChains(mine, func(table, name string) bool {
		_, ok := chains[table][name]
		return ok
	})
}

// removeChains removes the chains that which chooses, and all jumps to them from other
// chains.
func (c *chains) removeChains(mine rulesOf, which func(table, name string) bool) error {
	for _, table := range tables {
		var names []string
		for name, rules := range mine[table] {
			if which(table, name) {
				names = append(names, name)
				continue
			}
			for _, r := range rules {
				_, target, _ := strings.Cut(r, "-j ")
				if strings.HasPrefix(name, c.inst.Chain("")) || !which(table, target) {
					continue
				}
				if err := c.v4.DeleteIfExists(table, name, strings.Fields(r)...); err != nil {
					return fmt.Errorf("delete the jump from %s %s: %w", table, name, err)
				}
			}
		}
		for _, name := range names { // empty them first: they refer to one another
			if err := c.v4.ClearChain(table, name); err != nil {
				return fmt.Errorf("flush %s %s: %w", table, name, err)
			}
		}
		for _, name := range names {
			if err := c.v4.DeleteChain(table, name); err != nil {
				return fmt.Errorf("delete %s %s: %w", table, name, err)
			}
		}
	}
	return nil
}

// unmasquerade removes the tagged rules in mine that are not in keep: the pool may have
// changed.
func (c *chains) unmasquerade(mine rulesOf, keep []string) error {
	for _, r := range mine["nat"]["POSTROUTING"] {
		if slices.Contains(keep, r) {
			continue
		}
		if err := c.v4.DeleteIfExists("nat", "POSTROUTING", strings.Fields(r)...); err != nil {
			return fmt.Errorf("delete the masquerade rule from nat POSTROUTING: %w", err)
		}
	}
	return nil
}

// Purge removes chains, lock and sets of an instance. Its sandboxes must be gone:
// nothing confines them after that. Use it for uninstalling and in tests. Absent is
// success.
func Purge(ctx context.Context, i instance.Instance) error {
	if err := purge(ctx, i); err != nil {
		return fmt.Errorf("purge egress of instance %s: %w", i, err)
	}
	return nil
}

func purge(ctx context.Context, i instance.Instance) error {
	v4, err := iptables.New(iptables.Timeout(xtablesWait))
	if err != nil {
		return fmt.Errorf("list iptables rules: %w", err)
	}
	c := &chains{inst: i, v4: v4, log: slog.New(slog.DiscardHandler)}
	all, err := c.save(ctx)
	if err != nil {
		return err
	}
	mine, _ := c.ours(all)
	if err := c.removeChains(mine, func(_, name string) bool { return strings.HasPrefix(name, i.Chain("")) }); err != nil {
		return err
	}
	if err := c.unmasquerade(mine, nil); err != nil {
		return err
	}
	if err := c.purge6(ctx); err != nil {
		return err
	}
	if err := (lock{inst: i}).remove(); err != nil {
		return err
	}
	for _, name := range []string{i.Set("src"), i.Set(oldUplinks)} {
		if err := netlink.IpsetDestroy(name); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("destroy ipset %s: %w", name, err)
		}
	}
	return nil
}
