//go:build all

package authority

import (
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestNode: Node adds the authority to its own roots by a variable.
func TestNode(t *testing.T) {
	const client = `
const [host, port, servername] = process.argv.slice(1);
const socket = require('tls').connect({ host, port, servername }, () => process.exit(socket.authorized ? 0 : 1));
socket.on('error', e => { console.error(e.message); process.exit(1); });
`
	judged(t, judge{
		"node", func(_, _, host, port, name string) []string { return []string{"node", "-e", client, host, port, name} },
		func(ca string) []string { return []string{"NODE_EXTRA_CA_CERTS=" + ca} },
		"unable to verify", "does not match",
	})
}

// TestJava: the JVM takes the authority as an anchor, and the leaf for an HTTPS server.
func TestJava(t *testing.T) {
	client := hosttest.JavaClient(t)
	judged(t, judge{
		"java", func(ca, _, host, port, name string) []string {
			return slices.Concat(client, []string{host, port, name, ca})
		}, nil, "PKIX path", "No subject alternative DNS name matching",
	})
}
