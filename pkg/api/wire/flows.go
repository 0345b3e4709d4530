package wire

import "time"

// NetworkFlows answers GET /sandboxes/{id}/network/flows: where the connections of a
// sandbox went. (ours)
type NetworkFlows struct {
	Since *time.Time   `json:"since,omitempty"` // when the log began; nil: nothing is known of the sandbox
	Flows []Flow       `json:"flows"`           // the latest first
	Other *Connections `json:"other,omitempty"` // what was pushed out of Flows, which is bounded
}

// Flow counts the connections to one destination. (ours)
type Flow struct {
	Destination string `json:"destination"` // a name where one is known, else an address
	Port        uint16 `json:"port,omitempty"`
	Protocol    string `json:"protocol"` // tcp, udp, icmp or a number
	Connections
}

// Connections counts connections. (ours)
type Connections struct {
	Allowed   int64     `json:"allowed"`
	Denied    int64     `json:"denied"`
	FirstSeen time.Time `json:"firstSeen"`
	LastSeen  time.Time `json:"lastSeen"`
}

// NetworkStats answers GET /sandboxes/{id}/network/stats: what passed the link of a sandbox
// since its log began, and how many connections it tried to open. (ours)
type NetworkStats struct {
	Time      time.Time  `json:"time"`
	Since     *time.Time `json:"since,omitempty"` // as of NetworkFlows
	RxBytes   int64      `json:"rxBytes"`         // received by the sandbox
	TxBytes   int64      `json:"txBytes"`
	RxPackets int64      `json:"rxPackets"`
	TxPackets int64      `json:"txPackets"`
	Allowed   int64      `json:"allowed"`
	Denied    int64      `json:"denied"`
}
