package api_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/api"
	server "github.com/sandboxd/sandboxd/pkg/api"
)

// The document that is served is made when its sources change, not by the daemon:
//
//	openapi.yaml, opensandbox/*.yaml ─ merge ─▶ one tree
//	additions.yaml ─ over it
//	the table of routes (pkg/api) ─ roles ─▶ openapi.json ─▶ docs.html

var update = flag.Bool("update", false, "write openapi.json and docs.html")

// A tree is a document, or a part of one, as JSON has it.
type tree = map[string]any

// sources are the documents that are merged. Components of the first keep their names.
var sources = []struct {
	file, prefix string // of its components, where another document has the same name
	below        string // the path in the API at which its paths are
	security     []any  // of its routes; nil: that of openapi.yaml
}{
	{"openapi.yaml", "", "", nil},
	{"opensandbox/lifecycle.yaml", "Lifecycle", "", nil},
	{"opensandbox/execd.yaml", "Execd", agentPort, tokenOr("agentToken")},
	{"opensandbox/egress.yaml", "Egress", egressPort, tokenOr("egressToken")},
}

const (
	agentPort  = "/sandboxes/{sandboxId}/proxy/44772"
	egressPort = "/sandboxes/{sandboxId}/proxy/18080"
)

// ours are the components of openapi.yaml that stand for those of the same name in
// OpenSandbox's documents: sandboxd serves them in this form.
var ours = []string{
	"parameters/SandboxId", "parameters/SnapshotId", "responses/Error", "schemas/NetworkPolicy", "schemas/NetworkRule",
}

func tokenOr(scheme string) (all []any) {
	for _, name := range []string{scheme, "key", "otherKey", "bearer"} {
		all = append(all, tree{name: []any{}})
	}
	return all
}

func readTree(t *testing.T, file string) (out tree) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(b, &out)
	}
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return out
}

// child is the tree below keys; it is made if it is not there.
func child(of tree, keys ...string) tree {
	for _, k := range keys {
		next, ok := of[k].(tree)
		if !ok {
			next = tree{}
			of[k] = next
		}
		of = next
	}
	return of
}

// served makes the document, with the samples of its routes.
func served(t *testing.T) tree {
	t.Helper()
	doc := tree{}
	for _, s := range sources {
		part := readTree(t, s.file)
		refs := adopt(child(doc, "components"), child(part, "components"), s.prefix)
		rename(part, refs)
		for path, item := range child(part, "paths") {
			for method, op := range item.(tree) {
				if method == "parameters" {
					continue
				}
				if s.security != nil {
					op.(tree)["security"] = s.security
				}
				child(doc, "paths", s.below+path)[method] = op
			}
			at := child(doc, "paths", s.below+path)
			at["parameters"] = append(list(at["parameters"]), list(item.(tree)["parameters"])...)
			if s.below != "" {
				at["parameters"] = append(list(at["parameters"]), tree{"$ref": "#/components/parameters/SandboxId"})
			}
		}
		if s.prefix == "" {
			doc["info"], doc["servers"], doc["security"] = part["info"], part["servers"], part["security"]
		}
	}
	over(doc, readTree(t, "additions.yaml"))
	doc["openapi"] = "3.1.0"
	delete(child(doc, "components", "securitySchemes"), "apiKeyAuth")
	delete(child(doc, "components", "securitySchemes"), "AccessToken")
	finish(t, doc)
	prune(doc)
	return doc
}

// adopt copies components and returns the references that are named otherwise now.
func adopt(to, from tree, prefix string) (renamed map[string]string) {
	renamed = map[string]string{}
	for kind, all := range from {
		for name, c := range all.(tree) {
			old := kind + "/" + name
			have, taken := child(to, kind)[name]
			switch {
			case !taken:
			case slices.Contains(ours, old), reflect.DeepEqual(have, c):
				continue
			default:
				name = prefix + name
				renamed["#/components/"+old] = "#/components/" + kind + "/" + name
			}
			child(to, kind)[name] = c
		}
	}
	return renamed
}

// rename changes references.
func rename(v any, to map[string]string) {
	each(v, func(m tree) {
		if ref, ok := m["$ref"].(string); ok && to[ref] != "" {
			m["$ref"] = to[ref]
		}
	})
}

// each calls f for every map in v.
func each(v any, f func(tree)) {
	switch v := v.(type) {
	case tree:
		f(v)
		for _, k := range slices.Sorted(maps.Keys(v)) {
			each(v[k], f)
		}
	case []any:
		for _, x := range v {
			each(x, f)
		}
	}
}

func list(v any) []any { l, _ := v.([]any); return l }

// over puts one tree over another: maps are merged, lists appended to, null removes.
func over(doc, top tree) {
	for k, v := range top {
		switch v := v.(type) {
		case nil:
			delete(doc, k)
		case tree:
			if have, ok := doc[k].(tree); ok {
				over(have, v)
				continue
			}
			made := tree{}
			over(made, v)
			doc[k] = made
		case []any:
			doc[k] = append(list(doc[k]), v...)
		default:
			if text, ok := doc[k].(string); ok && k == "description" {
				v = strings.TrimSpace(text) + "\n\n" + fmt.Sprint(v)
			}
			doc[k] = v
		}
	}
}

