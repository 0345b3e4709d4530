// Package api embeds the OpenAPI document of what sandboxd serves beyond
// OpenSandbox's lifecycle API. openapi.yaml is the source; openapi.json is made
// from it by `go test ./api -update` and a test holds the two together.
package api

import _ "embed"

// JSON is the document as served at /openapi.json.
//
//go:embed openapi.json
var JSON []byte

// YAML is the document as written.
//
//go:embed openapi.yaml
var YAML []byte
