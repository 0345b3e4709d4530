package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/coreos/go-iptables/iptables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// fill makes the chains of a table. All are made before one is filled, because
// they refer to one another.
func (c *chains) fill(table string, chains map[string][]string) error {
	names := slices.Sorted(maps.Keys(chains))
	for _, name := range names {
		if err := c.v4.ClearChain(table, name); err != nil { // makes or empties
			return fmt.Errorf("chain %s %s: %w", table, name, err)
		}
	}
	for _, name := range names {
		for _, r := range chains[name] {
			if err := c.v4.Append(table, name, strings.Fields(r)...); err != nil {
				return fmt.Errorf("chain %s %s: rule %q: %w (the kernel may lack a module that the rule names: xt_…, or nft_compat)", table, name, r, err)
			}
		}
	}
	return nil
}

// remove takes away what mine, read before, has of a generation: hooks, then
// chains.
func (c *chains) remove(mine rulesOf, generation int) error {
	chains, _ := wanted(c.inst, c.pool, c.gateway, generation)
	return c.removeChains(mine, func(table, name string) bool {
		_, ok := chains[table][name]
		return ok
	})
}

// removeChains takes away the chains that which chooses, with all jumps to them
// from elsewhere.
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
					return fmt.Errorf("unhook from %s %s: %w", table, name, err)
				}
			}
		}
		for _, name := range names { // empty first: they refer to one another
			if err := c.v4.ClearChain(table, name); err != nil {
				return fmt.Errorf("clear %s %s: %w", table, name, err)
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

// unmasquerade takes away the rules that mine has under the tag, but for those
// of keep: the pool may have been another.
func (c *chains) unmasquerade(mine rulesOf, keep []string) error {
	for _, r := range mine["nat"]["POSTROUTING"] {
		if slices.Contains(keep, r) {
			continue
		}
		if err := c.v4.DeleteIfExists("nat", "POSTROUTING", strings.Fields(r)...); err != nil {
			return fmt.Errorf("unhook from nat POSTROUTING: %w", err)
		}
	}
	return nil
}

func hooks6(i instance.Instance) rulesOf {
	return expand(strings.NewReplacer("LINKS", i.LinkMatch()), hook6Text)
}

func (c *chains) install6() error {
	if c.v6 == nil {
		return nil
	}
	for table, chains := range hooks6(c.inst) {
		for name, rules := range chains {
			for _, r := range rules {
				if err := c.v6.InsertUnique(table, name, 1, strings.Fields(r)...); err != nil {
					return fmt.Errorf("drop IPv6 in %s %s: %w", table, name, err)
				}
			}
		}
	}
	return nil
}

// Purge removes chains and set of an instance. Its sandboxes must be gone: with
// the chains goes all that holds them. It is for uninstalling and for tests;
// absent is success.
func Purge(_ context.Context, i instance.Instance) error {
	if err := purge(i); err != nil {
		return fmt.Errorf("purge egress of instance %s: %w", i, err)
	}
	return nil
}

func purge(i instance.Instance) error {
	v4, err := iptables.New(iptables.Timeout(xtablesWait))
	if err != nil {
		return fmt.Errorf("iptables: %w", err)
	}
	c := &chains{inst: i, v4: v4, log: slog.New(slog.DiscardHandler)}
	all, err := c.save()
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
	if v6, err := iptables.New(iptables.IPFamily(iptables.ProtocolIPv6), iptables.Timeout(xtablesWait)); err == nil {
		for table, chains := range hooks6(i) {
			for name, rules := range chains {
				for _, r := range rules {
					// Absent, or no ip6tables here: both leave nothing.
					_ = v6.DeleteIfExists(table, name, strings.Fields(r)...)
				}
			}
		}
	}
	for _, name := range []string{i.Set("src"), i.Set("uplink")} {
		if err := netlink.IpsetDestroy(name); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("destroy ipset %s: %w", name, err)
		}
	}
	return nil
}
