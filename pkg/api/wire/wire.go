// Package wire holds the JSON of the lifecycle API: what the server writes and
// the client reads, defined once. It does no I/O.
//
// The shapes without a remark are OpenSandbox's (specs/sandbox-lifecycle.yml);
// what OpenSandbox does not have is marked "ours" and described in
// api/openapi.yaml. Absent means omitted: nothing is ever null, because
// generated Python clients crash on null.
package wire

import (
	"encoding/json"
	"time"
)

// The ports of a sandbox that the daemon knows by number.
const (
	AgentPort  = 44772 // execd's API, served by sandbox-agent
	EgressPort = 18080 // the egress API, served by the daemon
)

// The headers that carry a secret or a name.
const (
	HeaderAPIKey        = "OPEN-SANDBOX-API-KEY"
	HeaderTrial         = "Sandboxd-Trial" // who tries a new version, while changes by others wait (ours)
	HeaderAPIKeyOther   = "X-API-Key"      // what Go's E2E tests send through the proxy
	HeaderAgentToken    = "X-EXECD-ACCESS-TOKEN"
	HeaderEgressToken   = "OPENSANDBOX-EGRESS-AUTH"
	HeaderEndpointToken = "X-Sandboxd-Endpoint-Token" // ours: for every other port
	HeaderRequestID     = "X-Request-ID"
	HeaderIdempotency   = "Idempotency-Key"           // of POST /sandboxes
	HeaderReplayed      = "Idempotency-Replayed"      // "true": an earlier request made it (ours)
	HeaderSandbox       = "Sandboxd-Id"               // of POST /sandboxes: the id, also of one that failed (ours)
	HeaderSecureAccess  = "OpenSandbox-Secure-Access" // OpenSandbox's: the token of a sandbox made with secureAccess
	HeaderIngressTo     = "OpenSandbox-Ingress-To"    // of the gateway: {id}-{port}
	HeaderAccessRenew   = "OpenSandbox-Access-Renew"  // "skip": this access does not renew
)

// The states a client sees.
const (
	Pending    = "Pending"
	Running    = "Running"
	Pausing    = "Pausing"
	Paused     = "Paused"
	Resuming   = "Resuming"
	Stopping   = "Stopping"
	Terminated = "Terminated" // ended well
	Failed     = "Failed"     // ended otherwise; Status says why
)

