package trust

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// bundles are where distributions have their roots as PEM. Several of them are often one
// file, by links. The first one found is the base of BundlePath.
var bundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Ubuntu, Alpine, Arch
	"/etc/ssl/cert.pem",                                 // Alpine: OpenSSL and LibreSSL
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora, RHEL
	"/etc/pki/tls/certs/ca-bundle.crt",                  // Fedora, RHEL: a link to it
	"/etc/pki/tls/cert.pem",                             // Fedora, RHEL: OpenSSL; another one
	"/var/lib/ca-certificates/ca-bundle.pem",            // openSUSE
	"/etc/ssl/ca-bundle.pem",                            // openSUSE: a link to it
	"/etc/ssl/certs/ca-bundle.crt",                      // NixOS
	"/usr/lib/ssl/cert.pem",                             // Debian 13: OpenSSL
}

// programRoots are roots that programs bring along. If an image has no bundle, the first of
// them is the base of BundlePath: programs that read a bundle by a variable then trust what
// they have trusted without it. They are not mounted over, for pip could not replace them. A
// * stands for the rest of one name.
var programRoots = []string{
	"/opt/conda/ssl/cacert.pem",
	"/usr/local/lib/python*/site-packages/certifi/cacert.pem",
	"/usr/local/lib/python*/site-packages/pip/_vendor/certifi/cacert.pem",
}

// javaHomes are where JVMs are, beside $JAVA_HOME. A * stands for one name. All names are
// tried, for homes are called java-21-openjdk, jdk-21, temurin-21 or zulu21.
var javaHomes = []string{
	"/usr/lib/jvm/*",    // Debian, Alpine, Fedora, openSUSE
	"/opt/java/openjdk", // images of Eclipse Temurin
	"/usr/java/*",       // images of Oracle
	"/usr/local/*",      // images of OpenJDK: /usr/local/openjdk-21
}

// javaFiles are the stores in the home of a JVM: that of Java 8 is below jre. A JVM that has
// jssecacerts reads no cacerts (JSSE Reference Guide, "Trust Managers").
var javaFiles = []string{
	"lib/security/cacerts", "lib/security/jssecacerts",
	"jre/lib/security/cacerts", "jre/lib/security/jssecacerts",
}

// javaStores are the stores of Java that may be in the guest.
func (p *planner) javaStores(home string) []string {
	all := []string{
		"/etc/ssl/certs/java/cacerts",           // Debian, Alpine: the JVMs link to it
		"/etc/pki/java/cacerts",                 // Fedora, RHEL: a link to …/extracted/java/cacerts
		"/var/lib/ca-certificates/java-cacerts", // openSUSE
	}
	var homes []string
	if path.IsAbs(home) {
		homes = append(homes, home)
	}
	for _, pattern := range javaHomes {
		homes = append(homes, p.glob(pattern)...)
	}
	for _, h := range homes {
		for _, f := range javaFiles {
			all = append(all, path.Join(h, f))
		}
	}
	return all
}

// glob returns the names for which a pattern with one * at most stands, in order. They need
// not exist.
func (p *planner) glob(pattern string) []string {
	head, rest, ok := strings.Cut(pattern, "*")
	if !ok {
		return []string{pattern}
	}
	dir, prefix := path.Split(head)
	names, err := p.names(dir, prefix)
	if err != nil {
		if !isAbsent(err) {
			p.leave(path.Clean(dir), err)
		}
		return nil
	}
	for i, name := range names {
		names[i] = dir + name + rest
	}
	return names
}

// A variable tells programs which certificates they trust.
type variable struct {
	name string
	kind kind
	// second is the variable that programs read if this one is not set. If the guest has set
	// that, this one would hide it, and is not set.
	second string
}

// A kind says what a variable does to what programs trust already.
type kind int

const (
	replaces kind = iota // programs trust the file, and only that
	own                  // so they do, and without the variable they trust roots that they bring along
	adds                 // programs trust the file as well
	never                // not set for a guest: its programs read another one as well, or a bundle of the system
)

// known are record.TrustVariables. npm is a program of Node. OpenSSL's variable is also read by what
// links or imitates it: curl(1), Go, Ruby, PHP, .NET, cargo, uv, httpx.
//
// The variables of git and AWS beat configuration files, and would hide a store that the
// guest has named there (http.sslCAInfo, ca_bundle). They are not needed. The libcurl that git
// uses has the path of a bundle from its build. The AWS command line and boto3 read
// REQUESTS_CA_BUNDLE if neither their variable nor their file names a store (botocore,
// Endpoint._get_verify_value). AWS SDKs of other languages use the roots of the language.
var known = []variable{
	{name: "SSL_CERT_FILE"},
	{name: "REQUESTS_CA_BUNDLE", kind: own, second: "CURL_CA_BUNDLE"}, // Python's requests, pip, boto3
	{name: "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", kind: own},             // gRPC, except in Go and Java
	{name: "NODE_EXTRA_CA_CERTS", kind: adds},
	{name: "DENO_CERT", kind: adds},
	{name: "AWS_CA_BUNDLE", kind: never},
	{name: "GIT_SSL_CAINFO", kind: never},
	{name: "CURL_CA_BUNDLE", kind: never},
	{name: "PIP_CERT", kind: never},
	{name: "CARGO_HTTP_CAINFO", kind: never},
	{name: "npm_config_cafile", kind: never},
	{name: "NPM_CONFIG_CAFILE", kind: never},
}

// variables sets what the guest has not set, and extends the stores that it has named. bare:
// BundlePath has the authority alone, so no program must trade its roots for that. What Left
// says goes to the log, so it has no value of a variable that names no file.
func (p *planner) variables(env map[string]string, bare bool) {
	for _, v := range known {
		file, ok := env[v.name]
		_, hides := env[v.second]
		switch {
		case !ok && v.kind == never:
		case !ok && hides:
			p.leave(v.name, fmt.Errorf("it would hide %s, which the guest has set", v.second))
		case !ok && v.kind == adds:
			p.plan.Env[v.name] = CertPath
		case !ok && v.kind == own && bare:
			p.leave(v.name, errors.New("the guest has no bundle, and what reads this variable would lose the roots that it has"))
		case !ok:
			p.plan.Env[v.name] = BundlePath
		case file == CertPath, file == BundlePath:
		case !path.IsAbs(file):
			p.leave(v.name, errors.New("the guest has set it, and not to an absolute path"))
		case !p.exists(file):
			p.leave(v.name, errors.New("the guest has set it to a file that is not in the root: it is absent or on a volume"))
		default:
			p.extend(file, p.withPEM)
		}
	}
}

// covered are trees that mounts of ours hide, beside record.Private: what is there on disk no
// guest sees.
const covered = "/run"

// checkTarget refuses a path on which no store is mounted.
func checkTarget(target string) error {
	if record.IsPrivate(target) || record.Within(target, covered) {
		return fmt.Errorf("%.200q is hidden by a mount of the runtime", target)
	}
	// The specification of a sandbox is JSON, in which a name that is not UTF-8 is another
	// name; no distribution uses more than this.
	if strings.ContainsFunc(target, func(c rune) bool { return c <= ' ' || c > '~' || c == '"' || c == '\\' }) {
		return fmt.Errorf("%.200q is a strange path", target)
	}
	return nil
}
