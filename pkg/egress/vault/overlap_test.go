package vault

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestBindingsOverlap compares the refusal of a vault with requests that are tried one by one.
func TestBindingsOverlap(t *testing.T) {
	hosts := []string{"a.example.com", "b.a.example.com", "*.example.com", "*.a.example.com", "a.example.org"}
	names := []string{"a.example.com", "b.a.example.com", "c.b.a.example.com", "z.example.com", "a.example.org"}
	paths := []string{"/*", "/x", "/x/*", "/*/y"}
	texts := []string{"/", "/x", "/x/", "/x/y", "/z/y"}
	r := rand.New(rand.NewPCG(3, 4))
	some := func(from []string) (string, []string) {
		var out []string
		for range 1 + r.IntN(2) {
			out = append(out, from[r.IntN(len(from))])
		}
		return `["` + strings.Join(out, `","`) + `"]`, out
	}
	refused := 0
	for range 500 {
		var list []string
		for i := range 2 {
			h, _ := some(hosts)
			p, _ := some(paths)
			m, _ := some([]string{"GET", "POST", "PUT"})
			s, _ := some([]string{"https", "http"})
			list = append(list, bearer(fmt.Sprint(i), fmt.Sprintf(`{"hosts":%s,"paths":%s,"methods":%s,"schemes":%s}`, h, p, m, s)))
		}
		one, two := create1(t, vaultOf(list[0])).Bindings()[0], create1(t, vaultOf(list[1])).Bindings()[0]
		want := false
		for _, name := range names {
			for _, path := range texts {
				for _, method := range []string{"GET", "POST", "PUT"} {
					for _, scheme := range []string{"https", "http"} {
						both := one.Matches(scheme, name, method, path) && two.Matches(scheme, name, method, path)
						want = want || both && slices.Contains(one.Match.Hosts, name) == slices.Contains(two.Match.Hosts, name)
					}
				}
			}
		}
		if _, err := Create([]byte(vaultOf(list...))); (err != nil) != want {
			t.Fatalf("%s: %v; overlap %v", list, err, want)
		}
		if want {
			refused++
		}
	}
	if refused < 50 || refused > 450 {
		t.Errorf("%d of 500 were refused: too uneven to show much", refused)
	}
}

// BenchmarkOverlap is the worst case that the limits allow: all bindings differ in the last thing
// that is compared.
func BenchmarkOverlap(b *testing.B) {
	v := &Vault{1, map[string]*Credential{}, map[string]*Binding{}}
	for i := range MaxBindings {
		x := &Binding{Name: fmt.Sprint(i), Match: Match{Schemes: []string{"https"}, Methods: []string{"GET"}}}
		for j := range MaxAllHosts / MaxBindings {
			x.Match.Hosts = append(x.Match.Hosts, fmt.Sprintf("a%d.b%d.example.com", i, j))
			x.Match.Paths = append(x.Match.Paths, "/"+strings.Repeat("x", 480)+fmt.Sprintf("%d-%d*", i, j))
		}
		x.Match.Hosts[len(x.Match.Hosts)-1] = "*.example.com"
		if err := x.compile(""); err != nil {
			b.Fatal(err)
		}
		v.bindings[x.Name] = x
	}
	for b.Loop() {
		v.checkOverlap() //nolint:errcheck // the time counts
	}
}
