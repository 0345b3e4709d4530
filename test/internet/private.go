package internet

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// The hosts that want a secret. All of them are at Shared.
const (
	ModelHost   = "model.example"   // chat completions with a Bearer token, messages with x-api-key
	PrivateHost = "private.example" // below /simple/ an index of Python, with Basic
	PushHost    = "push.example"    // the repository of GitHost, which can be pushed to, with Basic
	PublishHost = "publish.example" // a registry of node to publish to, with a Bearer token

	// Secret is what they want. Of Basic it is the password of User.
	Secret = "s3cr3t-of-the-test-0123456789"
	User   = "agent"
)

// Basic is what stands behind "Basic " in the header of a request that they answer.
var Basic = base64.StdEncoding.EncodeToString([]byte(User + ":" + Secret))

// private serves the hosts that want a secret, with what they share with the public ones.
func private(index pages, repository http.Handler) map[string]http.Handler {
	return map[string]http.Handler{
		ModelHost:   http.HandlerFunc(model),
		PrivateHost: wants("Authorization", "Basic "+Basic, index),
		PushHost:    wants("Authorization", "Basic "+Basic, repository),
		PublishHost: wants("Authorization", "Bearer "+Secret, http.HandlerFunc(publish)),
	}
}

// wants answers 401 unless a header has a value.
func wants(header, value string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get(header) != value {
			rw.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(rw, "who are you?", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(rw, r)
	})
}

// model answers as the programs of models want it: piece by piece, with the question.
func model(rw http.ResponseWriter, r *http.Request) {
	var asked struct {
		Messages []struct{ Content string }
	}
	header, value := "Authorization", "Bearer "+Secret
	if r.URL.Path == "/v1/messages" {
		header, value = "X-Api-Key", Secret
	}
	wants(header, value, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || len(asked.Messages) == 0 || r.Method != http.MethodPost {
			http.Error(rw, "no question", http.StatusBadRequest)
			return
		}
		rw.Header().Set("Content-Type", "text/event-stream")
		for _, word := range strings.Fields(asked.Messages[0].Content) {
			b, _ := json.Marshal(map[string]any{"delta": word}) //nolint:errchkjson // of strings
			fmt.Fprintf(rw, "data: %s\n\n", b)                  //nolint:errcheck // the client sees what is missing
			http.NewResponseController(rw).Flush()              //nolint:errcheck // the same
		}
		io.WriteString(rw, "data: [DONE]\n\n") //nolint:errcheck // the same
	})).ServeHTTP(rw, r)
}

// publish takes a package, and knows none.
func publish(rw http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPut {
		http.Error(rw, "{}", http.StatusNotFound)
		return
	}
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	rw.WriteHeader(http.StatusCreated)
	io.WriteString(rw, "{}") //nolint:errcheck // the client sees what is missing
}
