// Package agent is the channel between the daemon and PID 1 of a sandbox: the
// wire types, the bootstrap line, the obituary and the daemon's client. The
// other end is agent/server.
//
//	daemon                                  sandbox-agent, PID 1
//	Bootstrap.File ── stdin, one JSON line ─▶ reads it, starts the entrypoint
//	Client.Ready   ── GET /ping ───────────▶ answers once exec is possible
//	Client         ── HTTP/1.1, token ─────▶ OpenSandbox's execd API
//	ParseObituary  ◀─ files in the upper ─── how the entrypoint ended
//
// The surprise: the agent is guest code from its first accept, because a guest can
// replace PID 1. So this package bounds everything that it decodes in size and time. It
// uses nothing from an agent as a path or as a length to allocate, and trusts none of
// it.
//
// # What is spoken
//
// OpenSandbox's execd API (HTTP/1.1 on TCP port 44772, header
// X-EXECD-ACCESS-TOKEN on everything), and these extensions of ours:
//
//   - POST /command takes argv (a list) instead of command (a shell line), and
//     "stdin": true. A command with stdin reads what POST /command/{id}/stdin
//     carries, until that body ends; without it, standard input is /dev/null.
//   - A client of frames whose connection broke comes back by GET /command/{id}/frames
//     with the numbers of bytes that it has, ?stdout=N&stderr=M. The first frame says
//     with which bytes the reply goes on. Such a client sends standard input in parts,
//     POST /command/{id}/stdin?offset=N&more=true, so that a part may be sent again.
//   - POST /command/{id}/signal?signal=SIGINT signals its process group.
//   - GET /command lists the commands that are known, as a list of [CommandStatus].
//   - GET /command/{id}/logs?follow=true goes on until the command has ended;
//     its cursor header is the number of the first byte it sends. With since=TIME
//     (RFC 3339) it begins with the output of that time.
//   - GET /command/{id}/times says when the output was written, as [OutputTimes].
//   - POST /pty takes argv, envs, uid, gid, timeout, cols and rows beside execd's
//     command and cwd; GET /pty lists sessions. A session that has ended can be
//     connected to again: it replays, and says the exit again. A long replay comes
//     in several messages. A session is also a command: its id works above.
//   - A context that died answers as one that never was, 404, and says why.
//   - A session's shell is bash, or sh without it; see [SessionRequest].
//   - The entrypoint is a command with the id "entrypoint": status and logs
//     work, interrupting it is refused.
//   - POST /reach?host=&port= tries to reach a TCP port from inside, as [Reached].
//   - PUT /limits has [Limits]; PUT /variables has variables by name, which replace
//     [Bootstrap].Variables for what is started from then on.
//   - POST /adopt makes the agent that of another sandbox; see [Adoption]. Only the daemon
//     asks for it: the gateway passes it from nobody ([DaemonOnly]).
//   - GET /ping answers with X-Sandboxd-Agent-Protocol.
//   - POST /command with Accept: application/vnd.sandboxd.frames answers raw
//     frames instead of events, so that output arrives byte for byte.
//   - GET /files/archive?path=&follow= answers with a tar; with that Accept header
//     in frames, of which the last has the error if the tar is not complete.
//   - PUT /files/archive?path=&name=&owners= unpacks a tar; see docs/design/agent.md.
//
// # Frames
//
// A frame is one byte of stream number, four bytes of big-endian length (at
// most 1 MiB) and that many bytes:
//
//	0  control: JSON {"id":"…"} as the first frame, later empty ones as keep-alive
//	1  standard output
//	2  standard error
//	3  exit: JSON [FrameExit], the last frame of a foreground command
//
// A background command gets the first control frame and the end of the body.
// A body that ends without an exit frame says that the connection broke, not
// that the command ended.
package agent

import "strings"

// Numbers and names of the channel.
const (
	// Port is where the agent listens, the port of OpenSandbox's execd.
	Port = 44772
	// Protocol is spoken by this release; MinProtocol is the oldest it still
	// serves: an agent lives as long as its sandbox, over daemon upgrades.
	Protocol    = 1
	MinProtocol = 1

	ProtocolHeader = "X-Sandboxd-Agent-Protocol"
	TokenHeader    = "X-EXECD-ACCESS-TOKEN" //nolint:gosec // the header's name
	// OOMKillsHeader has the number of processes that the kernel has killed for the
	// sandbox's memory. The daemon adds it to requests about commands, and to the
	// answers, because only the host knows.
	OOMKillsHeader = "X-Sandboxd-OOM-Kills"
	// DenialsHeader has the number of flows and names that the network had refused the
	// sandbox before a command began. The daemon adds it to the answers.
	DenialsHeader = "X-Sandboxd-Denials"
	CursorHeader  = "EXECD-COMMANDS-TAIL-CURSOR"
	// SinceHeader has the number of the first byte that was asked for by time. An agent of
	// an older release does not send it, and ignores the time.
	SinceHeader = "X-Sandboxd-Since"

	// FramesType is the media type that asks for frames instead of events.
	FramesType = "application/vnd.sandboxd.frames"

	// MaxBootstrap bounds the bootstrap line, in bytes.
	MaxBootstrap = 2 << 20
	// MaxStdinPart bounds a part of a command's standard input, in bytes.
	MaxStdinPart = 1 << 20

	// MaxJSON bounds a JSON request body, in bytes.
	MaxJSON = 16 << 20

	// EntrypointID is the command id of the sandbox's entrypoint.
	EntrypointID = "entrypoint"
)

