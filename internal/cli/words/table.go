package words

// A word is a command of docker.
type word struct {
	docker string // as it is typed
	here   string // the command that does it; the rest of the line stays
	say    string // or what to use
}

const (
	noDockerfile = "sandboxd builds images from its recipes (sandboxctl image build python), and reads no Dockerfile. Build it " +
		"elsewhere and bring it here: docker save NAME | sandboxctl load"
	noNetworks = "each sandbox has a network of its own, in which nobody else is: --network none, rules or open, with --allow and " +
		"--deny; see sandboxctl egress"
	oneHost = "sandboxd is for one host"
	noLogin = "the daemon knows registries and their passwords ([[registries]] in its configuration). For one pull: sandboxctl pull " +
		"-u USER --password-stdin IMAGE"
	noHistory = "sandboxctl image inspect IMAGE shows its layers and its configuration"
	noPush    = "sandboxd sends to no registry. Write an archive, and send that by docker, podman or skopeo: sandboxctl save IMAGE -o F.tar"
	elsewhere = "name the daemon by -H or $SANDBOXD_HOST"
)

var commands = []word{
	{docker: "container ls", here: "ps"},
	{docker: "container list", here: "ps"},
	{docker: "info", here: "system info"},
	{docker: "import", here: "image import"},
	{docker: "load", here: "image load"},
	{docker: "pull", here: "image pull"},
	{docker: "save", here: "image save"},
	{docker: "system events", here: "events"},

	{docker: "build", say: noDockerfile},
	{docker: "builder", say: noDockerfile},
	{docker: "buildx", say: noDockerfile},
	{docker: "checkpoint", say: "sandboxctl snapshot create --memory SANDBOX keeps the memory of a sandbox; sandboxctl hibernate frees it"},
	{docker: "compose", say: "sandboxd reads no compose files: make each sandbox by sandboxctl create. No sandbox reaches another one"},
	{docker: "config", say: oneHost + "; give a file to a sandbox by sandboxctl cp, or a secret by sandboxctl secret"},
	{docker: "container prune", say: "sandboxctl system prune removes the sandboxes that have ended, failed snapshots and unused layers"},
	{docker: "context", say: elsewhere},
	{docker: "export", say: "sandboxctl cp NAME:/ - >F.tar writes the files of a sandbox; sandboxctl commit makes an image of them"},
	{docker: "history", say: noHistory},
	{docker: "image history", say: noHistory},
	{docker: "image push", say: noPush},
	{docker: "login", say: noLogin},
	{docker: "logout", say: noLogin},
	{docker: "manifest", say: "sandboxctl image inspect IMAGE shows what is here of an image: its layers for this kind of host"},
	{docker: "network connect", say: noNetworks},
	{docker: "network create", say: noNetworks},
	{docker: "network disconnect", say: noNetworks},
	{docker: "network inspect", say: noNetworks},
	{docker: "network ls", say: noNetworks},
	{docker: "network prune", say: noNetworks},
	{docker: "network rm", say: noNetworks},
	{docker: "node", say: oneHost + "; sandboxctl system info shows it"},
	{docker: "plugin", say: "sandboxd has no plugins"},
	{docker: "push", say: noPush},
	{docker: "search", say: "sandboxd searches no registry; sandboxctl images lists the images that are here"},
	{docker: "secret create", say: "sandboxctl secret set gives a secret to one sandbox, which never sees its value"},
	{docker: "service", say: oneHost + ": sandboxctl create --restart always keeps a program running"},
	{docker: "stack", say: oneHost + ", and reads no compose files: make each sandbox by sandboxctl create"},
	{docker: "swarm", say: oneHost},
	{docker: "trust", say: "sandboxd checks no signatures of images: pull by digest, NAME@sha256:…, to get what you have checked"},
}

// A flag is one of docker that a command has not.
type flag struct {
	of    string // commands, separated by ", "; empty: all
	names string // without dashes, separated by ", "
	say   string // what to use
}

const (
	ofSandbox   = "run, create"
	ownSpaces   = "a sandbox always has namespaces and a cgroup of its own"
	byLevel     = "capabilities and the rest of the confinement are set by --security strict, default or compat"
	noDevices   = "no device of the host comes into a sandbox"
	ownResolver = "names and addresses are the daemon's to resolve and to permit; see sandboxctl egress"
	noMessage   = "an image has no author and no message here; give it a name that says it"
)