// The keys of CreateRequest.Extensions that are ours. OpenSandbox's SDKs pass the map
// through, so unmodified SDKs can use all of them.
const (
	ExtName    = "sandboxd.name"    // unique; accepted wherever an id is
	ExtRuntime = "sandboxd.runtime" // "runsc" or "runc"
	ExtNetwork = "sandboxd.network" // "none", "rules" or "open"
	ExtAllow   = "sandboxd.allow"   // comma-separated TARGET[:port[-port]][/proto]
	ExtRules   = "sandboxd.rules"   // comma-separated allow=TARGET… or deny=TARGET…, before those of ExtAllow
	ExtPolicy  = "sandboxd.policy"  // NAME of a policy to follow, or NAME@VERSION; instead of rules
	ExtTimeout = "sandboxd.timeout" // a Go duration ≥ 1s, instead of Timeout
	ExtOneShot = "sandboxd.oneshot" // "true": the disk need not survive a crash of the host
	ExtIdle    = "sandboxd.idle"    // "true": no entrypoint, the agent idles
	ExtMemory  = "sandboxd.memory"  // "true": begin with the memory of the snapshot, too; its programs run on
	// ExtSecurity is "strict", "default" or "compat". The host's configuration says which
	// of them a request may ask for.
	ExtSecurity = "sandboxd.security"
	// ExtLiteral "true": an entrypoint of one element names a program, whatever white
	// space it has. It is never split into words.
	ExtLiteral = "sandboxd.literal"
	// ExtHostname is what the sandbox is called inside; default: its name, or its id.
	ExtHostname = "sandboxd.hostname"
	// ExtStopSignal is what stop sends to the entrypoint: a name, as SIGQUIT, QUIT or RTMIN+3,
	// or a number; default: that of the image, or SIGTERM.
	ExtStopSignal = "sandboxd.stop-signal"
	// ExtImageCommand "true": the sandbox runs the image's ENTRYPOINT, with Entrypoint as
	// its arguments or else with the image's CMD.
	ExtImageCommand = "sandboxd.image-command"
	// ExtReadOnly "true": the root file system is read-only, but for ExtTmpfs.
	ExtReadOnly = "sandboxd.readonly"
	// ExtTmpfs is PATH[:size=64m,mode=1777,exec] as docker's, several by ";".
	ExtTmpfs = "sandboxd.tmpfs"
	// ExtPublish is [HOSTIP:]HOSTPORT:PORT[/tcp] as docker's, several by ",".
	ExtPublish = "sandboxd.publish"
	// ExtPrestart is languages, comma-separated, whose standing contexts start with
	// the sandbox.
	ExtPrestart = "sandboxd.prestart"
	// ExtRestart is docker's: no, on-failure[:max], always or unless-stopped.
	ExtRestart = "sandboxd.restart"
	// A sandbox is ready when the command exits with 0 and the port accepts a
	// connection. If only one of the two is given, only that one counts. See
	// record.Probe.
	ExtReadyCmd         = "sandboxd.ready.cmd"
	ExtReadyPort        = "sandboxd.ready.port"
	ExtReadyInterval    = "sandboxd.ready.interval"
	ExtReadyTimeout     = "sandboxd.ready.timeout"
	ExtReadyRetries     = "sandboxd.ready.retries"
	ExtReadyStartPeriod = "sandboxd.ready.start-period"
	// What happens to a sandbox that nobody has used for so long (a Go duration ≥ 1s): "pause"
	// (default), "hibernate", "stop" or "kill". ExtIdle is something else. See record.Idle.
	ExtIdleAfter  = "sandboxd.idle.after"
	ExtIdleAction = "sandboxd.idle.action"

	ExtRenew = "access.renew.extend.seconds"
	// ExtPool names the pool that a sandbox is of; see Pool.
	ExtPool = "poolRef"
	// ExtPoolWarm, ExtPoolReady and ExtPoolMaxAge stand in the template of a pool only: a line for
	// the shell that is run once in each member, one that is then tried until it succeeds, and how
	// old a member may be, as 1h.
	ExtPoolWarm   = "sandboxd.pool.warm"
	ExtPoolReady  = "sandboxd.pool.ready"
	ExtPoolMaxAge = "sandboxd.pool.max-age"
)

// CreateRequest is the body of POST /sandboxes.
type CreateRequest struct {
	Image           *Image             `json:"image,omitempty"`
	SnapshotID      string             `json:"snapshotId,omitempty"`
	Platform        *Platform          `json:"platform,omitempty"`
	Timeout         *int64             `json:"timeout,omitempty"` // seconds ≥ 60; nil: never
	ResourceLimits  map[string]string  `json:"resourceLimits,omitempty"`
	Env             map[string]*string `json:"env,omitempty"` // null values are skipped
	Metadata        map[string]string  `json:"metadata,omitempty"`
	Entrypoint      []string           `json:"entrypoint,omitempty"`
	NetworkPolicy   json.RawMessage    `json:"networkPolicy,omitempty"` // a NetworkPolicy; raw, so that no field of it is overlooked
	CredentialProxy *CredentialProxy   `json:"credentialProxy,omitempty"`
	SecureAccess    bool               `json:"secureAccess,omitempty"`
	Volumes         []VolumeMount      `json:"volumes,omitempty"`
	Extensions      map[string]string  `json:"extensions,omitempty"`

	// These fields are refused, while other unknown fields are ignored: sandboxd would
	// not do what they ask for.
	TemplateID string          `json:"templateId,omitempty"`
	Lifecycle  json.RawMessage `json:"lifecycle,omitempty"`
}

