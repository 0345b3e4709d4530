package wire

import "time"

// Where a key is kept.
const (
	KeyOfStore         = "store"         // it was made by POST /keys
	KeyOfConfiguration = "configuration" // in the file of listen.api_key_file
)

// Key describes an API key; it does not have the secret. (ours)
type Key struct {
	Name      string     `json:"name"`
	Role      string     `json:"role"`   // viewer, operator, admin; none: its record cannot be read
	Source    string     `json:"source"` // KeyOfStore, KeyOfConfiguration
	CreatedAt *time.Time `json:"createdAt,omitempty"`
	ExpiresAt *time.Time `json:"expiresAt,omitempty"` // absent: never
}

// KeyList answers GET /keys. (ours)
type KeyList struct {
	Items []Key `json:"items"`
}

// KeyRequest is the body of POST /keys. (ours)
type KeyRequest struct {
	Name      string `json:"name"`
	Role      string `json:"role,omitempty"`      // absent: operator
	ExpiresAt string `json:"expiresAt,omitempty"` // RFC 3339; absent: never
}

// NewKey answers POST /keys, the only answer that has the secret. (ours)
type NewKey struct {
	Key
	Secret string `json:"key"`
}
