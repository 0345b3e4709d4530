package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	h2 "golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// frames sends requests by HTTP/2 as they are, on one connection: address, name of the
// handshake, text, requests. A request is its fields, "name value", with | between them; behind
// || comes a body, and behind another || trailers. The word is that of the last request.
func frames(args []string) (string, error) {
	c, err := secure(args[0], args[1], "h2")
	if err != nil {
		return "", err
	}
	defer c.Close()
	var out, block bytes.Buffer
	out.WriteString(h2.ClientPreface)
	f, enc := h2.NewFramer(&out, bufio.NewReader(c)), hpack.NewEncoder(&block)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	head := func(stream uint32, text string, last bool) {
		block.Reset()
		for field := range strings.SplitSeq(strings.NewReplacer(`\r\n`, "\r\n").Replace(text), "|") {
			name, value, _ := strings.Cut(field, " ")
			must(enc.WriteField(hpack.HeaderField{Name: name, Value: value}))
		}
		must(f.WriteHeaders(h2.HeadersFrameParam{StreamID: stream, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: last}))
	}
	must(errors.Join(f.WriteSettings(), f.WriteSettingsAck()))
	stream := uint32(1)
	for i, request := range args[3:] {
		stream = uint32(2*i + 1)
		parts := strings.Split(request, "||")
		head(stream, parts[0], len(parts) == 1)
		if len(parts) > 1 {
			must(f.WriteData(stream, len(parts) == 2, []byte(parts[1])))
		}
		if len(parts) > 2 {
			head(stream, parts[2], true)
		}
	}
	if _, err := c.Write(out.Bytes()); err != nil {
		return "", err
	}
	return answerOf(f, stream, args[2])
}

// answerOf is what a stream got. All that comes is searched for a text.
func answerOf(f *h2.Framer, stream uint32, want string) (string, error) {
	status, body := "", ""
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return body, err
		}
		ended := frame.Header().StreamID == stream && frame.Header().Flags.Has(h2.FlagDataEndStream)
		switch frame := frame.(type) {
		case *h2.MetaHeadersFrame:
			for _, field := range frame.Fields {
				body += field.Name + ": " + field.Value + "\n"
			}
			if frame.StreamID == stream && frame.PseudoValue("status") != "" {
				status = frame.PseudoValue("status")
			}
		case *h2.DataFrame:
			body += string(frame.Data())
		case *h2.RSTStreamFrame:
			if frame.StreamID == stream {
				return body, wordError("reset")
			}
		case *h2.GoAwayFrame:
			if frame.ErrCode != h2.ErrCodeNo {
				return body, wordError("GOAWAY")
			}
		}
		switch {
		case strings.Contains(body, want):
			return "", nil
		case ended:
			return strings.Join(strings.Fields(body), " "), wordError(status)
		}
	}
}

// fetch asks for a page as programs do, by its name, and follows where it leads to, with all
// headers that it was given: URL, text, headers as "Name: value". A program that wants to keep
// its own authority trusts any other.
func fetch(args []string) (string, error) {
	c := &http.Client{Timeout: patience, Transport: headers(args[2:])}
	return get(c, args[0], args[1])
}

// headers are set in each request, also in those that follow a redirect.
type headers []string

// RoundTrip sends a request.
func (h headers) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	for _, line := range h {
		name, value, _ := strings.Cut(line, ": ")
		r.Header.Set(name, value)
	}
	any := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // as secure
	return (&http.Transport{TLSClientConfig: any, DisableKeepAlives: true}).RoundTrip(r)
}

// trusts begins TLS with a host, and trusts the authority of a file alone: address, name, file.
func trusts(args []string) (string, error) {
	b, err := os.ReadFile(args[2])
	if err != nil {
		return "", err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return "", wordError("no-certificate")
	}
	c, err := dial(args[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	err = tls.Client(c, &tls.Config{ServerName: args[1], RootCAs: pool}).Handshake()
	if unknown, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return unknown.Error(), wordError("untrusted")
	}
	return "", err
}

// hoard looks for a text, whose two halves it gets, in all that a guest can read of files and
// of processes: environments, arguments, and memory where it may.
func hoard(args []string) (string, error) {
	text := []byte(args[0] + args[1])
	seen := 0
	look := func(path string) bool {
		f, err := os.Open(path)
		if err != nil {
			return false
		}
		defer f.Close()
		b, _ := io.ReadAll(io.LimitReader(f, 16<<20)) //nolint:errcheck // what can be read counts
		seen++
		return bytes.Contains(b, text)
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return "", err
	}
	own := strconv.Itoa(os.Getpid())
	for _, dir := range processes {
		if filepath.Base(dir) == own {
			continue // it has the halves
		}
		for _, name := range []string{"environ", "cmdline", "maps"} {
			if look(filepath.Join(dir, name)) {
				return dir + "/" + name, nil
			}
		}
		if memoryHas(dir, text) {
			return dir + "/mem", nil
		}
	}
	for _, root := range []string{"/etc", "/root", "/home", "/tmp", "/run", "/opt", "/var", "/dev/shm", "/mnt"} {
		found := ""
		filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error { //nolint:errcheck // what can be read counts
			if err == nil && e.Type().IsRegular() && look(path) {
				found = path
				return fs.SkipAll
			}
			return nil
		})
		if found != "" {
			return found, nil
		}
	}
	if seen < 10 {
		return strconv.Itoa(seen), wordError("blind")
	}
	return fmt.Sprintf("%d files", seen), wordError("none")
}

// memoryHas looks through the memory of a process.
func memoryHas(dir string, text []byte) bool {
	maps, err := os.ReadFile(dir + "/maps")
	if err != nil {
		return false
	}
	mem, err := os.Open(dir + "/mem")
	if err != nil {
		return false
	}
	defer mem.Close()
	for line := range strings.Lines(string(maps)) {
		var from, to int64
		if _, err := fmt.Sscanf(line, "%x-%x rw", &from, &to); err != nil || to-from > 64<<20 {
			continue
		}
		b := make([]byte, to-from)
		n, _ := mem.ReadAt(b, from) //nolint:errcheck // parts may not be there
		if bytes.Contains(b[:n], text) {
			return true
		}
	}
	return false
}
