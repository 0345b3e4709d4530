package record

import "strings"

// IsVariable reports whether name can be the name of an environment variable: it is not
// empty and has no "=", NUL or newline. The kernel takes a newline, but files of
// variables and the output of env(1) have one variable a line.
func IsVariable(name string) bool { return name != "" && !strings.ContainsAny(name, "=\x00\n") }

// The variables that OpenSandbox keeps for its own programs. No guest gets one.
const (
	LifecycleVariable = "OPENSANDBOX_LIFECYCLE" // hooks, for its agent
	EgressVariables   = "OPENSANDBOX_EGRESS_"   // the prefix of settings for its egress sidecar
)

// IsReserved reports whether a variable is one of those that OpenSandbox keeps for its
// own programs.
func IsReserved(name string) bool {
	return name == LifecycleVariable || strings.HasPrefix(name, EgressVariables)
}

// TrustVariables are those by which programs find the certificates that they trust. pkg/oci/trust says
// what each does.
var TrustVariables = []string{
	"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "NODE_EXTRA_CA_CERTS", "DENO_CERT", "AWS_CA_BUNDLE",
	"GIT_SSL_CAINFO", "CURL_CA_BUNDLE", "PIP_CERT", "CARGO_HTTP_CAINFO", "npm_config_cafile", "NPM_CONFIG_CAFILE",
}
