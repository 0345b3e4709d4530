// Package upgradetest answers a change of the version as a daemon does.
package upgradetest

import (
	"encoding/json"
	"net"
	"net/http"
	"os"

	"github.com/sandboxd/sandboxd/pkg/client"
)

// Daemon answers on a Unix socket as a daemon without sandboxes and images, whose version running returns,
// until the process ends. It returns a client of it. Errors are those of the socket.
func Daemon(socket string, running func() string) (*client.Client, error) {
	os.Remove(socket) //nolint:errcheck // Listen tells
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	for path, answer := range map[string]func() any{
		"version":     func() any { return map[string]string{"version": running()} },
		"health":      func() any { return map[string]string{"status": "healthy"} },
		"sandboxes":   func() any { return map[string][]string{"items": {}} },
		"system/info": func() any { return map[string]string{} },
		"pools":       func() any { return map[string][]string{"items": {}} },
		"images":      func() any { return map[string][]string{"items": {}} },
	} {
		mux.HandleFunc("/v1/"+path, func(w http.ResponseWriter, _ *http.Request) {
			json.NewEncoder(w).Encode(answer()) //nolint:errcheck // the client notices
		})
	}
	mux.HandleFunc("/v1/system/backup", func(http.ResponseWriter, *http.Request) {})
	go http.Serve(l, mux) //nolint:errcheck // it ends with the process
	return client.New("unix://"+socket, "")
}
