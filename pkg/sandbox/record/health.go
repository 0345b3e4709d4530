package record

import "time"

// RestartPolicy says which ends of a sandbox are not the last.
type RestartPolicy string

// The restart policies. Whatever was stopped on purpose stays stopped under
// each of them, so docker's unless-stopped is RestartAlways here.
const (
	RestartNo        RestartPolicy = ""
	RestartOnFailure RestartPolicy = "on-failure" // any end that is not OK
	RestartAlways    RestartPolicy = "always"     // any end
)

// Restart is the policy of a sandbox, and how often it may be applied.
type Restart struct {
	Policy RestartPolicy `json:"policy,omitempty"`
	Max    int           `json:"max,omitempty"` // restarts since somebody started it; 0: any number
}

// Probe is how it is found out whether a sandbox is ready for work. With a
// port and a command, both must succeed. The zero Probe is none.
type Probe struct {
	Command  string        `json:"command,omitempty"` // for the shell; ready if it exits with 0
	Port     uint16        `json:"port,omitempty"`    // ready if it accepts a connection
	Interval time.Duration `json:"interval,omitempty"`
	Timeout  time.Duration `json:"timeout,omitempty"` // of one try
	// StartPeriod is how long it may take to become ready: no try that fails
	// counts until it has succeeded once or this has passed.
	StartPeriod time.Duration `json:"startPeriod,omitempty"`
	Retries     int           `json:"retries,omitempty"` // failures in a row that make it unhealthy
}

// Given reports whether there is anything to try.
func (p Probe) Given() bool { return p.Command != "" || p.Port != 0 }

// The waits before restarts are docker's shape: they double, up to a bound, and
// begin anew for a sandbox that has lived for a while. One that cannot be started
// waits for the longest.
const (
	restartFirst = time.Second
	RestartLast  = time.Minute      // no restart waits for longer
	restartReset = 10 * time.Second // of life
)

// Restarting reports whether the policy of an ended sandbox has it started again.
func (r *Record) Restarting() bool {
	p := r.Spec.Restart
	switch {
	case r.State != Ended, r.NeverRan(), r.Reason == Stopped, r.Reason == Expired:
		return false
	case p.Max > 0 && r.Restarts >= p.Max:
		return false
	case p.Policy == RestartAlways:
		return true
	}
	return p.Policy == RestartOnFailure && !r.OK()
}

// NextStart is when the policy has an ended sandbox started again; zero: never.
func (r *Record) NextStart() time.Time {
	if !r.Restarting() {
		return time.Time{}
	}
	wait := min(restartFirst<<min(r.quick(), 10), RestartLast)
	if r.Reason == StartFailed { // it may have hung for as long as it could, and held a place of those that restart
		wait = RestartLast
	}
	return r.Changed.Add(wait)
}

// quick is how many restarts in a row did not last.
func (r *Record) quick() int {
	if !r.Started.IsZero() && r.Changed.Sub(r.Started) >= restartReset {
		return 0
	}
	return r.QuickRestarts
}

// Again notes in an ended sandbox that it is started by its policy, or, if
// asked, by somebody: then all is forgotten.
func (r *Record) Again(asked bool) {
	if asked {
		r.Restarts, r.QuickRestarts = 0, 0
	} else {
		r.Restarts, r.QuickRestarts = r.Restarts+1, r.quick()+1
	}
	r.Started = time.Time{}
}