// methods are the methods of a path, in the order in which they are shown.
var methods = []string{"get", "head", "options", "post", "put", "patch", "delete"}

// operations calls f for each operation, in order.
func operations(doc tree, f func(path, method string, item, op tree)) {
	paths := child(doc, "paths")
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		item := paths[path].(tree)
		for _, m := range methods {
			if op, ok := item[m].(tree); ok {
				f(path, m, item, op)
			}
		}
	}
}

// groupOf is the part of the API that a path belongs to.
func groupOf(path string) string {
	first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	switch {
	case strings.HasPrefix(path, agentPort):
		return "Agent"
	case strings.HasPrefix(path, egressPort):
		return "Egress"
	case first == "forks":
		return "Sandboxes"
	case slices.Contains([]string{"sandboxes", "snapshots", "images", "volumes", "policies", "keys"}, first):
		return strings.ToUpper(first[:1]) + first[1:]
	case first == "pools", first == "templates":
		return "Refused"
	}
	return "Daemon"
}

// groups are the parts of the API, in order.
var groups = []struct{ name, text string }{
	{"Sandboxes", ""},
	{"Snapshots", ""},
	{"Images", ""},
	{"Volumes", ""},
	{"Policies", ""},
	{"Keys", ""},
	{"Daemon", ""},
	{"Agent", "The agent of a sandbox runs commands and code, and serves files. This is OpenSandbox's execd API. SDKs ask for its " +
		"address with GET /sandboxes/{sandboxId}/endpoints/44772; this is where it is in the daemon's own API."},
	{"Egress", "The network policy of a sandbox, as OpenSandbox's egress sidecar has it, and its credential vault. Errors are " +
		"text/plain."},
	{"Refused", ""},
}

// finish adds what all operations have: a group, the role that the table of routes asks
// for, and the errors that each of them may answer.
func finish(t *testing.T, doc tree) {
	var tags []any
	for _, g := range groups {
		tag := tree{"name": g.name}
		if g.text != "" {
			tag["description"] = g.text
		}
		tags = append(tags, tag)
	}
	doc["tags"] = tags
	operations(doc, func(path, method string, item, op tree) {
		if p := list(item["parameters"]); len(p) > 0 {
			item["parameters"] = slices.CompactFunc(p, func(a, b any) bool { return reflect.DeepEqual(a, b) })
		} else {
			delete(item, "parameters")
		}
		delete(op, "operationId")
		op["tags"] = []any{groupOf(path)}
		need, ok := server.RoleOf(strings.ToUpper(method), samplePath(t, doc, item, op, path))
		if !ok {
			t.Fatalf("%s %s is in the documents, and not in the table of routes", method, path)
		}
		answers := child(op, "responses")
		add := func(status, kind string) {
			if answers[status] == nil {
				answers[status] = tree{"$ref": "#/components/responses/" + kind}
			}
		}
		fails := "Error"
		if strings.HasPrefix(path, egressPort) {
			fails = "EgressInternalServerError"
		}
		if answers["default"] == nil {
			add("default", fails)
		}
		if need == "anyone" || need == "tokens" {
			return
		}
		var security []any
		for _, s := range list(doc["security"]) {
			for scheme := range s.(tree) {
				security = append(security, tree{scheme: []any{string(need)}})
			}
		}
		op["security"] = security
		for _, status := range []string{"401", "403", "429"} {
			add(status, "Error")
		}
	})
}

// prune removes components that nothing names.
func prune(doc tree) {
	components := child(doc, "components")
	for removed := true; removed; {
		removed = false
		used := map[string]bool{}
		each(doc, func(m tree) {
			if ref, ok := m["$ref"].(string); ok {
				used[ref] = true
			}
		})
		for kind, all := range components {
			for name := range all.(tree) {
				if kind != "securitySchemes" && !used["#/components/"+kind+"/"+name] {
					delete(all.(tree), name)
					removed = true
				}
			}
		}
	}
}

// document makes openapi.json.
func document(t *testing.T) []byte {
	t.Helper()
	doc := served(t)
	sample(t, doc)
	b, err := json.MarshalIndent(doc, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return append(b, '\n')
}

// TestJSON holds the document and its sources together.
func TestJSON(t *testing.T) {
	own, err := openapi3.NewLoader().LoadFromData(api.YAML)
	if err != nil {
		t.Fatal(err)
	}
	if err := own.Validate(t.Context()); err != nil {
		t.Fatal("openapi.yaml:", err)
	}
	want := document(t)
	all, err := openapi3.NewLoader().LoadFromData(want)
	if err != nil {
		t.Fatal(err)
	}
	if err := all.Validate(t.Context(), openapi3.DisableExamplesValidation()); err != nil {
		t.Fatal("the document that is served:", err)
	}
	if *update {
		if err := os.WriteFile("openapi.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(api.JSON, want) {
		t.Error("openapi.json is not what its sources say; run: go test ./api -update")
	}
}
