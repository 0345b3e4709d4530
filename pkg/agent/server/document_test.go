package server

import (
	"encoding/json"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
)

// TestDocumentedRoutes: the agent has every route that the API's document names for it.
func TestDocumentedRoutes(t *testing.T) {
	text, err := os.ReadFile("../../../api/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Paths map[string]map[string]any
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	e := newEnv(t)
	seen := 0
	for path, methods := range doc.Paths {
		path, ok := strings.CutPrefix(path, "/sandboxes/{sandboxId}/proxy/44772")
		if !ok {
			continue
		}
		path = strings.NewReplacer("{", "", "}", "").Replace(path)
		for method := range methods {
			if method == "parameters" {
				continue
			}
			seen++
			if _, err := e.s.route(httptest.NewRequest(strings.ToUpper(method), path, nil)); err != nil {
				t.Errorf("%s %s: %v", method, path, err)
			}
		}
	}
	if seen < 30 {
		t.Errorf("the document has only %d routes of the agent", seen)
	}
}
