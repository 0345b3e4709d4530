package api_test

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

	"github.com/sandboxd/sandboxd/api"
)

// The page is made of the document when that changes, not by the daemon: what it serves
// is one file, and it needs no parser of documents.

// shown is what docs.tmpl shows.
type shown struct {
	Title, Description string
	Groups             []group
	Schemas            []schema
}

// group is the operations of one tag.
type group struct {
	ID, Title, Description string
	Operations             []operation
}

type operation struct {
	ID, Method, Path, Summary, Description string
	Needs                                  string // who may ask
	Samples                                []example
	Parameters                             []field
	Body                                   []content
	Answers                                []reply
}

// example is how curl asks.
type example struct{ Label, Text string }

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
	Headers             []string
	Content             []content
}

type schema struct {
	ID, Name, Description string
	Fields                []field
	Type                  []word
}

// word is a piece of the name of a type; some lead to a schema.
type word struct{ Text, Link string }

// describe reads the document.
func describe(doc *openapi3.T) shown {
	d := shown{Title: doc.Info.Title, Description: doc.Info.Description}
	for _, tag := range doc.Tags {
		d.Groups = append(d.Groups, group{ID: strings.ToLower(tag.Name), Title: tag.Name, Description: tag.Description})
	}
	for _, path := range slices.Sorted(maps.Keys(doc.Paths.Map())) {
		item := doc.Paths.Value(path)
		for _, method := range methods {
			method = strings.ToUpper(method)
			op := item.GetOperation(method)
			if op == nil {
				continue
			}
			o := operation{
				ID: fmt.Sprintf("%s-%s", method, strings.Trim(path, "/")), Method: method, Path: path,
				Summary: op.Summary, Description: op.Description, Needs: needs(op), Samples: samplesOf(op),
			}
			for _, p := range slices.Concat(item.Parameters, op.Parameters) {
				p := p.Value
				o.Parameters = append(o.Parameters, field{p.Name, p.In, p.Description, p.Required, typeOf(p.Schema)})
			}
			if op.RequestBody != nil {
				o.Body = contents(op.RequestBody.Value.Content)
			}
			for _, status := range slices.Sorted(maps.Keys(op.Responses.Map())) {
				r := op.Responses.Value(status).Value
				text := ""
				if r.Description != nil {
					text = *r.Description
				}
				o.Answers = append(o.Answers, reply{status, text, slices.Sorted(maps.Keys(r.Headers)), contents(r.Content)})
			}
			at := slices.IndexFunc(d.Groups, func(g group) bool { return g.Title == op.Tags[0] })
			d.Groups[at].Operations = append(d.Groups[at].Operations, o)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(doc.Components.Schemas)) {
		ref := doc.Components.Schemas[name]
		s := schema{
			ID: "schema." + name, Name: name, Description: ref.Value.Description,
			Type: typeOf(&openapi3.SchemaRef{Value: ref.Value}),
		}
		for _, part := range append([]*openapi3.SchemaRef{ref}, ref.Value.AllOf...) {
			for _, f := range slices.Sorted(maps.Keys(part.Value.Properties)) {
				p := part.Value.Properties[f]
				s.Fields = append(s.Fields, field{
					Name: f, Description: p.Value.Description,
					Required: slices.Contains(part.Value.Required, f), Type: typeOf(p),
				})
			}
		}
		d.Schemas = append(d.Schemas, s)
	}
	return d
}

// needs says who may send a request.
func needs(op *openapi3.Operation) string {
	switch {
	case op.Security == nil || len(*op.Security) == 0:
		return "It needs no key."
	case slices.ContainsFunc(*op.Security, func(s openapi3.SecurityRequirement) bool { return len(s) == 0 }):
		return "It needs a key or the token of the port where the configuration says so (gateway.public)."
	}
	for _, roles := range (*op.Security)[0] {
		if len(roles) > 0 {
			return "It needs a key of the role " + roles[0] + ", or the Unix socket."
		}
	}
	return "It needs the token of the port, a key of the role operator, or the Unix socket."
}

func samplesOf(op *openapi3.Operation) (all []example) {
	for _, s := range op.Extensions["x-codeSamples"].([]any) {
		s := s.(map[string]any)
		all = append(all, example{s["label"].(string), s["source"].(string)})
	}
	return all
}

func contents(c openapi3.Content) (all []content) {
	for _, media := range slices.Sorted(maps.Keys(c)) {
		all = append(all, content{media, typeOf(c[media].Schema)})
	}
	return all
}

// typeOf names a type in a few words.
func typeOf(ref *openapi3.SchemaRef) []word {
	if ref == nil || ref.Value == nil {
		return nil
	}
	if name := ref.Ref[strings.LastIndex(ref.Ref, "/")+1:]; name != "" {
		return []word{{name, "schema." + name}}
	}
	v := ref.Value
	kind := "any"
	if v.Type != nil {
		kind = strings.Join(v.Type.Slice(), " or ")
	}
	switch {
	case v.Items != nil:
		return append([]word{{"array of ", ""}}, typeOf(v.Items)...)
	case v.AdditionalProperties.Schema != nil:
		return append([]word{{"map to ", ""}}, typeOf(v.AdditionalProperties.Schema)...)
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
			out = append(out, typeOf(s)...)
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

// page makes docs.html of the document.
func page(t *testing.T) (d shown, html []byte) {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(document(t))
	if err != nil {
		t.Fatal(err)
	}
	d = describe(doc)
	tmpl, err := template.ParseFiles("docs.tmpl")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := tmpl.Execute(&b, d); err != nil {
		t.Fatal(err)
	}
	return d, b.Bytes()
}

// TestDocs holds docs.html and the document together.
func TestDocs(t *testing.T) {
	d, want := page(t)
	if *update {
		if err := os.WriteFile("docs.html", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(api.Docs, want) {
		t.Error("docs.html is not what openapi.json says; run: go test ./api -update")
	}
	if len(d.Schemas) < 50 {
		t.Errorf("only %d schemas", len(d.Schemas))
	}
	for _, g := range d.Groups {
		if len(g.Operations) == 0 {
			t.Errorf("%s has no operations", g.Title)
		}
		for _, o := range g.Operations {
			if !bytes.Contains(want, []byte(`<span class="path">`+template.HTMLEscapeString(o.Path)+`</span>`)) {
				t.Errorf("the page lacks %s %s", o.Method, o.Path)
			}
			if o.Summary == "" || len(o.Samples) == 0 || len(o.Answers) == 0 {
				t.Errorf("%s %s: %+v", o.Method, o.Path, o)
			}
			for _, s := range o.Samples {
				if !bytes.Contains(want, []byte(template.HTMLEscapeString(s.Text))) {
					t.Errorf("the page lacks %s", s.Text)
				}
			}
		}
	}
}

// TestDocsStandAlone: the page loads nothing, runs nothing, and its links lead
// to what is there.
func TestDocsStandAlone(t *testing.T) {
	_, b := page(t)
	html := string(b)
	for _, m := range regexp.MustCompile(`<(script|link|img|iframe|object|base|form)\b|\s(src|srcset|style|on[a-z]+)=|url\(|@import`).FindAllString(html, -1) {
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
