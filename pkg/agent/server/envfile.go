package server

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// envFile is the value of EXECD_ENVS unless the image or the sandbox sets one. It is on
// the sandbox's disk, so it outlives stops and snapshots; execd has it in
// /opt/opensandbox, which here is the agent's and cannot be written to.
const envFile = "/var/lib/opensandbox/.env"

// maxEnvFile bounds how much of an environment file is read, in bytes.
const maxEnvFile = 1 << 20

// makeEnvFile makes the environment file where its user could not. SDKs write the file
// by commands, which make it themselves if they run as root. If it cannot be made, as
// on a read-only file system, those commands report that.
func (g *guest) makeEnvFile(path string) {
	if g.user.UID == 0 || g.env["EXECD_ENVS"] != envFile {
		return
	}
	if os.MkdirAll(filepath.Dir(path), 0o755) != nil {
		return
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return
	}
	f.Chown(int(g.user.UID), int(g.user.GID)) //nolint:errcheck // see above
	f.Close()
}

// addEnvFile adds the entries of an environment file, if there is one.
func addEnvFile(env map[string]string, path string) error {
	f, err := proc.OpenRegular(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the environment file of EXECD_ENVS: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxEnvFile))
	if err != nil {
		return fmt.Errorf("read the environment file of EXECD_ENVS: %w", err)
	}
	addEnv(env, string(b))
	return nil
}

// addEnv adds the entries of an environment file, in execd's syntax:
//
//	# a comment
//	NAME=value      trimmed; $VAR and ${VAR} are what is known so far
//	NAME="value"    \n \r \t \" \\ are what they are in C; then as above
//	NAME='value'    as it stands, line ends and all
//
// Other lines are skipped: it is a person's file, and one bad line
// must not keep every command from running.
//
// All variables together expand to maxEnvFile bytes at most, and an entry that needs more is
// skipped as well: with A=$A$A each line would double A, in the memory of PID 1.
func addEnv(env map[string]string, text string) {
	left := maxEnvFile
	for text != "" {
		name, value, literal, rest := envEntry(text)
		text = rest
		if name == "" || strings.IndexByte(name+value, 0) >= 0 {
			continue
		}
		if !literal {
			fits := true
			value = os.Expand(value, func(name string) string {
				if fits = fits && len(env[name]) <= left; !fits {
					return ""
				}
				left -= len(env[name])
				return env[name]
			})
			if !fits {
				continue
			}
		}
		env[name] = value
	}
}

// envEntry takes the first entry of text, or without one, skips its first line.
func envEntry(text string) (name, value string, literal bool, rest string) {
	line, rest, _ := strings.Cut(text, "\n")
	name, value, ok := strings.Cut(line, "=")
	name = strings.TrimSpace(name)
	if !ok || name == "" || name[0] == '#' {
		return "", "", false, rest
	}
	quoted := strings.TrimLeft(value, " \t\r\v\f")
	if quoted == "" || quoted[0] != '\'' && quoted[0] != '"' {
		return name, strings.TrimSpace(value), false, rest
	}
	// A quoted value may go on behind this line.
	body := text[len(line)-len(quoted)+1:]
	end := closing(body, quoted[0])
	if end < 0 {
		return "", "", false, rest
	}
	tail, after, _ := strings.Cut(body[end+1:], "\n")
	if strings.TrimSpace(tail) != "" {
		return "", "", false, rest
	}
	if quoted[0] == '\'' {
		return name, body[:end], true, after
	}
	return name, escapes.Replace(body[:end]), false, after
}

var escapes = strings.NewReplacer(`\\`, `\`, `\"`, `"`, `\n`, "\n", `\r`, "\r", `\t`, "\t")

// closing returns where the quote that begins before s ends, or -1.
func closing(s string, quote byte) int {
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == quote:
			return i
		case s[i] == '\\' && quote == '"':
			i++
		}
	}
	return -1
}
