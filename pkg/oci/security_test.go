package oci

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestLevels compares what each level changes in a spec with testdata/levels.txt.
func TestLevels(t *testing.T) {
	c := sample
	c.Volumes = []Volume{{Source: "/run/x/volumes/y/0", Path: "/v"}}
	lines := func(name string, level record.Security) []string {
		c.Security = level
		b, err := json.MarshalIndent(newSpec(name, "amd64", c), "", " ")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split(string(b), "\n")
	}
	var b strings.Builder
	for _, level := range record.SecurityLevels {
		for _, name := range []string{Runsc, Runc} {
			fmt.Fprintf(&b, "%s on %s:\n", level, name)
			for _, text := range Differences(name, level) {
				fmt.Fprintf(&b, "  %s\n", text)
			}
			count := map[string]int{}
			was, is := lines(name, record.SecurityDefault), lines(name, level)
			for _, l := range was {
				count[strings.Trim(l, " ,")]--
			}
			for _, l := range is {
				count[strings.Trim(l, " ,")]++
			}
			tell := func(mark string, lines []string, sign int) {
				for _, l := range lines {
					if l = strings.Trim(l, " ,"); len(l) > 1 && count[l]*sign > 0 { // not a bracket alone
						count[l] -= sign
						fmt.Fprintf(&b, "%s %s\n", mark, l)
					}
				}
			}
			tell("-", was, -1)
			tell("+", is, 1)
		}
	}
	const path = "testdata/levels.txt"
	if *update {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("the levels differ from %s; go test ./pkg/oci -update, and read the diff:\n%s", path, b.String())
	}
}

// TestEveryDifferenceIsOne: each row changes the spec of the runtimes that it names, and
// no shared list.
func TestEveryDifferenceIsOne(t *testing.T) {
	c := sample
	c.Volumes = []Volume{{Source: "/run/x/volumes/y/0", Path: "/v"}}
	for _, d := range differences {
		if d.level == record.SecurityDefault {
			t.Errorf("%s: the default differs from itself", d.text)
		}
		for _, name := range []string{Runsc, Runc} {
			if d.change == nil || !d.of(name, d.level) {
				continue
			}
			before, s := newSpec(name, "amd64", c), newSpec(name, "amd64", c)
			d.change(s)
			if reflect.DeepEqual(s, before) {
				t.Errorf("%s: it changes nothing on %s", d.text, name)
			}
			if !reflect.DeepEqual(newSpec(name, "amd64", c), before) {
				t.Fatalf("%s: it changes the spec of other sandboxes", d.text)
			}
		}
	}
}

func TestUnknownLevel(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("an unknown level makes a spec")
		}
	}()
	NewSpec(Runc, Config{Security: "lax"})
}
