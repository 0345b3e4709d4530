package client

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Commands are the commands that were started in a sandbox, each known by its id.
type Commands struct{ sandbox }

// Signal sends a signal, by name as "SIGINT", to the command's process group.
func (c Commands) Signal(ctx context.Context, command, name string) error {
	if err := checkCommandID(command); err != nil {
		return err
	}
	return c.do(ctx, request{
		method: http.MethodPost, path: c.agentPath("/command/" + command + "/signal"),
		query: url.Values{"signal": {name}},
	}, nil)
}

// Status returns the state of a command.
func (c Commands) Status(ctx context.Context, command string) (st agent.CommandStatus, err error) {
	if err := checkCommandID(command); err != nil {
		return st, err
	}
	err = c.do(ctx, get(c.agentPath("/command/status/"+command)), &st)
	return st, err
}

// List lists the commands that the sandbox knows, its entrypoint among them, the newest
// first: all that run, and the last thousand that have ended.
func (c Commands) List(ctx context.Context) ([]agent.CommandStatus, error) {
	return ask[[]agent.CommandStatus](ctx, c.daemon, get(c.agentPath("/command")))
}

// Logs copies the output of a background command since cursor to w and
// returns the cursor for the next call; 0 is the start.
func (c Commands) Logs(ctx context.Context, command string, cursor int64, w io.Writer) (int64, error) {
	if err := checkCommandID(command); err != nil {
		return cursor, err
	}
	r := get(c.agentPath("/command/" + command + "/logs"))
	if cursor > 0 {
		r.query = url.Values{"cursor": {strconv.FormatInt(cursor, 10)}}
	}
	resp, err := c.stream(ctx, r)
	if err != nil {
		return cursor, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(w, resp.Body); err != nil {
		return cursor, fmt.Errorf("copy the logs of command %s: %w", command, err)
	}
	next, err := strconv.ParseInt(resp.Header.Get(agent.CursorHeader), 10, 64)
	if err != nil || next < cursor {
		return cursor, errs.New(errs.Internal, "the agent of sandbox %s sent logs without a cursor", c.name)
	}
	return next, nil
}

// LastLines copies the last lines of the output of a background command to w, and
// with follow what comes until the command has ended or ctx has. To find the
// lines it reads all that the agent has. n is as for Follow.
func (c Commands) LastLines(ctx context.Context, command string, lines int, follow bool, n Notices, w io.Writer) error {
	count := agent.LastLines{Lines: lines}
	end, err := c.Logs(ctx, command, 0, &count)
	if err != nil {
		return err
	}
	size := count.Bytes()
	if follow {
		return c.Follow(ctx, command, max(0, end-size), n, w)
	}
	if size > 0 {
		_, err = c.Logs(ctx, command, max(0, end-size), agent.FirstBytes(w, size))
	}
	return err
}

// Follow copies the output of a background command since cursor to w, as it comes, until
// the command has ended or ctx has. When the daemon is restarted, it waits for it and goes
// on at the byte where it was.
func (c Commands) Follow(ctx context.Context, command string, cursor int64, n Notices, w io.Writer) error {
	if err := checkCommandID(command); err != nil {
		return err
	}
	return c.persist(ctx, n, func(up func()) error {
		resp, err := c.stream(ctx, request{
			method: http.MethodGet, path: c.agentPath("/command/" + command + "/logs"),
			query: url.Values{"cursor": {strconv.FormatInt(cursor, 10)}, "follow": {"true"}}, patient: true,
		})
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		up()
		if first, err := strconv.ParseInt(resp.Header.Get(agent.CursorHeader), 10, 64); err == nil {
			cursor = first // later than it was if the agent has forgotten output
		}
		copied, err := io.Copy(w, c.followed(ctx, resp.Body))
		cursor += copied
		return err
	})
}

func checkCommandID(id string) error {
	if !agent.IsCommandID(id) {
		return errs.New(errs.Invalid, "%q is not the id of a command; `sandboxctl exec -d` prints it", id)
	}
	return nil
}

// LookupUser finds uid and gid of USER[:GROUP], by number or by name in the
// sandbox's own /etc/passwd and /etc/group. Without GROUP gid is nil: the agent gives the command
// the user's own group and those that list the user.
func (c Commands) LookupUser(ctx context.Context, spec string) (uid, gid *int64, err error) {
	user, group, hasGroup := strings.Cut(spec, ":")
	if n, ok := number(user); ok {
		uid = &n
	} else {
		row, err := c.lookupName(ctx, "/etc/passwd", user, 4)
		if err != nil {
			return nil, nil, err
		}
		u, ok1 := number(row[2])
		_, ok2 := number(row[3])
		if !ok1 || !ok2 {
			return nil, nil, errs.New(errs.Invalid, "user %q has no valid uid and gid in /etc/passwd of sandbox %s", user, c.name)
		}
		uid = &u
	}
	if !hasGroup {
		return uid, nil, nil
	}
	if n, ok := number(group); ok {
		return uid, &n, nil
	}
	row, err := c.lookupName(ctx, "/etc/group", group, 3)
	if err != nil {
		return nil, nil, err
	}
	g, ok := number(row[2])
	if !ok {
		return nil, nil, errs.New(errs.Invalid, "group %q has no valid gid in /etc/group of sandbox %s", group, c.name)
	}
	return uid, &g, nil
}

func number(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && n >= 0 && n < 1<<32-1
}

// lookupName finds the line of name in a colon-separated file of at least min fields.
func (c Commands) lookupName(ctx context.Context, file, name string, fields int) ([]string, error) {
	rc, err := Files(c).Download(ctx, file)
	if err != nil {
		return nil, fmt.Errorf("look up %q: %w", name, err)
	}
	defer rc.Close()
	sc := bufio.NewScanner(io.LimitReader(rc, 4<<20))
	for sc.Scan() {
		if row := strings.Split(sc.Text(), ":"); row[0] == name && len(row) >= fields {
			return row, nil
		}
	}
	return nil, errs.New(errs.Invalid, "%s of sandbox %s has no entry %q; use a number", file, c.name, name)
}

// Interrupt ends a command: SIGTERM to its process group, and SIGKILL after three seconds.
func (c Commands) Interrupt(ctx context.Context, command string) error {
	if err := checkCommandID(command); err != nil {
		return err
	}
	return c.do(ctx, request{method: http.MethodDelete, path: c.agentPath("/command"), query: url.Values{"id": {command}}}, nil)
}
