// Command guest is what the bench runs in a sandbox: with an address an HTTP server that
// costs as little as possible,
//
//	GET /            answers two bytes
//	GET /out?n=      answers n bytes
//	POST /in         reads the body and drops it
//
// With the words time CALL it prints how many nanoseconds a system call takes, and with
// append FILE it appends to a file for a second, durably, and prints how often.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == "time" {
		fmt.Println(timed(os.Args[2]))
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "append" {
		fmt.Println(appended(os.Args[2]))
		return
	}
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: guest ADDRESS:PORT | time CALL | append FILE")
		os.Exit(2)
	}
	http.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "ok") //nolint:errcheck // the client is gone
	})
	piece := make([]byte, 256<<10)
	http.HandleFunc("GET /out", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.URL.Query().Get("n"), 10, 64)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		for n > 0 {
			m, err := w.Write(piece[:min(n, int64(len(piece)))])
			if err != nil {
				return
			}
			n -= int64(m)
		}
	})
	http.HandleFunc("POST /in", func(_ http.ResponseWriter, r *http.Request) {
		io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r.Body}, make([]byte, 256<<10)) //nolint:errcheck // as above
	})
	if err := http.ListenAndServe(os.Args[1], nil); err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
		os.Exit(1)
	}
}
