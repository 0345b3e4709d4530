package appliance

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// A Wish is for the packages that others need on a Debian that has nothing.
type Wish struct {
	Packages []string // files .deb
	Arch     string   // as Debian has it
	Sources  string   // the repositories, in the form of sources.list(5)
	Dir      string   // of the downloads; it is made, and has nothing else
	Out      io.Writer
}

// Fetch downloads them by apt, and returns the files. apt checks the signatures of the repositories, and each
// file by their hashes. It knows nothing of this host's packages, so all of them come.
func Fetch(ctx context.Context, w Wish) ([]string, error) {
	if !has("apt-get") {
		return nil, fmt.Errorf("apt-get is missing: make the bundle on a Debian, or give it all packages by --package")
	}
	dir, err := filepath.Abs(w.Dir)
	if err != nil {
		return nil, err
	}
	for _, d := range []string{"lists/partial", "archives/partial", "parts"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	sources := "sources.list"
	if strings.Contains("\n"+w.Sources, "\nTypes:") {
		sources = "sources.sources" // the name says the form
	}
	for name, text := range map[string]string{sources: w.Sources, "status": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	options := []string{
		"-o", "Dir::Etc::sourcelist=" + filepath.Join(dir, sources), "-o", "Dir::Etc::sourceparts=" + filepath.Join(dir, "parts"),
		"-o", "Dir::State=" + dir, "-o", "Dir::State::lists=" + filepath.Join(dir, "lists"),
		"-o", "Dir::State::status=" + filepath.Join(dir, "status"),
		"-o", "Dir::Cache=" + dir, "-o", "Dir::Cache::archives=" + filepath.Join(dir, "archives"),
		"-o", "APT::Architecture=" + w.Arch, "-o", "APT::Architectures=" + w.Arch, "-o", "Acquire::Languages=none",
		"-o", "APT::Sandbox::User=", // it could not write here
		"-o", "APT::Update::Error-Mode=any", "-o", "Acquire::AllowInsecureRepositories=false",
		"-o", "APT::Get::AllowUnauthenticated=false", "--quiet",
	}
	install := []string{"install", "--yes", "--no-install-recommends", "--download-only"}
	for _, p := range w.Packages {
		p, err := filepath.Abs(p)
		if err != nil {
			return nil, err
		}
		install = append(install, p)
	}
	for _, args := range [][]string{{"update"}, install} {
		var said bytes.Buffer
		cmd := exec.CommandContext(ctx, "apt-get", append(options[:len(options):len(options)], args...)...)
		cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
		cmd.Stdout, cmd.Stderr = io.MultiWriter(w.Out, &said), io.MultiWriter(w.Out, &said)
		if err := cmd.Run(); err != nil {
			last := bytes.TrimSpace(said.Bytes())
			return nil, fmt.Errorf("apt-get %s: %w: %s", args[0], err, last[max(0, len(last)-1000):])
		}
	}
	return filepath.Glob(filepath.Join(dir, "archives", "*.deb"))
}
