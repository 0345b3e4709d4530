// Package proc starts, finds and measures the processes of a sandbox, and resolves its
// users.
//
//	Start ─▶ Process ─ Signal, KillTree        one reaper waits for all children
//	List, StatOf, Marked                       who runs, and whose it is
//	CPUTime, Private, Tasks                    what they use
//	Accounts ─▶ Identity ─ Credential, Enter   users of the guest
//	OpenTTY, Resize, Foreground                terminals
//	Turns, ReserveThreads, Guarded             the agent itself as a process
//
// The surprise: a process that calls Reap or Start must neither start nor wait for
// children in any other way (no os/exec). The reaper takes all of them, as PID 1 has
// to.
package proc
