package archtest

import (
	"slices"
	"strings"
	"testing"
)

// rooms lists, for each package that has rooms (packages below it), the rooms and which
// rooms of the same package each may import; "." is the package itself. An import that is
// not in the table is not allowed.
var rooms = map[string]map[string][]string{
	"pkg/api": {
		"wire":         {}, // the JSON of the API, for clients too
		"wire/httperr": {"wire"},
		"spec":         {"wire", "wire/httperr"},
		"auth":         {"wire", "wire/httperr"},
		"gateway":      {"wire", "wire/httperr"},
		".":            {"wire", "wire/httperr", "spec", "auth", "gateway"},
	},
	"pkg/agent": {
		".":           {}, // the protocol between the daemon and the agent
		"proc":        {},
		"interpreter": {"."},
		"reply":       {"."},
		"output":      {".", "proc"},
		"files":       {".", "proc", "reply"},
		"command":     {".", "proc", "reply", "output"},
		"shell":       {".", "proc", "reply", "command"},
		"terminal":    {".", "proc", "reply", "command"},
		"server":      {".", "proc", "interpreter", "reply", "output", "files", "command", "shell", "terminal"},
	},
	"pkg/snapshot": {
		"tree":          {},
		"tree/treetest": {},
		"layer":         {"tree"},
		"diff":          {"tree"},
		"overlay":       {"tree"},
		"pool":          {"tree"},
		"pool/btrfs":    {"tree", "pool"},
		"pool/project":  {"tree", "pool"},
		"pool/plain":    {"tree", "pool"},
		".":             {"tree", "layer", "diff", "overlay", "pool", "pool/btrfs", "pool/project", "pool/plain"},
		"snapshottest":  {".", "layer", "pool"},
	},
	"internal/cli": {
		"text":       {}, // sizes, times and tables as people read them
		"group":      {}, // commands that have subcommands; sandboxd has some too
		"words":      {}, // docker's words
		"command":    {"text", "group", "words"},
		"foreground": {"text", "command"}, // a guest's program in the foreground of this terminal
		"bench":      {"text", "command"},
		"code":       {"text", "command", "foreground"},
		"exec":       {"text", "command", "foreground"},
		"files":      {"text", "command"},
		"fork":       {"text", "command"},
		"image":      {"text", "command"},
		"network":    {"text", "command"},
		"observe":    {"text", "command"},
		"pool":       {"text", "command"},
		"sandbox":    {"text", "command", "foreground"},
		"secret":     {"text", "command"},
		"snapshot":   {"text", "command"},
		"system":     {"text", "command"},
		"volume":     {"text", "command"},
		".": {
			"command", "bench", "code", "exec", "files", "fork", "image", "network", "observe", "pool", "sandbox", "secret", "snapshot",
			"system",
			"volume",
		},
	},
	"pkg/egress": {
		"child":     {},                // the line to a child, and who starts it again
		"nla":       {},                // attributes of netlink messages
		"conntrack": {"nla", "policy"}, // the kernel's table of flows
		"paths":     {},                // paths of requests, and patterns of them
		"policy":    {"paths"},         // rules, without I/O
		// policies of tests
		"policy/policytest": {},
		"heads":             {"child"}, // a child: the heads of connections
		// a child for a sandbox with inspected hosts: it ends TLS
		"terminate": {"child", "heads"},
		"names":     {"child"}, // a child: DNS
		"tunnel":    {},        // what names may carry out
		"flowlog":   {},        // flows by destination, and bytes
		"leases":    {},        // which addresses DNS has answered for which names
		// a sandbox's certificate authority
		"authority": {"policy"},
		// flows by name, for the next daemon
		"flowfile": {},
		// the credential vault as a model; and its credentials in requests
		"vault":        {"paths", "policy"},
		"vault/inject": {"paths", "vault"},
		// the rules and the vault, in the child terminate
		"judge": {"policy", "terminate", "vault", "vault/inject"},
		".": {
			"child", "conntrack", "flowfile", "flowlog", "heads", "judge", "leases", "names", "nla", "policy", "terminate", "tunnel",
		},
	},
	"pkg/image": {
		"archive":               {},
		"archive/archivetest":   {},
		"registry":              {},
		"registry/registrytest": {},
		".":                     {"archive", "registry"},
	},
	"internal/backup": {
		"target":            {}, // where backups are kept
		"target/targettest": {"target"},
		"chunks":            {"target"}, // the data of backups, each piece of it once
		"files":             {"chunks"}, // trees of files as chunks
		".":                 {"target", "chunks", "files"},
		"contents":          {".", "chunks", "files", "target"},    // which trees of a host are in a backup
		"schedule":          {".", "target", "chunks", "contents"}, // on a timer
	},
	"pkg/oci": {
		".":                 {},
		"launch":            {},
		"runc":              {".", "launch"},
		"runsc":             {"."},
		"runtimetest":       {".", "trust"},
		"trust":             {}, // how a guest comes to trust an authority
		"runtimetest/guest": {},
	},
}

func TestRooms(t *testing.T) {
	for _, s := range sources(t) {
		family, room := familyOf(s.dir)
		if family == "" || s.test() {
			continue
		}
		may, ok := rooms[family][room]
		if !ok {
			t.Errorf("%s: %s has no room %q; name it in archtest, with what it may import", s.path, family, room)
			continue
		}
		for _, imp := range s.file.Imports {
			dep, _ := strings.CutPrefix(strings.Trim(imp.Path.Value, `"`), module)
			if f, other := familyOf(dep); f == family && !slices.Contains(may, other) {
				t.Errorf("%s imports %s: room %q of %s may import %q only", s.path, dep, room, family, may)
			}
		}
	}
}

// familyOf splits the directory of a package into one that has rooms, and the room.
func familyOf(dir string) (family, room string) {
	for f := range rooms {
		if dir == f {
			return f, "."
		}
		if covers(f, dir) {
			return f, strings.TrimPrefix(dir, f+"/")
		}
	}
	return "", ""
}
