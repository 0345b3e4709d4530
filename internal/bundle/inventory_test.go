package bundle

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

func withBill(t *testing.T, by signer, bill string) *Bundle {
	t.Helper()
	p := planOf(t, by.secret)
	for i := range p.Sources {
		if p.Sources[i].Kind == SBOM {
			p.Sources[i].Path = put(t, filepath.Join(t.TempDir(), "sbom.json"), bill, 0o644)
		}
	}
	path := filepath.Join(t.TempDir(), "test.bundle")
	if err := Create(t.Context(), path, p); err != nil {
		t.Fatal(err)
	}
	return mustOpen(t, path, by.public)
}

// TestInventory: what is in programs and images is compared by its versions.
func TestInventory(t *testing.T) {
	by := newSigner(t)
	old := withBill(t, by, `{"bomFormat":"CycloneDX","components":[
		{"name":"sandboxd","components":[{"name":"golang.org/x/sys","version":"v0.1.0","purl":"pkg:golang/golang.org/x/sys@v0.1.0"}]},
		{"name":"base","components":[
			{"name":"bash","version":"5.2-1","purl":"pkg:deb/debian/bash@5.2-1"},
			{"name":"less","version":"1","purl":"pkg:deb/debian/less@1"}, {"name":"less","version":"1","purl":"pkg:deb/debian/less@1"},
			{"group":"@types","name":"node","version":"1","purl":"pkg:npm/%40types/node@1"},
			{"group":"@types","name":"node","version":"2","purl":"pkg:npm/%40types/node@2"}]},
		{"name":"alone","version":"1"}]}`)
	next := withBill(t, by, `{"components":[
		{"name":"sandboxd","components":[{"name":"golang.org/x/sys","version":"v0.2.0","purl":"pkg:golang/golang.org/x/sys@v0.2.0"}]},
		{"name":"base","components":[
			{"name":"bash","version":"5.2-1","purl":"pkg:deb/debian/bash@5.2-1"},
			{"name":"vim","version":"9","purl":"pkg:deb/debian/vim@9"},
			{"group":"@types","name":"node","version":"2","purl":"pkg:npm/%40types/node@2"}]},
		{"name":"alone","version":"2"}]}`)
	a, err := old.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b, err := next.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range DiffParts(a, b) {
		got = append(got, fmt.Sprint(c.Change, " ", c.In, ": ", c.Name, " ", c.Old, " ", c.New))
	}
	want := "changed : alone [1] [2]\nremoved base: deb less [1] []\nadded base: deb vim [] [9]\n" +
		"changed base: npm @types/node [1 2] [2]\nchanged sandboxd: golang golang.org/x/sys [v0.1.0] [v0.2.0]"
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("%s\nwant:\n%s", s, want)
	}
	_, err = withBill(t, by, "[]").Inventory(t.Context())
	refused(t, err, errs.Invalid, "sbom.json", "no CycloneDX")
}
