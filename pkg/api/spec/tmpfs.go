package spec

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Limits of extension sandboxd.tmpfs.
const (
	maxTmpfs     = 16
	maxTmpfsPath = 1024 // bytes
	minTmpfs     = 4 << 10
)

// parseTmpfs reads PATH[:OPTION,...], docker's form, several separated by ";". A tmpfs
// without a size may hold half of the sandbox's memory, as a tmpfs on the host may hold
// half of the host's.
func parseTmpfs(v string, memory int64) (all []record.Tmpfs, err error) {
	for item := range strings.SplitSeq(v, ";") {
		name, options, _ := strings.Cut(item, ":")
		t := record.Tmpfs{Path: name, Bytes: memory / 2, Mode: 0o1777}
		switch {
		case len(all) == maxTmpfs:
			return nil, httperr.Invalid("extension %s names more than %d file systems", wire.ExtTmpfs, maxTmpfs)
		case !path.IsAbs(name) || path.Clean(name) != name || name == "/" || len(name) > maxTmpfsPath ||
			strings.ContainsAny(name, "\x00\n"):
			return nil, httperr.Invalid("extension %s: %q: want the absolute path of a directory in the sandbox, other than /, without . "+
				"and .., such as /tmp", wire.ExtTmpfs, httperr.Clip(name, 80))
		case record.IsPrivate(name):
			return nil, httperr.Invalid("extension %s: %q: the runtime or sandboxd has its own files there; choose another directory",
				wire.ExtTmpfs, httperr.Clip(name, 80))
		case slices.ContainsFunc(all, func(o record.Tmpfs) bool { return record.Within(name, o.Path) || record.Within(o.Path, name) }):
			return nil, httperr.Invalid("extension %s: %q overlaps another of its directories; one would hide the other",
				wire.ExtTmpfs, httperr.Clip(name, 80))
		}
		if options != "" {
			for o := range strings.SplitSeq(options, ",") {
				if err := tmpfsOption(&t, o, memory); err != nil {
					return nil, err
				}
			}
		}
		all = append(all, t)
	}
	return all, nil
}

func tmpfsOption(t *record.Tmpfs, option string, memory int64) error {
	key, v, _ := strings.Cut(option, "=")
	switch {
	case key == "size":
		// docker's k, m and g are powers of 1024, unlike those of resourceLimits.
		if len(v) > 1 && strings.ContainsAny(v[len(v)-1:], "kmgKMG") {
			v += "i"
		}
		n, err := parseSize(v)
		if err != nil {
			return httperr.Invalid("extension %s: size: %s", wire.ExtTmpfs, err.Error())
		}
		if n < minTmpfs || n > memory {
			return httperr.Invalid("extension %s: size of %s: want %s to %s, the memory limit, because the files count as memory",
				wire.ExtTmpfs, record.Size(n), record.Size(minTmpfs), record.Size(memory))
		}
		t.Bytes = n
	case key == "mode":
		n, err := strconv.ParseUint(v, 8, 32)
		if err != nil || n > 0o1777 {
			return httperr.Invalid("extension %s: mode %q: want octal digits up to 1777", wire.ExtTmpfs, httperr.Clip(v, 20))
		}
		t.Mode = uint32(n)
	case option == "exec", option == "noexec":
		t.Exec = option == "exec"
	case option == "rw", option == "nosuid", option == "nodev": // always
	default:
		return httperr.Invalid("extension %s: option %q is unknown; the options are size=, mode=, exec and noexec; nosuid and nodev are "+
			"always set", wire.ExtTmpfs, httperr.Clip(option, 40))
	}
	return nil
}
