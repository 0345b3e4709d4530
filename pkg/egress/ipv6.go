package egress

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/coreos/go-iptables/iptables"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// hook6Text drops IPv6 both ways.
const hook6Text = `
*raw
-A PREROUTING -i LINKS -j DROP
*filter
-A OUTPUT -o LINKS -j DROP
`

func hooks6(i instance.Instance) rulesOf {
	return expand(strings.NewReplacer("LINKS", i.LinkMatch()), hook6Text)
}

// save6 reads all rules of ip6tables. Where the kernel has none of its tables
// there are no rules.
func save6(ctx context.Context) (rulesOf, error) {
	out, _, err := saved(ctx, "ip6tables-save")
	if err != nil {
		return nil, err
	}
	return parseSave(out), nil
}

// each6 calls f for the rules against IPv6, until it fails.
func each6(i instance.Instance, f func(table, chain, rule string) error) error {
	for table, chains := range hooks6(i) {
		for name, rules := range chains {
			for _, r := range rules {
				if err := f(table, name, r); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// lost6 are those rules against IPv6 that are not in the kernel. Where in its
// chain one stands is not looked at: what somebody lets pass in front of it meets
// the lock.
func (c *chains) lost6(ctx context.Context) (lost []string, err error) {
	if c.v6 == nil {
		return nil, nil
	}
	all, err := save6(ctx)
	if err != nil {
		return nil, err
	}
	err = each6(c.inst, func(table, name, rule string) error {
		if !slices.Contains(all[table][name], rule) {
			lost = append(lost, table+" "+name)
		}
		return nil
	})
	slices.Sort(lost)
	return lost, err
}

func (c *chains) install6() error {
	return each6(c.inst, func(table, name, rule string) error {
		if err := c.v6.InsertUnique(table, name, 1, strings.Fields(rule)...); err != nil {
			return fmt.Errorf("drop IPv6 in %s %s: %w", table, name, err)
		}
		return nil
	})
}

// restore6 makes the rules against IPv6 stand. No link is down meanwhile: the
// lock and disable_ipv6 hold what they held.
func (e *Engine) restore6(ctx context.Context) error {
	e.guarding.Lock()
	defer e.guarding.Unlock()
	lost, err := e.chains.lost6(ctx)
	if err != nil || len(lost) == 0 {
		return err
	}
	if err := e.chains.install6(); err != nil {
		return err
	}
	e.log.Info("rules against IPv6 installed", "rules", lost)
	return nil
}

// purge6 takes the rules against IPv6 away, each as often as it is there.
func (c *chains) purge6(ctx context.Context) error {
	all, err := save6(ctx)
	if errors.Is(err, exec.ErrNotFound) {
		return nil // who made rules had the program
	}
	if err != nil {
		return err
	}
	return each6(c.inst, func(table, name, rule string) error {
		for _, r := range all[table][name] {
			if r != rule {
				continue
			}
			if c.v6 == nil {
				if c.v6, err = iptables.New(iptables.IPFamily(iptables.ProtocolIPv6), iptables.Timeout(xtablesWait)); err != nil {
					return fmt.Errorf("ip6tables: %w", err)
				}
			}
			if err := c.v6.DeleteIfExists(table, name, strings.Fields(rule)...); err != nil {
				return fmt.Errorf("delete %s from ip6tables %s %s: %w", rule, table, name, err)
			}
		}
		return nil
	})
}
