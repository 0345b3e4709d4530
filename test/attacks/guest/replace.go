package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// agent is the only program that replace replaces: by a mistake it must not be init.
const agent = "/opt/opensandbox/sandbox-agent"

// replace has the agent execute this program with other arguments. It overwrites
// all of its code with instructions that do nothing, and an execve(2) at their
// end: whatever thread runs next arrives there.
func replace(args []string) (string, error) {
	dir := "/proc/" + args[0]
	if exe, err := os.Readlink(dir + "/exe"); err != nil || exe != agent {
		return exe, errors.Join(wordError("no-agent"), err)
	}
	maps, err := os.ReadFile(dir + "/maps")
	if err != nil {
		return "", err
	}
	var start, end uint64
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, " r-xp ") { // the first is the program's own
			if _, err := fmt.Sscanf(line, "%x-%x", &start, &end); err != nil {
				return line, err
			}
			break
		}
	}
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return "", err
	}
	mem, err := os.OpenFile(dir+"/mem", os.O_WRONLY, 0)
	if err != nil {
		return "", err
	}
	defer mem.Close()
	const page = 4096
	if err := writeAt(mem, execPage(end-page, append([]string{self}, args[1:]...)), end-page); err != nil {
		return "", err
	}
	// Backwards, so that who arrives early finds the way open.
	for at := end - 2*page; at >= start; at -= page {
		if err := writeAt(mem, bytes.Repeat(nop, page/len(nop)), at); err != nil {
			return fmt.Sprintf("at %x of %x-%x", at, start, end), err
		}
	}
	pid, err := strconv.Atoi(args[0])
	if err != nil {
		return args[0], err
	}
	return fmt.Sprintf("%d KiB", (end-start)>>10), unix.Kill(pid, unix.SIGURG) // its threads may all sleep; Go handles it
}

func writeAt(f *os.File, b []byte, at uint64) error {
	_, err := f.WriteAt(b, int64(at))
	return err
}

// execPage is the code of an execve, its strings and its argv, for an address.
func execPage(at uint64, argv []string) []byte {
	const data = 512 // where the strings begin
	var texts []byte
	var pointers []byte
	for _, a := range argv {
		pointers = binary.LittleEndian.AppendUint64(pointers, at+data+uint64(len(texts)))
		texts = append(append(texts, a...), 0)
	}
	for len(texts)%8 != 0 {
		texts = append(texts, 0)
	}
	pointers = binary.LittleEndian.AppendUint64(pointers, 0)
	page := append(execCode(at+data, at+data+uint64(len(texts))), make([]byte, data)...)[:data]
	return append(append(page, texts...), pointers...)
}

// hostile are the answers of an impostor.
var hostile = []string{
	"endless-head", "endless-line", "endless-interim", "two-lengths", "garbage", "endless-body", "deep", "short", "frames", "upgrade",
}

// impostor answers in the place of the agent: each request in another way. To one for
// /impostor it says "impostor", and to pings what an agent of its protocol says, so that it
// is believed.
func impostor(args []string) (string, error) {
	l, err := net.Listen("tcp4", "0.0.0.0:"+args[0])
	for ; err != nil; l, err = net.Listen("tcp4", "0.0.0.0:"+args[0]) { // connections of the one before linger
		time.Sleep(10 * time.Millisecond)
	}
	var requests atomic.Int64
	for {
		c, err := l.Accept()
		if err != nil {
			return "", err
		}
		go func() {
			defer c.Close()
			c.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // of a socket
			r, err := http.ReadRequest(bufio.NewReader(c))
			switch {
			case err != nil:
			case r.URL.Path == "/impostor":
				fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 8\r\nConnection: close\r\n\r\nimpostor")
			default:
				lie(c, hostile[int(requests.Add(1))%len(hostile)], "")
			}
		}()
	}
}
