// Package files answers requests about the files of a sandbox: info, permissions, directories,
// search, moves, replacements, uploads, downloads and copies as tars.
//
//	path ─ resolve ─▶ as whom? (as.go) ─ a turn ─▶ the guest's kernel
//	upload, replace ─▶ draft beside the target ─ rename
//	copies ─▶ internal/tarball, which sandboxctl uses as well
//
// The surprise: a request about files may be made as any user of the guest. The thread that
// answers it has that user's credentials meanwhile, so the kernel says what they may do.
package files

import (
	"io/fs"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// Files answers the requests about files, as somebody.
type Files struct {
	Accounts *proc.Accounts
	Workdir  string        // where relative paths begin
	StateDir string        // the agent's own, which is not listed
	User     proc.Identity // whom ~ is the home of, and whom new files belong to
	Limits   func() agent.Limits

	as *proc.Identity // whom files are accessed as; nil: the agent itself, which may do all
}

// Routes returns the handlers of a path, or nil if it is none of files. The error is
// the client's: a path that names invalid users.
func (f *Files) Routes(path string) (reply.Methods, error) {
	if rest, ok := strings.CutPrefix(path, identityPrefix); ok {
		as, path, err := f.asNamed(rest)
		if err != nil {
			return nil, err
		}
		return as.routes(path), nil
	}
	return f.routes(path), nil
}

func (f *Files) routes(path string) reply.Methods {
	switch path {
	case "/files":
		return reply.Methods{"DELETE": f.around(f.removeFiles)}
	case "/files/info":
		return reply.Methods{"GET": f.around(f.filesInfo)}
	case "/files/permissions":
		return reply.Methods{"POST": f.around(f.permissions)}
	case "/files/mv":
		return reply.Methods{"POST": f.around(f.moveFiles)}
	case "/files/search":
		return reply.Methods{"GET": f.around(f.searchFiles)}
	case "/files/replace":
		return reply.Methods{"POST": f.around(f.replaceFiles)}
	case "/files/upload":
		return reply.Methods{"POST": f.refusing(f.upload)}
	case "/files/download":
		return reply.Methods{"GET": f.around(f.download)}
	case "/files/archive":
		return reply.Methods{"GET": f.around(f.pack), "PUT": f.around(f.unpack)}
	case "/directories":
		return reply.Methods{"POST": f.around(f.makeDirs), "DELETE": f.around(f.removeDirs)}
	case "/directories/list":
		return reply.Methods{"GET": f.around(f.listDir)}
	}
	return nil
}

// paths returns the paths of the query, as asked and resolved.
func (f *Files) paths(r *http.Request) (asked, resolved []string, err error) {
	asked = r.URL.Query()["path"]
	if len(asked) == 0 {
		return nil, nil, reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter path is missing")
	}
	for _, p := range asked {
		q, err := f.resolve(p)
		if err != nil {
			return nil, nil, err
		}
		resolved = append(resolved, q)
	}
	return asked, resolved, nil
}

func (f *Files) fileInfo(path string, fi fs.FileInfo) agent.FileInfo {
	info := agent.FileInfo{
		Path:     path,
		Type:     "other",
		Size:     fi.Size(),
		Modified: fi.ModTime().Format(time.RFC3339Nano),
	}
	switch {
	case fi.Mode().IsRegular():
		info.Type = "file"
	case fi.IsDir():
		info.Type = "directory"
	case fi.Mode()&fs.ModeSymlink != 0:
		info.Type = "symlink"
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		info.Created = time.Unix(st.Ctim.Sec, st.Ctim.Nsec).Format(time.RFC3339Nano) //nolint:unconvert // int32 elsewhere
		info.Owner, info.Group = f.Accounts.UserName(st.Uid), f.Accounts.GroupName(st.Gid)
		info.Mode = digits(st.Mode)
	}
	return info
}

// filesInfo is GET /files/info.
func (f *Files) filesInfo(w http.ResponseWriter, r *http.Request) error {
	asked, resolved, err := f.paths(r)
	if err != nil {
		return err
	}
	infos := make(map[string]agent.FileInfo, len(asked))
	for i, p := range resolved {
		fi, err := os.Lstat(p)
		if err != nil {
			return fsFail("describe a file", err)
		}
		infos[asked[i]] = f.fileInfo(p, fi)
	}
	return reply.JSON(w, http.StatusOK, infos)
}

// removeFiles is DELETE /files.
func (f *Files) removeFiles(w http.ResponseWriter, r *http.Request) error {
	_, resolved, err := f.paths(r)
	if err != nil {
		return err
	}
	for _, p := range resolved {
		if err := unix.Unlink(p); err != nil && !missing(err) {
			if fi, statErr := os.Lstat(p); statErr == nil && fi.IsDir() {
				return reply.Fail(http.StatusInternalServerError, reply.Failed, "delete %s: is a directory; use DELETE /directories", p)
			}
			return fsFail("delete "+p, err)
		}
	}
	return reply.OK(w)
}

// permissions is POST /files/permissions.
func (f *Files) permissions(w http.ResponseWriter, r *http.Request) error {
	var req map[string]agent.FileMode
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	for _, asked := range slices.Sorted(maps.Keys(req)) {
		p, err := f.resolve(asked)
		if err != nil {
			return err
		}
		a, err := f.attributes(req[asked])
		if err != nil {
			return err
		}
		if err := a.apply(p); err != nil {
			return fsFail("set permissions of "+p, err)
		}
	}
	return reply.OK(w)
}
