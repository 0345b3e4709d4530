package record

import "time"

// RestartPolicy says after which ends a sandbox is started again.
type RestartPolicy string

// The restart policies. A sandbox that was stopped on purpose stays stopped under each
// of them, so docker's unless-stopped is RestartAlways here.
const (
	RestartNo        RestartPolicy = ""
	RestartOnFailure RestartPolicy = "on-failure" // any end that is not OK
	RestartAlways    RestartPolicy = "always"     // any end
)

// Restart is the policy of a sandbox, and how often it may be applied.
type Restart struct {
	Policy RestartPolicy `json:"policy,omitempty"`
	Max    int           `json:"max,omitempty"` // restarts since a client started it; 0: any number
}

// Probe is how the daemon finds out whether a sandbox is ready for work. With a port
// and a command, both must succeed. The zero Probe is none.
type Probe struct {
	Command  string        `json:"command,omitempty"` // for the shell; ready if it exits with 0
	Port     uint16        `json:"port,omitempty"`    // ready if it accepts a connection
	Interval time.Duration `json:"interval,omitempty"`
	Timeout  time.Duration `json:"timeout,omitempty"` // of one try
	// StartPeriod is how long a sandbox may take to become ready: a failed try counts
	// only after the first success, or once this time has passed.
	StartPeriod time.Duration `json:"startPeriod,omitempty"`
	Retries     int           `json:"retries,omitempty"` // failures in a row that make it unhealthy
}

// Given reports whether there is anything to try.
func (p Probe) Given() bool { return p.Command != "" || p.Port != 0 }

// The waits before restarts are like docker's: they double, up to a bound, and begin
// anew for a sandbox that has lived for a while. A sandbox that cannot be started waits
// for the longest.
const (
	restartFirst = time.Second
	RestartLast  = time.Minute      // no restart waits for longer
	restartReset = 10 * time.Second // of life
)

// Restarting reports whether its policy will start an ended sandbox again.
func (r *Record) Restarting() bool {
	p := r.Spec.Restart
	switch {
	case r.State != Ended, r.Diskless(), r.Reason == Stopped, r.Reason == Expired:
		return false
	case p.Max > 0 && r.Restarts >= p.Max:
		return false
	case p.Policy == RestartAlways:
		return true
	}
	return p.Policy == RestartOnFailure && !r.OK()
}

// NextStart is when its policy will start an ended sandbox again; zero: never.
func (r *Record) NextStart() time.Time {
	if !r.Restarting() {
		return time.Time{}
	}
	wait := min(restartFirst<<min(r.quick(), 10), RestartLast)
	if r.Reason == StartFailed { // the start may have hung until its limit, and held one of the places for restarts
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

// Again notes that an ended sandbox is started by its policy or, if asked, by a client,
// which clears the counts.
func (r *Record) Again(asked bool) {
	if asked {
		r.Restarts, r.QuickRestarts = 0, 0
	} else {
		r.Restarts, r.QuickRestarts = r.Restarts+1, r.quick()+1
	}
	r.Started = time.Time{}
}
