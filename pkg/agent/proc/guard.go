package proc

import "runtime/debug"

// A panic of this process ends its sandbox, and what Go prints about it goes to
// the null device. So every goroutine that net/http did not start, and does not
// recover, runs in Guarded.

// OnPanic is called with a panic before the process dies of it. The server sets it
// before the agent serves. There is one for the process, as there is one reaper.
var OnPanic = func(v any, stack []byte) {}

// Guarded calls f. If f panics, OnPanic is called and the panic goes on: with half its
// state the agent would hang, or give false answers.
func Guarded(f func()) {
	defer func() {
		if v := recover(); v != nil {
			OnPanic(v, debug.Stack())
			panic(v)
		}
	}()
	f()
}