// Why a command ended. Sandboxes have the same reasons and some more (record.Reason).
// Only the host knows of an "oom": the daemon adds it to a watched command, and the
// agent finds it for a background command by OOMKillsHeader.
const (
	ReasonExited    = "exited"
	ReasonKilled    = "killed"
	ReasonTimeout   = "timeout"
	ReasonOOM       = "oom"
	ReasonDiskFull  = "disk_full"
	ReasonPidsLimit = "pids_limit"
)

// SDK reports whether a User-Agent is that of one of OpenSandbox's SDKs, and its version.
// All of them send theirs: OpenSandbox-Python-SDK/1.1.0.
func SDK(userAgent string) (version string, ok bool) {
	name, version, ok := strings.Cut(userAgent, "/")
	return version, ok && strings.HasPrefix(name, "OpenSandbox-") && strings.HasSuffix(name, "-SDK")
}

// CommandRequest is the body of POST /command.
type CommandRequest struct {
	Command    string            `json:"command,omitempty"` // run as bash -c, or sh -c
	Argv       []string          `json:"argv,omitempty"`    // instead of Command; no shell
	Cwd        string            `json:"cwd,omitempty"`     // ~ and $VAR are expanded
	Background bool              `json:"background,omitempty"`
	Timeout    int64             `json:"timeout,omitempty"` // ms; 0: none
	UID        *int64            `json:"uid,omitempty"`
	GID        *int64            `json:"gid,omitempty"` // needs UID
	Envs       map[string]string `json:"envs,omitempty"`
	Stdin      bool              `json:"stdin,omitempty"`
	Forget     bool              `json:"forget,omitempty"` // the agent forgets it at its end: a probe
}

// Event is one event of the stream of a command or of code. Empty fields are
// left out.
type Event struct {
	Type           string            `json:"type"` // init ping stdout stderr error execution_complete; of code: execution_count result
	Text           string            `json:"text,omitempty"`
	ExecutionCount int               `json:"execution_count,omitempty"` // calls of this context, with this one
	ExecutionTime  int64             `json:"execution_time,omitempty"`  // ms
	Results        map[string]string `json:"results,omitempty"`         // a value by MIME type; bytes are base64
	Timestamp      int64             `json:"timestamp"`                 // Unix ms
	Error          *EventError       `json:"error,omitempty"`
}

// EventError says how a command or code failed. SDKs take the exit code of a
// command from Value.
type EventError struct {
	Name      string   `json:"ename"`
	Value     string   `json:"evalue"` // of a command its exit code; "-1" if a signal ended it
	Traceback []string `json:"traceback"`
}

// CommandStatus is the reply of GET /command/status/{id}. Times are RFC 3339.
type CommandStatus struct {
	ID         string `json:"id"`
	Content    string `json:"content"`
	Running    bool   `json:"running"`
	ExitCode   *int   `json:"exit_code,omitempty"`
	Error      string `json:"error,omitempty"`
	Reason     string `json:"reason,omitempty"` // ours: Reason…, once it has ended
	StartedAt  string `json:"started_at"`
	FinishedAt string `json:"finished_at,omitempty"`
}

// OutputTimes is the reply of GET /command/{id}/times: when the kept output of a command
// was written. A mark is the number of a byte and a time in Unix milliseconds, which
// holds for the bytes up to the next mark. The older the output, the rougher the times.
type OutputTimes struct {
	End   int64      `json:"end"` // number of the byte that comes next
	Marks [][2]int64 `json:"marks"`
}

// FileInfo describes a file; symbolic links are not followed. Times are
// RFC 3339 with nanoseconds, Created is the inode's change time.
type FileInfo struct {
	Path     string `json:"path"`
	Type     string `json:"type"` // file directory symlink other
	Size     int64  `json:"size"`
	Modified string `json:"modified_at"`
	Created  string `json:"created_at"`
	Owner    string `json:"owner"` // name, or number if the guest knows none
	Group    string `json:"group"`
	Mode     int    `json:"mode"` // decimal digits are the octal mode: 644
}

// FileMode asks for owner, group and mode of a file; zero leaves as is.
type FileMode struct {
	Owner string `json:"owner,omitempty"`
	Group string `json:"group,omitempty"`
	Mode  int    `json:"mode,omitempty"` // as in FileInfo
}

// Metrics is what the sandbox uses of its own limits.
type Metrics struct {
	CPUCount  float64 `json:"cpu_count"`
	CPUPct    float64 `json:"cpu_used_pct"` // 0..100 of CPUCount
	MemTotal  float64 `json:"mem_total_mib"`
	MemUsed   float64 `json:"mem_used_mib"`
	Timestamp int64   `json:"timestamp"` // Unix ms
}

// Tasks is the reply of GET /tasks.
type Tasks struct {
	Tasks int64 `json:"tasks"` // processes and their threads, without the agent
}

// ContextDied is the name of the error that ends code whose context died. The first
// line of its traceback is "signal: killed" if a SIGKILL ended it.
const ContextDied = "ContextDied"

// ContextBusy begins the message about a context that runs other code, in the words of
// execd, which clients of OpenSandbox look for.
const ContextBusy = "session is busy"

// CodeRequest is the body of POST /code. Without an id the code runs in the
// context that the sandbox keeps for the language; without a language as well,
// as a command.
type CodeRequest struct {
	Code    string      `json:"code"`
	Context CodeContext `json:"context"`
}

// CodeLanguages are the languages of contexts.
var CodeLanguages = []string{"python", "javascript", "typescript", "java", "go", "bash"}

// CodeContext is a living interpreter: the body and the reply of POST
// /code/context.
type CodeContext struct {
	ID       string `json:"id,omitempty"`
	Language string `json:"language"`      // python javascript typescript java go bash
	Cwd      string `json:"cwd,omitempty"` // where it starts; ~ and $VAR are expanded
}

// Error is the body of every reply that is not a success.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}
