package command

import "testing"

// EAGAIN of a process that could not be started is told from that of a socket or a lock.
func TestSaysNoFork(t *testing.T) {
	says := []string{
		"bash: fork: retry: Resource temporarily unavailable\nbash: fork: Resource temporarily unavailable\n",
		"sh: 1: Cannot fork\n",
		"perl: Can't fork: limit\n",
		"RuntimeError: can't start new thread\n",
		"runtime: failed to create new OS thread (have 66 already; errno=11)\n",
		"fork/exec /bin/true: resource temporarily unavailable\n",
		"Error: spawn /bin/ls EAGAIN\n",
		"  File \"x.py\", line 3, in <module>\n    os.fork()\nBlockingIOError: [Errno 11] Resource temporarily unavailable\n",
		"    self.pid = _fork_exec(\n               ^^^^^^^^^^\n" +
			"BlockingIOError: [Errno 11] Resource temporarily unavailable: 'true'\n",
		"terminate called after throwing an instance of 'std::system_error'\n  what():  Resource temporarily unavailable\n",
	}
	others := []string{
		"    s.recv(1)\nBlockingIOError: [Errno 11] Resource temporarily unavailable\n",
		"    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n    ^^^^^^^^^^^\n" +
			"BlockingIOError: [Errno 11] Resource temporarily unavailable\n",
		"flock: failed to get lock: Resource temporarily unavailable\n",
		"forked a child\n1\n2\n3\n4\nrecv: Resource temporarily unavailable\n",
	}
	for i, words := range append(says, others...) {
		if got, want := saysNoFork([]byte(words)), i < len(says); got != want {
			t.Errorf("%q: %v, want %v", words, got, want)
		}
	}
}
