// Package api embeds the OpenAPI document of what sandboxd serves beyond
// OpenSandbox's lifecycle API. openapi.yaml is the source; openapi.json, and with
// OpenSandbox's own documents (opensandbox/) the page docs.html, are made from it
// by `go test ./api -update`, and tests hold them together.
package api

import _ "embed"

// JSON is the document as served at /openapi.json.
//
//go:embed openapi.json
var JSON []byte

// Docs is a page that shows all of the documents. It needs nothing but itself.
//
//go:embed docs.html
var Docs []byte

// YAML is the document as written.
//
//go:embed openapi.yaml
var YAML []byte
