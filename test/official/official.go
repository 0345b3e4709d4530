// Package official installs the official clients of OpenSandbox, for tests that
// have them judge the daemon and for the bench that measures them. Each set is
// installed once for each version of the file that pins it, below one directory:
// build/compat of the checkout.
package official

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// stepLimit bounds one program of an installation: what it downloads may be large.
const stepLimit = 5 * time.Minute

// Python returns the interpreter of a virtual environment below dir with what a
// file of requirements names in it.
func Python(ctx context.Context, dir, requirements string) (string, error) {
	at, err := once(dir, "venv", requirements, func(at string) error {
		if err := step(ctx, "python3 with venv is needed; on Debian: apt-get install python3-venv", "python3", "-m", "venv", at); err != nil {
			return err
		}
		return step(ctx, "official clients come from PyPI; is there a way to it, or to a mirror in pip.conf?",
			filepath.Join(at, "bin", "python3"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements)
	})
	return filepath.Join(at, "bin", "python3"), err
}

// Node returns the path of a program, copied with all that lie beside it to
// where the modules are that it imports: node looks for them there. They are
// those of the lock file in the program's directory or, if lock is not empty, in
// that one.
func Node(ctx context.Context, dir, program, lock string) (string, error) {
	from := filepath.Dir(program)
	if lock == "" {
		lock = from
	}
	at, err := once(dir, "node", filepath.Join(lock, "package-lock.json"), func(at string) error {
		for _, name := range []string{"package.json", "package-lock.json"} {
			if err := copyFile(filepath.Join(lock, name), filepath.Join(at, name)); err != nil {
				return err
			}
		}
		return step(ctx, "Node 20 or later with npm is needed, and a way to the npm registry, or a mirror in .npmrc",
			"npm", "ci", "--prefix", at, "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
	})
	if err != nil {
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

// once makes a directory that is named after a file's content. One that was made
// in part is made again.
func once(dir, kind, file string, fill func(at string) error) (string, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(content)
	at, err := filepath.Abs(filepath.Join(dir, kind+"-"+hex.EncodeToString(sum[:6])))
	if err != nil {
		return "", err
	}
	done := filepath.Join(at, "complete")
	if _, err := os.Stat(done); err == nil {
		return at, nil
	}
	if err := os.RemoveAll(at); err != nil {
		return "", err
	}
	if err := os.MkdirAll(at, 0o755); err != nil {
		return "", err
	}
	if err := fill(at); err != nil {
		return "", err
	}
	return at, os.WriteFile(done, nil, 0o600)
}

func step(ctx context.Context, hint string, argv ...string) error {
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s\n%s", strings.Join(argv, " "), err, out, hint)
	}
	return nil
}

func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, content, 0o644)
}
