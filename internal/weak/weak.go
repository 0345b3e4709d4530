// Package weak takes down single walls of the product, so that a test can show that an
// attack succeeds without them (test/attacks). A test that cannot fail proves nothing.
//
// Only programs that are built with the tag weak (make weak) can do that. They read the
// names of walls from the environment of the daemon, SANDBOXD_WEAK=seccomp,userns. In all
// other programs Off is the constant false: the compiler leaves out what stands behind it,
// and the name of the variable (TestNoHook in test/attacks looks for it).
//
// The surprise: the daemon starts the launcher and the confined children with an
// environment of their own, and hands the walls on with Environ.
package weak

// A Wall is one line of defence, as docs/design/hardening.md has it.
type Wall string

// The walls that can be taken down.
const (
	Seccomp       Wall = "seccomp"      // runc: the filter of the spec, and that of the agent
	Caps          Wall = "caps"         // the short list of capabilities: all are given
	UserNS        Wall = "userns"       // runc: guest root is root of the host
	NoNewPrivs    Wall = "no-new-privs" // runc
	NoSuid        Wall = "nosuid"       // runc: of the root file system
	MaskedPaths   Wall = "masked-paths" // runc
	ReadOnlyPaths Wall = "readonly"     // runc: of /proc, /sys and the agent's directory
	Devices       Wall = "devices"      // runc: the cgroup's list of devices
	BootID        Wall = "boot-id"      // runc: a boot ID for each start
	Descriptors   Wall = "descriptors"  // runc: PID 1 gets a descriptor of the host's root
	SentryFlags   Wall = "sentry-flags" // runsc: --net-raw, --iouring
	UserLimits    Wall = "user-limits"  // runc: limits of the user namespace
	Privileges    Wall = "privileges"   // the daemon keeps capabilities that it does not need, so guests may have them
	NoFile        Wall = "nofile"       // RLIMIT_NOFILE
	Pids          Wall = "pids"         // the cgroup's limit, and on runsc RLIMIT_NPROC
	Memory        Wall = "memory"       // the cgroup's limit
	KernelMemory  Wall = "kmem"         // runc: messages that nobody reads, and locks on files
	Disk          Wall = "disk"         // the quota of a sandbox's disk
	Tmpfs         Wall = "tmpfs"        // sizes and inodes of file systems in memory, terminals
	Policy        Wall = "policy"       // the network policy and the hard blocks in Go
	Chains        Wall = "chains"       // the kernel's chains and the lock refuse nothing
	Raw           Wall = "raw"          // the first table: foreign sources, broadcasts and multicast pass
	Resolver      Wall = "resolver"     // it answers every sandbox, however much it asks
	Proxy         Wall = "proxy"        // it lets every name pass, to every address
	Judge         Wall = "judge"        // decrypted requests pass, whatever host, method and path they say
	Vault         Wall = "vault"        // a credential goes wherever its placeholder stands, and with each request to a bound host
	Servers       Wall = "servers"      // certificates of inspected servers are not verified
	Echoes        Wall = "echoes"       // values of credentials in answers are neither seen nor masked
	Sealing       Wall = "sealing"      // secrets are in the state file as they are
	Keys          Wall = "keys"         // the API takes everybody for an admin
	Roles         Wall = "roles"        // every role may do everything
	Tokens        Wall = "tokens"       // ports of sandboxes ask for nothing
	Cookies       Wall = "cookies"      // a cookie opens a port whose host other guests' pages have, too
	Framing       Wall = "framing"      // requests with two ends are served
	Headers       Wall = "headers"      // keys and tokens are passed on to guests
	Answers       Wall = "answers"      // answers of guests are passed on as they are
	Registries    Wall = "registries"   // they may send the daemon to addresses inside
	HostPaths     Wall = "host-paths"   // every directory of the host may be a volume
	HostLinks     Wall = "host-links"   // links below an allowed directory are followed
	Connections   Wall = "connections"  // one address may hold any number
	SlowClients   Wall = "slow-clients" // a head may take an hour
	Bodies        Wall = "bodies"       // JSON of any size and depth
	Log           Wall = "log"          // a guest's denials have any number of lines, and all are kept
)