// Image names a root file system: name[:tag][@digest]. A sandbox shows what its client
// wrote; Info.ImageName is the image that it stood for.
type Image struct {
	URI  string     `json:"uri"`
	Auth *ImageAuth `json:"auth,omitempty"` // of a request only
}

// ImageAuth is for the registry that has an image, if it is not on this host.
// It is used for that one pull, and never kept or shown.
type ImageAuth struct {
	Username string `json:"username"`
	Password string `json:"password"`
}

// String hides it, whatever prints it.
func (ImageAuth) String() string { return "(hidden)" }

// GoString hides it too.
func (ImageAuth) GoString() string { return "(hidden)" }

// Platform is the wanted system and architecture.
type Platform struct {
	OS   string `json:"os"`
	Arch string `json:"arch"`
}

// CredentialProxy asks for a sandbox that may have a credential vault and rules about requests.
type CredentialProxy struct {
	Enabled bool `json:"enabled"`
}

// NetworkPolicy decides by the first rule whose target matches, else by
// DefaultAction; empty is "deny".
type NetworkPolicy struct {
	DefaultAction string        `json:"defaultAction,omitempty"`
	Egress        []NetworkRule `json:"egress"`
}

// NetworkRule allows or denies a target. Ports, Protocol and HTTP are ours.
type NetworkRule struct {
	Action   string `json:"action"`
	Target   string `json:"target"`
	Ports    []any  `json:"ports,omitempty"`    // 443 or "8000-8100"; absent: all
	Protocol string `json:"protocol,omitempty"` // tcp, udp or icmp; absent: all
	// HTTP narrows a rule by name to some requests; nil: all that the target is sent.
	HTTP *HTTPRequests `json:"http,omitempty"`
}

// HTTPRequests are requests with one of the methods and a path that one of the patterns
// matches. An absent list means all; one of them is given. (ours)
type HTTPRequests struct {
	Methods []string `json:"methods,omitempty"` // in capitals: GET
	Paths   []string `json:"paths,omitempty"`   // /v1/*; a * stands for any text, slashes included
}

// PolicyStatus answers /policy on port 18080 and /sandboxes/{id}/networkpolicy.
type PolicyStatus struct {
	Status          string         `json:"status"`
	Mode            string         `json:"mode"` // allow_all, deny_all, enforcing
	EnforcementMode string         `json:"enforcementMode"`
	Reason          string         `json:"reason,omitempty"`
	Policy          *NetworkPolicy `json:"policy,omitempty"` // absent: the answer to a change
}

