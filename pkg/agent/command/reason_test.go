package command

import "testing"

// EAGAIN of a process that could not be started is told from that of a socket or a lock.
func TestSaysNoFork(t *testing.T) {
	for words, want := range map[string]bool{
		"bash: fork: retry: Resource temporarily unavailable\nbash: fork: Resource temporarily unavailable\n": true,
		"sh: 1: Cannot fork\n":                   true,
		"perl: Can't fork: limit\n":              true,
		"RuntimeError: can't start new thread\n": true,
		"runtime: failed to create new OS thread (have 66 already; errno=11)\n": true,
		"fork/exec /bin/true: resource temporarily unavailable\n":               true,
		"Error: spawn /bin/ls EAGAIN\n":                                         true,
		"  File \"x.py\", line 3, in <module>\n    os.fork()\n" +
			"BlockingIOError: [Errno 11] Resource temporarily unavailable\n": true,
		"    self.pid = _fork_exec(\n               ^^^^^^^^^^\n" +
			"BlockingIOError: [Errno 11] Resource temporarily unavailable: 'true'\n": true,
		"terminate called after throwing an instance of 'std::system_error'\n" +
			"  what():  Resource temporarily unavailable\n": true,
		"    s.recv(1)\nBlockingIOError: [Errno 11] Resource temporarily unavailable\n": false,
		"    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n    ^^^^^^^^^^^\n" +
			"BlockingIOError: [Errno 11] Resource temporarily unavailable\n": false,
		"flock: failed to get lock: Resource temporarily unavailable\n":        false,
		"forked a child\n1\n2\n3\n4\nrecv: Resource temporarily unavailable\n": false,
	} {
		if got := saysNoFork([]byte(words)); got != want {
			t.Errorf("%q: %v, want %v", words, got, want)
		}
	}
}
