package wire

import (
	"strconv"
	"time"
)

// Denials answers /sandboxes/{id}/network/denials. (ours)
type Denials struct {
	Items []Denial  `json:"items"` // the last different ones, the newest last
	Total int64     `json:"total"` // with repeated ones and those that are not kept
	Since time.Time `json:"since"` // when the daemon began to count: its start
}

// Line says in a line what was denied after so many denials, for people whose command
// failed; "": nothing was.
func (d Denials) Line(before int64) string {
	more := d.Total - before
	if more <= 0 || len(d.Items) == 0 {
		return ""
	}
	n := d.Items[len(d.Items)-1]
	line := "network: denied while this ran: " + n.Target() + " (" + n.Reason + ")"
	if more > 1 {
		line += ", the last of " + strconv.FormatInt(more, 10)
	}
	if n.Allow != "" {
		line += "; a rule that allows " + n.Allow + " opens it"
	}
	return line
}

// Denial is a flow that was refused to a sandbox, or a name that was not resolved for it,
// once or several times. (ours)
type Denial struct {
	Time     time.Time `json:"time"`  // of the last time
	First    time.Time `json:"first"` // of the first
	Times    int64     `json:"times"`
	Protocol string    `json:"protocol"`          // tcp, udp, icmp, a number, or dns for a query
	Name     string    `json:"name,omitempty"`    // that was asked for, if known
	Address  string    `json:"address,omitempty"` // of a flow
	Port     int       `json:"port,omitempty"`    // of a flow, where the protocol has ports
	Rule     string    `json:"rule"`              // that decided, or "default", "private range", "host address", …
	By       string    `json:"by"`                // policy, block, limit, dns or proxy
	Reason   string    `json:"reason"`            // the same in words
	Allow    string    `json:"allow,omitempty"`   // the rule that would open it; absent: none would, or a rule denies it
}

// Target is what was refused, such as "pypi.org:443 (151.101.0.223)" or "203.0.113.7:443".
func (d Denial) Target() string {
	port := ""
	if d.Port != 0 {
		port = ":" + strconv.Itoa(d.Port)
	}
	switch {
	case d.Name == "":
		return d.Address + port
	case d.Address == "":
		return d.Name + port
	}
	return d.Name + port + " (" + d.Address + ")"
}

// Explanation answers /sandboxes/{id}/network/explain: what the policy of a sandbox makes of
// a target. (ours)
type Explanation struct {
	Target  string   `json:"target"`            // as it was understood: pypi.org:443/tcp
	Verdict string   `json:"verdict"`           // allow or deny
	Rule    string   `json:"rule"`              // that decides, or "default", "private range", "host address", …
	By      string   `json:"by"`                // policy, block, or dns: at port 53, where the resolver answers
	Reason  string   `json:"reason"`            // the same in words
	Allow   string   `json:"allow,omitempty"`   // the rule that would open it; absent: it is open, or none would
	Names   []string `json:"names,omitempty"`   // that DNS has answered with the address lately
	Command string   `json:"command,omitempty"` // that adds this rule
	Note    string   `json:"note,omitempty"`    // the sandbox does not run: its stored policy answers
}

// The values of Explanation.Verdict.
const (
	VerdictAllow = "allow"
	VerdictDeny  = "deny"
)

// NetworkTest answers POST /sandboxes/{id}/network/test: what happened when the sandbox tried
// to reach a target. (ours)
type NetworkTest struct {
	Target  string  `json:"target"` // as it was understood: pypi.org:443/tcp
	Reached bool    `json:"reached"`
	Step    string  `json:"step"`              // the last one that was tried: resolve, connect, tls or http
	Address string  `json:"address,omitempty"` // that was tried
	Took    float64 `json:"tookMs"`
	Error   string  `json:"error,omitempty"` // as the sandbox saw it
	// Denied is what the network refused meanwhile; absent: nothing of this target.
	Denied *Denial `json:"denied,omitempty"`
	// Explanation is what the policy says of the target.
	Explanation Explanation `json:"explanation"`
}