// Sandbox is a sandbox as clients see it. The answer to create has neither
// Image nor SnapshotID.
type Sandbox struct {
	ID         string            `json:"id"`
	Image      *Image            `json:"image,omitempty"`
	SnapshotID string            `json:"snapshotId,omitempty"` // instead of Image
	Platform   map[string]string `json:"platform,omitempty"`
	Status     Status            `json:"status"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Extensions map[string]string `json:"extensions,omitempty"`
	Entrypoint []string          `json:"entrypoint"`
	ExpiresAt  *time.Time        `json:"expiresAt,omitempty"`
	CreatedAt  time.Time         `json:"createdAt"`
	Sandboxd   *Info             `json:"sandboxd,omitempty"` // ours
}

// Status is the state of a sandbox and why.
type Status struct {
	State            string     `json:"state"`
	Reason           string     `json:"reason,omitempty"`
	Message          string     `json:"message,omitempty"`
	LastTransitionAt *time.Time `json:"lastTransitionAt,omitempty"`
}

// Info is what sandboxd knows of a sandbox beyond OpenSandbox. (ours)
type Info struct {
	Name        string          `json:"name,omitempty"`
	Runtime     string          `json:"runtime"`
	Security    string          `json:"security,omitempty"`  // strict, default or compat; absent: an older daemon
	ImageName   string          `json:"imageName,omitempty"` // also of one made from a snapshot
	ImageDigest string          `json:"imageDigest,omitempty"`
	MemoryBytes int64           `json:"memoryBytes"`
	CPUMillis   int64           `json:"cpuMillis"`
	Pids        int64           `json:"pids"`
	DiskBytes   int64           `json:"diskBytes,omitempty"` // absent: the pool cannot limit
	CPUShares   int64           `json:"cpuShares,omitempty"` // absent: the default, 1024
	IOReadBps   int64           `json:"ioReadBps,omitempty"` // absent, as the next three: no limit
	IOWriteBps  int64           `json:"ioWriteBps,omitempty"`
	IOReadIOPS  int64           `json:"ioReadIops,omitempty"`
	IOWriteIOPS int64           `json:"ioWriteIops,omitempty"`
	ShmBytes    int64           `json:"shmBytes,omitempty"` // absent: 64 MiB
	LogBytes    int64           `json:"logBytes,omitempty"` // absent: 16 MiB
	ReadOnly    bool            `json:"readOnly,omitempty"`
	Tmpfs       []Tmpfs         `json:"tmpfs,omitempty"`
	Ports       []PublishedPort `json:"ports,omitempty"`
	Network     string          `json:"network"`
	Policy      *SandboxPolicy  `json:"policy,omitempty"` // absent: no policy was named
	OneShot     bool            `json:"oneShot,omitempty"`
	Fork        *ForkOf         `json:"fork,omitempty"` // absent: it is no copy
	// CredentialProxy: it may have a credential vault and rules about requests.
	CredentialProxy bool `json:"credentialProxy,omitempty"`
	// HibernatedBytes is the size of its memory on disk; 0: it does not hibernate.
	HibernatedBytes int64 `json:"hibernatedBytes,omitempty"`
	ExitCode        *int  `json:"exitCode,omitempty"`
	// Restarts by the restart policy since somebody created or started the sandbox, and
	// when the next one is; NextStart is absent if none is due.
	Restarts    int        `json:"restarts,omitempty"`
	LastRestart *time.Time `json:"lastRestart,omitempty"`
	NextStart   *time.Time `json:"nextStart,omitempty"`
	Health      *Health    `json:"health,omitempty"` // of a live sandbox that has a probe
	Idle        *Idle      `json:"idle,omitempty"`   // absent: it has no idle policy
	// Notes are for people: the image is another version than its name says, the sandbox took no
	// member of its pool, a limit is more than the host has.
	Notes []string `json:"notes,omitempty"`
	// What the image runs by itself; absent: nothing, or the image is not here yet.
	ImageEntrypoint []string `json:"imageEntrypoint,omitempty"`
	ImageCmd        []string `json:"imageCmd,omitempty"`
	StopSignal      string   `json:"stopSignal,omitempty"` // to the entrypoint; absent: SIGTERM
}

// PublishedPort is a port of a sandbox that is served at an address of the host. (ours)
type PublishedPort struct {
	HostIP   string `json:"hostIp"`
	HostPort uint16 `json:"hostPort"`
	Port     uint16 `json:"port"`
	Protocol string `json:"protocol"` // tcp
}

// Tmpfs is a file system in the memory of a sandbox. (ours)
type Tmpfs struct {
	Path  string `json:"path"`
	Bytes int64  `json:"bytes"`
	Mode  string `json:"mode"` // octal digits
	Exec  bool   `json:"exec,omitempty"`
}

// Inspection answers GET /sandboxes/{id}/inspect: everything but secrets. (ours)
type Inspection struct {
	Sandbox
	Env        []string      `json:"env,omitempty"`   // names only
	Rules      []string      `json:"rules,omitempty"` // in order
	Layers     []string      `json:"layers,omitempty"`
	Slot       int           `json:"slot"`
	State      string        `json:"internalState"`
	LastOutput string        `json:"lastOutput,omitempty"`
	Pool       *PoolUse      `json:"pool,omitempty"`
	Volumes    []VolumeMount `json:"volumes,omitempty"`
	Notes      []string      `json:"notes,omitempty"` // where a limit holds less than its name says
	// SecurityDifferences says how its level of security differs from the default.
	SecurityDifferences []string          `json:"securityDifferences,omitempty"`
	Host                map[string]string `json:"host,omitempty"` // address, link, cgroup, …
}

// List is one page of sandboxes, newest first.
type List struct {
	Items      []Sandbox  `json:"items"`
	Pagination Pagination `json:"pagination"`
}

// Pagination says where in the whole a page lies; all five keys are always there.
type Pagination struct {
	Page        int  `json:"page"`
	PageSize    int  `json:"pageSize"`
	TotalItems  int  `json:"totalItems"`
	TotalPages  int  `json:"totalPages"`
	HasNextPage bool `json:"hasNextPage"`
}

// Renewal is request and answer of POST /sandboxes/{id}/renew-expiration.
type Renewal struct {
	ExpiresAt time.Time `json:"expiresAt"`
}

// Endpoint says where a port of a sandbox is reached and which headers that needs.
type Endpoint struct {
	Endpoint string            `json:"endpoint"` // host[:port]/path, without a scheme
	Headers  map[string]string `json:"headers,omitempty"`
}

// Error is the body of every answer that is not 2xx.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// LimitsPatch is the body of PATCH /sandboxes/{id}/limits: what is to change, as
// in CreateRequest. The answer is an Inspection. (ours)
type LimitsPatch struct {
	ResourceLimits map[string]string `json:"resourceLimits"`
}

// Diagnostic answers GET /sandboxes/{id}/diagnostics/{logs,events}?scope=….
type Diagnostic struct {
	SandboxID     string   `json:"sandboxId"`
	Kind          string   `json:"kind"` // "logs" or "events"
	Scope         string   `json:"scope"`
	Delivery      string   `json:"delivery"` // here always "inline"
	ContentType   string   `json:"contentType"`
	Content       string   `json:"content"`
	ContentLength int      `json:"contentLength"` // bytes
	Truncated     bool     `json:"truncated"`
	Warnings      []string `json:"warnings,omitempty"`
}

// Event is something that happened to a sandbox. (ours)
type Event struct {
	Time    time.Time `json:"time"`
	Type    string    `json:"type"` // the state entered: "running", "ended", …, or "renewed", "pulling", …
	ID      string    `json:"id"`
	Name    string    `json:"name,omitempty"`
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	Cursor  string    `json:"-"` // the id of the server-sent event
}

// ImageInfo is an image on the host. (ours)
type ImageInfo struct {
	Name    string    `json:"name"`
	Tag     string    `json:"tag"`
	Digest  string    `json:"digest"`
	Bytes   int64     `json:"bytes"`
	Created time.Time `json:"created"`
	Aliases []string  `json:"aliases,omitempty"` // names that stand for it on this host, as ubuntu:*
	// Notes say what it asks for and does not get here, for people.
	Notes []string `json:"notes,omitempty"`
}

// ImageList answers GET /images. (ours)
type ImageList struct {
	Items []ImageInfo `json:"items"`
}

// BuildRequest is the body of POST /images/build. (ours)
type BuildRequest struct {
	Name string `json:"name"` // of a recipe in rootfs/
}

// RenameRequest is the body of POST /sandboxes/{id}/rename. (ours)
type RenameRequest struct {
	Name string `json:"name"`
}

// CommitRequest is the body of POST /sandboxes/{id}/commit and POST /snapshots/{id}/commit.
// (ours)
type CommitRequest struct {
	Name string `json:"name"` // NAME[:TAG]
}

// TagRequest is the body of POST /images/{ref}/tag. (ours)
type TagRequest struct {
	Name string `json:"name"` // NAME[:TAG]
}

// BuildLine is one line of the answer to a build; the last has Image or Error. (ours)
type BuildLine struct {
	Line  string     `json:"line,omitempty"`
	Image *ImageInfo `json:"image,omitempty"`
	Error *Error     `json:"error,omitempty"`
}

// ImageInspection answers GET /images/{ref}. (ours)
type ImageInspection struct {
	ImageInfo
	Layers  []string          `json:"layers"`            // digests, lowest first
	Sources []string          `json:"sources,omitempty"` // its digests in the registry that it was pulled from
	Env     []string          `json:"env,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
	User    string            `json:"user,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	// What it runs by itself.
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	StopSignal string   `json:"stopSignal,omitempty"` // as the image says it
	Platform   string   `json:"platform,omitempty"`   // as linux/arm64; absent: that of the host
	// Unused are the fields of its config that sandboxd does not use, by docker's names.
	Unused map[string]json.RawMessage `json:"unused,omitempty"`
}

// PullRequest is the body of POST /images/pull, which is answered by
// ImportLines. (ours)
type PullRequest struct {
	Name string     `json:"name"` // name[:tag][@digest]
	Auth *ImageAuth `json:"auth,omitempty"`
}

// ImportLine is one line of the answer to an import or a pull; the last has
// Image or Error, the others have Progress. (ours)
type ImportLine struct {
	Progress *ImportProgress `json:"progress,omitempty"`
	Image    *ImageInfo      `json:"image,omitempty"`
	Error    *Error          `json:"error,omitempty"`
}

// ImportProgress is how far an import or a pull is. (ours)
type ImportProgress struct {
	Stage  string `json:"stage"`            // "receive" the archive, "resolve" the name, "download" layers or "unpack" one
	Layer  int    `json:"layer,omitempty"`  // from 1
	Layers int    `json:"layers,omitempty"` // of the image
	Bytes  int64  `json:"bytes"`
	Total  int64  `json:"total,omitempty"` // absent: unknown
}

// PruneReport answers POST /images/prune and DELETE /images/{ref}. (ours)
type PruneReport struct {
	Images         []string `json:"images"` // name:tag
	Layers         []string `json:"layers"` // digests
	BytesReclaimed int64    `json:"bytesReclaimed"`
}

// Usage is what a sandbox uses now and has used. (ours)
type Usage struct {
	Time             time.Time `json:"time"`
	MemoryBytes      int64     `json:"memoryBytes"`
	MemoryPeakBytes  int64     `json:"memoryPeakBytes"`
	MemoryLimitBytes int64     `json:"memoryLimitBytes"`
	CPUMicros        int64     `json:"cpuMicros"` // since the sandbox started
	CPULimitMillis   int64     `json:"cpuLimitMillis"`
	// the guest's own, threads included; null: only its agent can count them (gVisor),
	// and it does not answer now
	Pids           *int64 `json:"pids"`
	PidsLimit      int64  `json:"pidsLimit"`
	OOMKills       int64  `json:"oomKills"`
	DiskBytes      int64  `json:"diskBytes"`
	DiskLimitBytes int64  `json:"diskLimitBytes"`
	RxBytes        int64  `json:"rxBytes"` // received by the sandbox
	TxBytes        int64  `json:"txBytes"`
}

// StatsList answers GET /stats: all sandboxes that run or are paused. (ours)
type StatsList struct {
	Items []SandboxStats `json:"items"`
}

// SandboxStats is what one sandbox uses, and what a list of them shows. (ours)
type SandboxStats struct {
	ID        string    `json:"id"`
	Name      string    `json:"name,omitempty"`
	Runtime   string    `json:"runtime"`
	State     string    `json:"state"`
	CreatedAt time.Time `json:"createdAt"`
	Usage     Usage     `json:"usage"`
}

// Version answers GET /version; without a key Version alone. (ours)
type Version struct {
	Version  string   `json:"version"`
	Commit   string   `json:"commit,omitempty"`
	Go       string   `json:"go,omitempty"`
	Instance string   `json:"instance,omitempty"`
	Runtimes []string `json:"runtimes,omitempty"`
}
