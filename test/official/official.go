// Package official installs the official clients of OpenSandbox, for tests that
// have them judge the daemon and for the bench that measures them. Each set is
// installed once for each content of the file that pins it, into the test cache.
package official

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/testcache"
)

// stepLimit bounds one program of an installation: what it downloads may be large.
const stepLimit = 5 * time.Minute

// Python returns the interpreter of a virtual environment with what a file of
// requirements names in it.
func Python(ctx context.Context, requirements string) (string, error) {
	at, err := environment(ctx, "venv", requirements, []string{"python3", "-VV"}, func(at string) error {
		if err := step(ctx, "python3 with venv is needed; on Debian: apt-get install python3-venv", "python3", "-m", "venv",
			at); err != nil {
			return err
		}
		return step(ctx, "official clients come from PyPI; is there a way to it, or to a mirror in pip.conf?",
			filepath.Join(at, "bin", "python3"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements)
	})
	return filepath.Join(at, "bin", "python3"), err
}

// Node returns the path of a program, copied below dir with all that lie beside it, to
// where node finds the modules that it imports. They are those of the lock file in
// the program's directory or, if lock is not empty, in that one.
func Node(ctx context.Context, dir, program, lock string) (string, error) {
	from := filepath.Dir(program)
	if lock == "" {
		lock = from
	}
	modules, err := Modules(ctx, lock)
	if err != nil {
		return "", err
	}
	at, err := filepath.Abs(filepath.Join(dir, filepath.Base(modules)))
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(at, 0o755); err != nil {
		return "", err
	}
	link := filepath.Join(at, "node_modules")
	if err := os.Symlink(filepath.Join(modules, "node_modules"), link); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	all, err := filepath.Glob(filepath.Join(from, "*.mjs"))
	if err != nil {
		return "", err
	}
	for _, path := range all {
		if err := copyFile(path, filepath.Join(at, filepath.Base(path))); err != nil {
			return "", err
		}
	}
	return filepath.Join(at, filepath.Base(program)), nil
}

// Modules returns the directory in which node_modules has what package-lock.json in
// dir names.
func Modules(ctx context.Context, dir string) (string, error) {
	return environment(ctx, "node", filepath.Join(dir, "package-lock.json"), []string{"node", "--version"}, func(at string) error {
		for _, name := range []string{"package.json", "package-lock.json"} {
			if err := copyFile(filepath.Join(dir, name), filepath.Join(at, name)); err != nil {
				return err
			}
		}
		return step(ctx, "Node 20 or later with npm is needed, and a way to the npm registry, or a mirror in .npmrc",
			"npm", "ci", "--prefix", at, "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
	})
}

// environment returns the directory of the cache that fill filled for a file of pins,
// with tools as they are: another content, or another tool, is another directory.
func environment(ctx context.Context, kind, pins string, version []string, fill func(at string) error) (string, error) {
	content, err := os.ReadFile(pins)
	if err != nil {
		return "", err
	}
	tool, err := exec.CommandContext(ctx, version[0], version[1:]...).Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", strings.Join(version, " "), err)
	}
	dir, err := testcache.Dir("clients")
	if err != nil {
		return "", err
	}
	at := filepath.Join(dir, kind+"-"+testcache.Digest(content, tool)[:16])
	return at, testcache.Tree(at, fill)
}

func step(ctx context.Context, hint string, argv ...string) error {
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s\n%s", strings.Join(argv, " "), err, out, hint)
	}
	return nil
}

// copyFile replaces to by a copy of from, as one step.
func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(to), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(content)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), to)
}
