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

// save6 reads all rules of ip6tables. If the kernel has no such tables, there are no
// rules.
func save6(ctx context.Context) (rulesOf, error) {
	out, _, err := saved(ctx, "ip6tables-save")
	if err != nil {
		return nil, err
	}
	return parseSave(out), nil
}

// each6 calls f for each rule against IPv6, until f fails.
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

// lost6 lists the rules against IPv6 that the kernel lacks. Their position in the chain
// does not matter: the lock drops what a rule in front of them accepts.
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

// restore6 installs missing rules against IPv6. It takes no link down: the lock and
// disable_ipv6 still block IPv6.
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

// purge6 removes the rules against IPv6, duplicates included.
func (c *chains) purge6(ctx context.Context) error {
	all, err := save6(ctx)
	if errors.Is(err, exec.ErrNotFound) {
		return nil // without the program nobody made rules
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
