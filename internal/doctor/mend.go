package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/internal/config"
)

// sysctlFile is where Mend keeps the sysctls that it set, for the next boot.
const sysctlFile = "/etc/sysctl.d/60-sandboxd.conf"

// Mend sets the sysctls and loads the modules that findings ask for, and then runs
// the checks again. It returns the new findings; Fixed in each says what was done and
// what the value was before. Everything else is left to the operator, because it would
// change what others on the host rely on. Mend is idempotent.
func Mend(ctx context.Context, cfg *config.Config, advisories string, found []Finding) ([]Finding, error) {
	h := newHost(cfg)
	h.advisoriesFile = advisories
	return mendAll(ctx, h, found, table())
}

func mendAll(ctx context.Context, h *host, found []Finding, checks []check) ([]Finding, error) {
	err := mend(ctx, h, found)
	now := examine(ctx, h, checks)
	for i := range now {
		now[i].Fixed = found[i].Fixed
	}
	return now, err
}

func mend(ctx context.Context, h *host, found []Finding) error {
	var errs []error
	for i := range found {
		f := &found[i]
		for _, m := range f.modules {
			if err := h.command(ctx, "modprobe", m); err != nil {
				errs = append(errs, fmt.Errorf("load module %s: modprobe: %w", m, err))
				continue
			}
			f.Fixed += "loaded " + m + "; "
		}
		if f.sysctl != nil {
			was, err := h.set(*f.sysctl)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			f.Fixed = fmt.Sprintf("%s is %d, was %s; saved in %s", f.sysctl.name, f.sysctl.want, was, sysctlFile)
		}
		f.Fixed = strings.TrimSuffix(f.Fixed, "; ")
	}
	return errors.Join(errs...)
}

// set writes a sysctl: first to sysctlFile for the next boot, then to the kernel.
func (h *host) set(s setting) (was string, err error) {
	was = strings.TrimSpace(h.read(s.path()))
	if now, err := strconv.ParseInt(was, 10, 64); err != nil || now >= s.want {
		return was, err // it was raised in the meantime
	}
	if err := h.keep(s, was); err != nil {
		return was, err
	}
	if err := os.WriteFile(h.root+s.path(), fmt.Appendf(nil, "%d\n", s.want), 0o644); err != nil {
		return was, fmt.Errorf("set %s: %w", s.name, err)
	}
	return was, nil
}

// keep adds a setting to sysctlFile, once, with its previous value.
func (h *host) keep(s setting, was string) error {
	path := h.root + sysctlFile
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("save %s: %w", s.name, err)
	}
	// sysctl.d(5) allows comments only on lines of their own.
	line := fmt.Sprintf("%s = %d", s.name, s.want)
	lines := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
	if len(b) == 0 {
		lines = []string{"# Written by `sandboxd doctor --fix`."}
	}
	at := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, s.name+" =") })
	if at >= 0 {
		lines[at] = line
	} else {
		lines = append(lines, fmt.Sprintf("# %s was %s", s.name, was), line)
	}
	text := strings.Join(lines, "\n") + "\n"
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("save %s: %w", s.name, err)
	}
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		return fmt.Errorf("save %s: %w", s.name, err)
	}
	return os.Rename(path+".new", path)
}
