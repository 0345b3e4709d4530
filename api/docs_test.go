package api

import (
	"bytes"
	"cmp"
	"fmt"
	"html/template"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
)

// A page of documentation is made of the documents when they change, not by the
// daemon: what it serves is one file, and it needs no parser of them.

// document is one OpenAPI document as docs.tmpl wants it.
type document struct {
	ID, Title, Description string
	Operations             []operation
	Schemas                []schema
}

type operation struct {
	ID, Method, Path, Summary, Description string
	Open                                   bool // without a key
	Parameters                             []field
	Body                                   []content
	Answers                                []reply
}

type field struct {
	Name, In, Description string
	Required              bool
	Type                  []word
}

type content struct {
	Media string
	Type  []word
}

type reply struct {
	Status, Description string
	Content             []content
}

type schema struct {
	ID, Name, Description string
	Fields                []field
	Type                  []word
}

// word is a piece of the name of a type; some lead to a schema.
type word struct{ Text, Link string }

// describe reads a document; id tells its anchors from those of others.
func describe(id string, doc *openapi3.T) document {
	d := document{ID: id, Title: doc.Info.Title, Description: doc.Info.Description}
	for _, path := range slices.Sorted(maps.Keys(doc.Paths.Map())) {
		item := doc.Paths.Value(path)
		for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE"} {
			op := item.GetOperation(method)
			if op == nil {
				continue
			}
			o := operation{
				ID: fmt.Sprintf("%s-%s-%s", id, method, strings.Trim(path, "/")), Method: method, Path: path,
				Summary: op.Summary, Description: op.Description, Open: op.Security != nil && len(*op.Security) == 0,
			}
			for _, p := range slices.Concat(item.Parameters, op.Parameters) {
				o.Parameters = append(o.Parameters, field{
					p.Value.Name, p.Value.In, p.Value.Description, p.Value.Required,
					typeOf(id, p.Value.Schema),
				})
			}
			if op.RequestBody != nil {
				o.Body = contents(id, op.RequestBody.Value.Content)
			}
			for _, status := range slices.Sorted(maps.Keys(op.Responses.Map())) {
				r := op.Responses.Value(status).Value
				text := ""
				if r.Description != nil {
					text = *r.Description
				}
				o.Answers = append(o.Answers, reply{status, text, contents(id, r.Content)})
			}
			d.Operations = append(d.Operations, o)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(doc.Components.Schemas)) {
		ref := doc.Components.Schemas[name]
		s := schema{
			ID: id + "." + name, Name: name, Description: ref.Value.Description,
			Type: typeOf(id, &openapi3.SchemaRef{Value: ref.Value}),
		}
		for _, part := range append([]*openapi3.SchemaRef{ref}, ref.Value.AllOf...) {
			for _, f := range slices.Sorted(maps.Keys(part.Value.Properties)) {
				p := part.Value.Properties[f]
				s.Fields = append(s.Fields, field{
					Name: f, Description: p.Value.Description,
					Required: slices.Contains(part.Value.Required, f), Type: typeOf(id, p),
				})
			}
		}
		d.Schemas = append(d.Schemas, s)
	}
	return d
}

func contents(id string, c openapi3.Content) (all []content) {
	for _, media := range slices.Sorted(maps.Keys(c)) {
		all = append(all, content{media, typeOf(id, c[media].Schema)})
	}
	return all
}

// typeOf names a type in a few words.
func typeOf(id string, ref *openapi3.SchemaRef) []word {
	if ref == nil || ref.Value == nil {
		return nil
	}
	if name := ref.Ref[strings.LastIndex(ref.Ref, "/")+1:]; name != "" {
		return []word{{name, id + "." + name}}
	}
	v := ref.Value
	kind := "any"
	if v.Type != nil {
		kind = strings.Join(v.Type.Slice(), " or ")
	}
	switch {
	case v.Items != nil:
		return append([]word{{"array of ", ""}}, typeOf(id, v.Items)...)
	case v.AdditionalProperties.Schema != nil:
		return append([]word{{"map to ", ""}}, typeOf(id, v.AdditionalProperties.Schema)...)
	case len(v.Enum) > 0:
		var of []string
		for _, e := range v.Enum {
			of = append(of, fmt.Sprint(e))
		}
		return []word{{strings.Join(of, " | "), ""}}
	}
	for _, list := range []openapi3.SchemaRefs{v.OneOf, v.AnyOf, v.AllOf} {
		var out []word
		for i, s := range list {
			if i > 0 {
				out = append(out, word{" or ", ""})
			}
			out = append(out, typeOf(id, s)...)
		}
		if len(out) > 0 {
			return out
		}
	}
	if v.Format != "" {
		kind += " (" + v.Format + ")"
	}
	return []word{{cmp.Or(kind, "any"), ""}}
}

// page makes docs.html of the documents.
func page(t *testing.T) (all []document, html []byte) {
	t.Helper()
	own, err := openapi3.NewLoader().LoadFromData(YAML)
	if err != nil {
		t.Fatal(err)
	}
	all = []document{describe("sandboxd", own)}
	for _, name := range []string{"lifecycle", "execd", "egress", "diagnostic"} {
		doc, err := openapi3.NewLoader().LoadFromFile("opensandbox/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, describe(name, doc))
	}
	tmpl, err := template.ParseFiles("docs.tmpl")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := tmpl.Execute(&b, all); err != nil {
		t.Fatal(err)
	}
	return all, b.Bytes()
}

// TestDocs holds docs.html and the documents together.
func TestDocs(t *testing.T) {
	all, want := page(t)
	if *update {
		if err := os.WriteFile("docs.html", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(Docs, want) {
		t.Error("docs.html is not what the documents say; run: go test ./api -update")
	}
	for _, d := range all {
		if len(d.Operations) == 0 || len(d.Schemas) == 0 {
			t.Errorf("%s has %d operations and %d schemas", d.ID, len(d.Operations), len(d.Schemas))
		}
		for _, o := range d.Operations {
			if !bytes.Contains(want, []byte(`<span class="path">`+template.HTMLEscapeString(o.Path)+`</span>`)) {
				t.Errorf("the page lacks %s %s", o.Method, o.Path)
			}
		}
	}
}

// TestDocsStandAlone: the page loads nothing, runs nothing, and its links lead
// to what is there.
func TestDocsStandAlone(t *testing.T) {
	_, b := page(t)
	html := string(b)
	for _, m := range regexp.MustCompile(`<(script|link|img|iframe|object|base|form)\b|\s(src|srcset|on[a-z]+)=|url\(|@import`).FindAllString(html, -1) {
		t.Errorf("the page has %q", m)
	}
	ids := map[string]bool{}
	for _, m := range regexp.MustCompile(`\sid="([^"]*)"`).FindAllStringSubmatch(html, -1) {
		if ids[m[1]] {
			t.Errorf("two are %s", m[1])
		}
		ids[m[1]] = true
	}
	links := regexp.MustCompile(`href="([^"]*)"`).FindAllStringSubmatch(html, -1)
	if len(links) < 100 {
		t.Errorf("only %d links", len(links))
	}
	for _, m := range links {
		if to, local := strings.CutPrefix(m[1], "#"); (!local || !ids[to]) && m[1] != "openapi.json" {
			t.Errorf("a link leads to %s", m[1])
		}
	}
}
