package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// MaxProbeOutput is how much of the end of what a probe prints is kept, in bytes.
const MaxProbeOutput = 1 << 10

// maxProbeRead bounds the output that is read from one probe, so that a guest cannot
// keep the daemon busy with it.
const maxProbeRead = 1 << 20

// Listening is nil if something accepts connections at a port of the sandbox's
// own loopback.
func (c *Client) Listening(ctx context.Context, port uint16) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandbox/listening/"+strconv.Itoa(int(port)), nil)
	if err != nil {
		return err
	}
	resp, err := c.RoundTripper().RoundTrip(r)
	if err != nil {
		return fmt.Errorf("ask the agent: %w", err)
	}
	defer resp.Body.Close()
	io.CopyN(io.Discard, resp.Body, 4<<10) //nolint:errcheck // so that the connection can be kept
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("nothing accepts connections at port %d", port)
	}
	return nil
}

// Tasks counts the processes of the sandbox and their threads, without the agent.
func (c *Client) Tasks(ctx context.Context) (int64, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandbox/tasks", nil)
	if err != nil {
		return 0, err
	}
	resp, err := c.RoundTripper().RoundTrip(r)
	if err != nil {
		return 0, fmt.Errorf("ask the agent: %w", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if err != nil {
		return 0, fmt.Errorf("ask the agent: %w", err)
	}
	var n Tasks
	if resp.StatusCode != http.StatusOK || json.Unmarshal(b, &n) != nil || n.Tasks < 0 {
		return 0, fmt.Errorf("count the tasks of the sandbox: the agent answered status %d", resp.StatusCode)
	}
	return n.Tasks, nil
}

// Probe runs command by the shell of the sandbox, for at most limit, and then
// forgets it. It returns the end of what it printed, and an error unless it
// exited with 0.
func (c *Client) Probe(ctx context.Context, command string, limit time.Duration) (output string, err error) {
	body, err := json.Marshal(CommandRequest{Command: command, Timeout: limit.Milliseconds(), Forget: true})
	if err != nil {
		return "", err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandbox/command", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", FramesType)
	resp, err := c.RoundTripper().RoundTrip(r)
	if err != nil {
		return "", fmt.Errorf("ask the agent: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("run the command: the agent answered status %d", resp.StatusCode)
	}
	all := &io.LimitedReader{R: resp.Body, N: maxProbeRead}
	output, exit, err := outcome(NewFrameReader(bufio.NewReader(all)))
	switch {
	case all.N <= 0:
		return output, fmt.Errorf("the command prints more than %d KiB", maxProbeRead>>10)
	case err != nil:
		return output, err
	case exit.TimedOut:
		return output, fmt.Errorf("the command took longer than %v", limit)
	case exit.Error != "":
		return output, errors.New(exit.Error)
	case exit.ExitCode != 0:
		return output, fmt.Errorf("the command exited with code %d", exit.ExitCode)
	}
	return output, nil
}

// outcome reads the output of a command to its end and keeps the last of it.
func outcome(frames *FrameReader) (string, FrameExit, error) {
	var last []byte
	for {
		stream, payload, err := frames.Next()
		if err != nil {
			return text(last), FrameExit{}, fmt.Errorf("the agent closed the connection before the command ended: %w", err)
		}
		switch stream {
		case FrameStdout, FrameStderr:
			last = append(last, payload[max(0, len(payload)-MaxProbeOutput):]...)
			last = last[max(0, len(last)-MaxProbeOutput):]
		case FrameEnd:
			exit, err := ParseExit(payload)
			return text(last), exit, err
		}
	}
}

// text makes valid UTF-8 of bytes that may begin in the middle of a character.
func text(b []byte) string {
	for len(b) > 0 && !utf8.RuneStart(b[0]) {
		b = b[1:]
	}
	return strings.ToValidUTF8(string(b), "\uFFFD")
}
