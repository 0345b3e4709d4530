package agent

// The first byte of a binary message of GET /pty/{id}/ws says what the rest is.
const (
	PtyStdin  = 0 // to the session
	PtyStdout = 1 // from the session, or all of its terminal
	PtyStderr = 2 // pipe mode only
	PtyReplay = 3 // 8 bytes of big-endian offset, and the output from there on
)

const (
	// MaxPtyMessage bounds a message to a session, in bytes.
	MaxPtyMessage = 1 << 20
	// MaxPtyReplay bounds the output in one replay message; a longer replay
	// comes in several, each with its offset.
	MaxPtyReplay = 1 << 20
	// PtyTakenOver is the WebSocket close code a client gets when another one
	// takes its session over.
	PtyTakenOver = 4001
)

// Codes of errors in a session, as execd has them.
const (
	PtyConnected    = "ALREADY_CONNECTED"
	PtyTaken        = "TAKEN_OVER" // the reason beside PtyTakenOver
	PtyNotStarted   = "START_FAILED"
	PtyInputFailed  = "STDIN_WRITE_FAILED"
	PtyInvalidFrame = "INVALID_FRAME"
)

// PtyRequest is the body of POST /pty. Cwd and Command are execd's, the rest is
// ours. With neither Command nor Argv the session is an interactive shell.
type PtyRequest struct {
	Command string            `json:"command,omitempty"` // run as bash -c, or sh -c
	Argv    []string          `json:"argv,omitempty"`    // instead of Command; no shell
	Cwd     string            `json:"cwd,omitempty"`
	Timeout int64             `json:"timeout,omitempty"` // ms from its start; 0: none
	UID     *int64            `json:"uid,omitempty"`
	GID     *int64            `json:"gid,omitempty"` // needs UID
	Envs    map[string]string `json:"envs,omitempty"`
	Cols    int               `json:"cols,omitempty"` // 0: 80
	Rows    int               `json:"rows,omitempty"` // 0: 24
}

// PtyCreated is the reply of POST /pty.
type PtyCreated struct {
	SessionID string `json:"session_id"`
}

// PtyStatus is the reply of GET /pty/{id}. Running and OutputOffset are execd's,
// the rest is ours. Times are RFC 3339.
type PtyStatus struct {
	SessionID    string `json:"session_id"`
	Running      bool   `json:"running"`
	OutputOffset int64  `json:"output_offset"` // bytes written ever: the next one's number

	Command   string `json:"command"`
	Mode      string `json:"mode,omitempty"` // pty or pipe; empty before the first connection
	Connected bool   `json:"connected"`
	CreatedAt string `json:"created_at"`
	ExitCode  *int   `json:"exit_code,omitempty"`
}

// PtyList is the reply of GET /pty, oldest first.
type PtyList struct {
	Sessions []PtyStatus `json:"sessions"`
}

// PtyFrame is a text message of GET /pty/{id}/ws, in either direction; Type says which
// of the other fields count. Signal, TimedOut and Error of exit are ours, and so is
// detach: the agent lets another client connect, and closes.
type PtyFrame struct {
	Type      string `json:"type"` // stdin signal resize ping detach; connected exit error pong
	Data      string `json:"data,omitempty"`
	Signal    string `json:"signal,omitempty"`
	Cols      int    `json:"cols,omitempty"`
	Rows      int    `json:"rows,omitempty"`
	SessionID string `json:"session_id,omitempty"`
	Mode      string `json:"mode,omitempty"`
	ExitCode  *int   `json:"exit_code,omitempty"`
	TimedOut  bool   `json:"timed_out,omitempty"`
	Error     string `json:"error,omitempty"`
	Code      string `json:"code,omitempty"`
}
