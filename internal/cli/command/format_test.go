package command

import (
	"strings"
	"testing"
)

type thing struct {
	ID     string            `json:"id"`
	Bytes  int64             `json:"bytes"`
	Share  float64           `json:"share"`
	Labels map[string]string `json:"labels,omitempty"`
	Args   []string          `json:"args"`
}

// TestFormat: a template sees what -o json prints and docker's names, and steers no
// terminal.
func TestFormat(t *testing.T) {
	things := Listing[thing]{
		Name: func(v thing) string { return v.ID }, Header: []string{"ID"}, Row: func(v thing) []string { return []string{v.ID} },
		Docker: func(v thing) Fields { return Fields{"ID": v.ID, "CreatedAt": "now", "PIDs": 3} },
	}
	list := []thing{
		{ID: "a", Bytes: 1 << 40, Share: 0.5, Labels: map[string]string{"team": "x"}, Args: []string{"sh", "-c"}},
		{ID: "b\x1b[2J", Args: []string{"\x9b2J"}},
	}
	for asked, want := range map[string]string{
		"{{.ID}}":                         "a\nb\\x1b[2J\n",
		"{{.id}}":                         "a\nb\\x1b[2J\n",
		`{{.id}}\t{{.bytes}}\t{{.share}}`: "a\t1099511627776\t0.5\nb\\x1b[2J\t0\t0\n",
		"{{index .labels \"team\"}}":      "x\n\n",
		"{{.labels.team}}":                "x\n<no value>\n",
		`{{join .args "+"}}`:              "sh+-c\n\ufffd2J\n",
		"{{index .args 0}}":               "sh\n\ufffd2J\n",
		"{{range .args}}{{.}};{{end}}":    "sh;-c;\n\ufffd2J;\n",
		"{{if gt .bytes 5}}large{{end}}":  "large\n\n",
		`{{json .args}}`:                  `["sh","-c"]` + "\n" + `["\ufffd2J"]` + "\n",
		"{{json .}}":                      `{"args":["sh","-c"],"bytes":1099511627776,"id":"a","labels":{"team":"x"},"share":0.5}`,
		`{{upper .ID | printf "%.1s"}}`:   "A\nB\n",
		`{{title "ab"}}{{pad "x" 1 2}}{{truncate "abc" 2}}{{lower "A"}}{{len (split "a,b" ",")}}`: "Ab x  aba2",
		"table":                         "ID\na\nb\\x1b[2J\n",
		`table {{.ID}}\t{{.CreatedAt}}`: "ID         CREATED AT\na          now\nb\\x1b[2J   now\n",
		"table {{.labels.team}}":        "TEAM\nx\n",
		`table {{index .labels "team"}}\t{{join .args " "}}\t{{json .bytes}}`:         "LABELS   ARGS    BYTES\nx        sh -c   1099511627776\n",
		`table {{index (split .id "-") 0 | upper}}`:                                   "ID\nA\n",
		`{{index (split "a:b" ":") 1}}{{join (split "a:b" ":") "+"}}{{index . "id"}}`: "ba+ba\n",
		`table {{.PIDs}}`: "PIDS\n3\n3\n",
		"json":            `{"id":"a","bytes":1099511627776,"share":0.5,"labels":{"team":"x"},"args":["sh","-c"]}` + "\n",
	} {
		o := Output{Format: Table, format: format{asked: asked}}
		err := o.parse(things.docker(thing{}))
		var b strings.Builder
		if err == nil {
			err = things.Show(&b, &o, list)
		}
		if got := b.String(); err != nil || !strings.HasPrefix(got, want) || strings.Contains(got, "\x1b") {
			t.Errorf("%s: %q, %v; want %q", asked, got, err, want)
		}
	}
	for asked, want := range map[string]string{
		"{{.Foo}}":               "there is no .Foo; there are the names of -o json, such as .id, and CreatedAt, ID, PIDs",
		"{{if .Foo}}x{{end}}":    "there is no .Foo",
		"{{printf \"%s\" .Foo}}": "there is no .Foo",
		"xml":                    "want json, table or a template",
		"tableau":                "want json, table or a template",
		"{{.ID":                  "--format:1: unclosed action",
		"{{foo .ID}}":            `function "foo" not defined`,
		"{{index .args 7}}":      "no element 7 in a list of 2",
		"{{split .id}}":          "wrong number of args",
	} {
		o := Output{Format: Table, format: format{asked: asked}}
		err := o.parse(things.docker(thing{}))
		if err == nil {
			err = things.Show(&strings.Builder{}, &o, list)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", asked, err, want)
		}
	}
}