var flags = []flag{
	{ofSandbox, "add-host, dns, dns-option, dns-search, network-alias, link", ownResolver},
	{ofSandbox, "annotation, label-file", "give labels by -l KEY=VALUE"},
	{
		ofSandbox, "attach, a, sig-proxy",
		"run without -d has all streams and passes signals on; sandboxctl logs -f follows the output of run -d",
	},
	{
		ofSandbox, "blkio-weight, device-read-bps, device-read-iops, device-write-bps, device-write-iops",
		"limit reads and writes by --io-read-bps, --io-read-iops, --io-write-bps and --io-write-iops",
	},
	{ofSandbox, "cap-add, cap-drop, security-opt", byLevel},
	{ofSandbox, "cgroup-parent, cgroupns, ipc, pid, userns, uts", ownSpaces},
	{ofSandbox, "cidfile", "run -d and create print the id: id=$(sandboxctl run -d …)"},
	{ofSandbox, "cpu-period, cpu-quota, cpu-rt-period, cpu-rt-runtime, cpuset-cpus, cpuset-mems", "limit CPU time by --cpus"},
	{ofSandbox, "device, device-cgroup-rule, gpus", noDevices},
	{ofSandbox, "disable-content-trust", "sandboxd checks no signatures of images"},
	{ofSandbox, "domainname", "put the domain into --hostname"},
	{
		ofSandbox, "expose, P, publish-all",
		"publish each port by -p HOSTPORT:PORT; sandboxctl endpoint reaches a port that is not published",
	},
	{ofSandbox, "group-add", "sandboxctl exec -u USER:GROUP sets the group of a command"},
	{ofSandbox, "health-start-interval, no-healthcheck", "the HEALTHCHECK of an image is not run; give --ready-cmd or --ready-port"},
	{ofSandbox, "ip, ip6, mac-address, link-local-ip", "the daemon gives each sandbox its address; sandboxctl inspect shows it"},
	{ofSandbox, "log-driver", "sandboxd keeps the output; --log-max-size says how much"},
	{
		ofSandbox, "kernel-memory, memory-reservation, memory-swap, memory-swappiness, oom-kill-disable, oom-score-adj",
		"limit memory by --memory; a sandbox has no swap",
	},
	{"run, create, exec", "privileged", "no sandbox is privileged. " + byLevel},
	{ofSandbox, "stop-timeout", "give the time to stop: sandboxctl stop -t SECONDS NAME"},
	{ofSandbox, "storage-opt", "limit the disk by --disk"},
	{ofSandbox, "sysctl, ulimit", "the limits of a sandbox are --memory, --cpus, --pids and --disk"},
	{ofSandbox, "volume-driver, volumes-from", "give each volume by -v NAME:/PATH"},

	{"commit", "author, a, message, m", noMessage},
	{"commit", "change, c", "set it for a sandbox: sandboxctl create --entrypoint, -e, or run -w"},
	{"image build", "file, f, tag, t, build-arg, target, no-cache, progress", noDockerfile},
	{"image pull", "all-tags, a", "pull each tag by itself"},
	{"images, image ls", "filter, f", "pick from sandboxctl images -o json"},
	{"inspect", "size, s", "sandboxctl stats --no-stream NAME shows what a sandbox has written"},
	{"ps", "size, s", "sandboxctl stats --no-stream shows what sandboxes have written"},
	{"start", "attach, a, interactive, i", "sandboxctl logs -f NAME follows its output; sandboxctl shell NAME opens a shell"},
	{"system df", "verbose, v", "sandboxctl ps, images, volume ls and snapshot ls list what it adds up"},
	{"volume create", "name", "the name stands alone: sandboxctl volume create NAME"},

	{"", "context, config", elsewhere},
	{"", "debug, D, log-level", "the daemon's log is journalctl -u sandboxd"},
	{"", "tls, tlscacert, tlscert, tlskey, tlsverify", "the scheme of -H says it: https://HOST:PORT; for a private CA set $SSL_CERT_FILE"},
}

// A flag that is taken asks for what is so in any case.
type takenFlag struct {
	of          string // commands, separated by ", "
	name, short string
	value       func(string) error // refuses what is not so; nil: the flag has no value
	why         string
}

var taken = []takenFlag{
	{of: ofSandbox, name: "init", why: "PID 1 of a sandbox always reaps processes and passes signals on"},
	{of: ofSandbox, name: "platform", value: platform, why: "the kind of the host"},
	{of: "inspect", name: "type", value: kind, why: "container: a sandbox"},
	{of: "rm", name: "volumes", short: "v", why: "no volume belongs to one sandbox only"},
	{of: "images, image ls", name: "all", short: "a", why: "all images are listed"},
	{of: "images, image ls", name: "digests", why: "digests are listed"},
	{of: "commit", name: "pause", short: "p", why: "a sandbox that runs stands still for a moment"},
}
