// Package api embeds the OpenAPI document of all that sandboxd serves, and a page that
// shows it. Both are made by `go test ./api -update`, and tests hold them to be what
// their sources say:
//
//	openapi.yaml    routes of sandboxd's own
//	opensandbox/    OpenSandbox's documents, as they came
//	additions.yaml  what is served beyond either, and examples
//	pkg/api         the table of routes: who may ask for what
//	docs.tmpl       the page
package api

import _ "embed"

// JSON is the document as served at /openapi.json.
//
//go:embed openapi.json
var JSON []byte

// Docs is the page at /docs. It needs nothing but itself.
//
//go:embed docs.html
var Docs []byte

// YAML is openapi.yaml.
//
//go:embed openapi.yaml
var YAML []byte
