package netns

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const ipForward = "net/ipv4/ip_forward"

func forwarding(link string) string { return "net/ipv4/conf/" + link + "/forwarding" }

// notes is the file that lists the links on which OpenUplinks switched forwarding on,
// with the value that ip_forward had then. A reboot clears both.
func (m *Manager) notes() string { return filepath.Join(m.dir, "uplinks") }

func (m *Manager) noted() (map[string]string, error) {
	links := map[string]string{}
	b, err := os.ReadFile(m.notes())
	if errors.Is(err, fs.ErrNotExist) {
		return links, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &links)
	}
	if err != nil {
		return nil, fmt.Errorf("read which links forward for sandboxes: %w", err)
	}
	return links, nil
}

// note stores that forwarding is about to be switched on for link.
func (m *Manager) note(link string) error {
	links, err := m.noted()
	if err != nil {
		return err
	}
	if links[link], err = readSysctl(ipForward); err != nil {
		return err
	}
	b, err := json.Marshal(links)
	if err != nil {
		return err
	}
	if err := os.WriteFile(m.notes()+".new", b, 0o600); err != nil {
		return fmt.Errorf("record that %s forwards for sandboxes: %w", link, err)
	}
	return os.Rename(m.notes()+".new", m.notes())
}

// SwitchedOn names the links that forward because OpenUplinks switched forwarding on
// and, as far as can be known, for no other reason: a program that has set ip_forward
// since, as Docker and libvirt do, wants all links to forward. A link that forwarded
// before is never named.
func (m *Manager) SwitchedOn() ([]string, error) {
	links, err := m.noted()
	if err != nil || len(links) == 0 {
		return nil, err
	}
	now, err := readSysctl(ipForward)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(links, func(_, then string) bool { return then == "0" && now == "1" })
	return slices.Sorted(maps.Keys(links)), nil
}

// unforward switches off forwarding that forward switched on.
func (m *Manager) unforward() error {
	links, err := m.SwitchedOn()
	if err != nil {
		return err
	}
	for _, link := range links {
		if err := writeSysctls(procSys, []sysctl{{forwarding(link), "0", true}}, ""); err != nil {
			return err
		}
	}
	if err := os.Remove(m.notes()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func readSysctl(name string) (string, error) {
	b, err := os.ReadFile(procSys + name)
	return strings.TrimSpace(string(b)), err
}
