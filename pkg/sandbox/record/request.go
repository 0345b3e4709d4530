package record

import "time"

// A Request is by what a sandbox was asked for, if its client gave it a key: who
// asks again by that gets the same sandbox. Both are digests, since a body may
// hold secrets.
type Request struct {
	Key  string `json:"key"`
	Body string `json:"body"`
}

// Made is what a request has made. It outlives the sandbox: a request that comes
// late must not make another.
type Made struct {
	ID   string    `json:"id"`
	Body string    `json:"body"`
	At   time.Time `json:"at"`
}

// CodeRequestRace marks the error of the slower of two requests with one key.
const CodeRequestRace = "SANDBOX::IDEMPOTENCY_KEY_RACE"

// RequestsKept is how long it is known what a request has made: longer than
// clients go on asking.
const RequestsKept = 24 * time.Hour
