package api_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
)

// Where a sample reaches the daemon: on its host, and with a key from anywhere.
const (
	sampleSocket = "--unix-socket /run/sandboxd/sandboxd.sock"
	sampleKey    = `-H "OPEN-SANDBOX-API-KEY: $OPEN_SANDBOX_API_KEY"`
	sampleHost   = `"http://$OPEN_SANDBOX_DOMAIN"`
)

// values are those of parameters of paths in samples, by name or by path.
var values = map[string]string{
	"sandboxId": "lab", "snapshotId": "before-upgrade", "port": "8000", "ref": "python", "kind": "summary", "path": "index.html",
	"forkId":       "fork-dxr3l2qktwzb",
	"/keys/{name}": "ci", "/volumes/{name}": "data", "/policies/{name}": "build", "/pools/{name}": "py",
	"/sandboxes/{sandboxId}/credential-vault/credentials/{name}": "token", "/sandboxes/{sandboxId}/credential-vault/bindings/{name}": "api",
	"credential_name": "token", "binding_name": "api",
}

// resolve follows a reference.
func resolve(doc tree, v any) tree {
	m := v.(tree)
	if ref, ok := m["$ref"].(string); ok {
		return child(doc, strings.Split(strings.TrimPrefix(ref, "#/"), "/")...)
	}
	return m
}

// valueOf is the value of a parameter in a sample.
func valueOf(doc tree, path string, p tree) string {
	if p["in"] == "path" {
		for _, key := range []string{path, p["name"].(string)} {
			if v := values[key]; v != "" {
				return v
			}
		}
	}
	v := p["example"]
	if v == nil {
		v = resolve(doc, p["schema"])["example"]
	}
	if l := list(v); len(l) > 0 {
		v = l[0]
	}
	if v == nil {
		return ""
	}
	return fmt.Sprint(v)
}

// samplePath is a path with values in the place of its parameters.
func samplePath(t *testing.T, doc, item, op tree, path string) string {
	t.Helper()
	out := path
	for _, p := range slices.Concat(list(item["parameters"]), list(op["parameters"])) {
		p := resolve(doc, p)
		if p["in"] != "path" {
			continue
		}
		v := valueOf(doc, path, p)
		if v == "" {
			t.Fatalf("%s: what stands for %s in a sample? say it in values", path, p["name"])
		}
		out = strings.ReplaceAll(out, "{"+p["name"].(string)+"}", v)
	}
	if strings.Contains(out, "{") {
		t.Fatalf("%s has a parameter that is not described", out)
	}
	return out
}

// sample puts into each operation how curl sends it: over the Unix socket, and with a key.
func sample(t *testing.T, doc tree) {
	t.Helper()
	operations(doc, func(path, method string, item, op tree) {
		own, _ := op["x-sample"].(tree)
		delete(op, "x-sample")
		query, _ := own["query"].(string)
		if query == "" {
			var q []string
			for _, p := range list(op["parameters"]) {
				p := resolve(doc, p)
				if p["in"] != "query" || p["required"] != true {
					continue
				}
				v := valueOf(doc, path, p)
				if v == "" {
					t.Fatalf("%s %s: give the parameter %s an example, or the route an x-sample", method, path, p["name"])
				}
				q = append(q, p["name"].(string)+"="+url.QueryEscape(v))
			}
			query = strings.Join(q, "&")
		}
		at := "/v1" + samplePath(t, doc, item, op, path)
		if query != "" {
			at += "?" + query
		}
		var args []string
		add := func(a string) {
			if a != "" {
				args = append(args, a)
			}
		}
		extra, _ := own["args"].(string)
		switch {
		case method == "head":
			add("-I")
		case method == "get", method == "post" && strings.Contains(extra, "-F "):
		default:
			add("-X " + strings.ToUpper(method))
		}
		add(extra)
		if body := own["body"]; body != nil {
			add("-H 'Content-Type: application/json'")
			add("-d " + quoted(compact(t, body)))
		} else if needsBody(doc, op) && extra == "" {
			t.Fatalf("%s %s has a body: give it an x-sample in additions.yaml", method, path)
		}
		say := func(label, how, url string) any {
			words := slices.Concat([]string{"curl", how}, args, []string{url})
			return tree{"lang": "Shell", "label": label, "source": strings.Join(words, " ")}
		}
		samples := []any{say("On the host", sampleSocket, quoted("http://localhost"+at))}
		if own["host"] != true {
			samples = append(samples, say("With a key", sampleKey, sampleHost+quoted(at)))
		}
		op["x-codeSamples"] = samples
	})
}

func needsBody(doc, op tree) bool {
	return op["requestBody"] != nil && resolve(doc, op["requestBody"])["required"] == true
}

func compact(t *testing.T, v any) string {
	t.Helper()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(b.String())
}

// quoted is s as a word of a shell.
func quoted(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:=,") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
