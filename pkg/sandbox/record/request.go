package record

import "time"

// A Request identifies the request for a sandbox, if its client sent an idempotency
// key: a second request with that key gets the same sandbox. Both are digests, since a
// body may hold secrets.
type Request struct {
	Key  string `json:"key"`
	Body string `json:"body"`
	// Holder is the API key that came with it (Key.Holder); empty: none.
	Holder string `json:"holder,omitempty"`
}

// Made is what a request has made. It outlives the sandbox: a late repetition must not
// make another one. It is forgotten with the API key that came with the request.
type Made struct {
	ID   string    `json:"id"`
	Body string    `json:"body"`
	At   time.Time `json:"at"`

	Holder string `json:"holder,omitempty"` // as in Request
}

// CodeRequestRace marks the error of the slower of two requests with one key.
const CodeRequestRace = "SANDBOX::IDEMPOTENCY_KEY_RACE"

// RequestsKept is how long a Made is kept: longer than clients repeat a request.
const RequestsKept = 24 * time.Hour
