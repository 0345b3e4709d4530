package agent

// SessionRequest is the body of POST /session, which may be absent.
type SessionRequest struct {
	Cwd string `json:"cwd,omitempty"` // made if it is missing; ~ and $VAR are expanded
}

// SessionCreated is the reply of POST /session.
type SessionCreated struct {
	SessionID string `json:"session_id"`
}

// SessionRun is the body of POST /session/{id}/run.
type SessionRun struct {
	Command string `json:"command"`
	Cwd     string `json:"cwd,omitempty"`     // of this run only; must be there
	Timeout int64  `json:"timeout,omitempty"` // ms; 0: none
}

// Isolation is the reply of GET /v1/isolated/capabilities: whether there are
// sessions isolated within the sandbox.
type Isolation struct {
	Available bool   `json:"available"`
	Message   string `json:"message,omitempty"` // why not
	Setpriv   bool   `json:"setpriv_available"`
	Userns    bool   `json:"userns_available"`
	Commit    bool   `json:"commit_supported"`
	Diff      bool   `json:"diff_supported"`
}
