package backup

import (
	"bytes"
	"encoding/json"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/files"
	"github.com/sandboxd/sandboxd/internal/backup/target"
)

func someData() *Data {
	return &Data{
		Catalog: chunks.Catalog{
			Key: chunks.Key{1}, Packs: []chunks.Pack{{Name: target.PackName("a-box", strings.Repeat("ab", 32), true), Bytes: 5}},
			Index: []chunks.Place{{ID: chunks.ID{2}, Offset: 40, Stored: 3, Raw: 4}}, Tables: 1,
		},
		Trees: []Tree{{Kind: Volume, ID: "vol-x", Name: "kept", Limit: 9, Tree: files.Tree{Stream: []chunks.ID{{3}}, Files: 1, Bytes: 7}}},
		Left:  []Left{{"volume y", "it is gone"}},
	}
}

// TestData: what finds the data is in the file, and one without it is as before.
func TestData(t *testing.T) {
	for _, d := range []*Data{nil, someData()} {
		var b, state bytes.Buffer
		if err := Write(&b, Manifest{Data: d}, strings.NewReader("state")); err != nil {
			t.Fatal(err)
		}
		m, err := Read(bytes.NewReader(b.Bytes()), &state)
		if err != nil || state.String() != "state" || !reflect.DeepEqual(m.Data, d) || (m.Format == stateFormat) != (d == nil) {
			t.Errorf("%+v, %+v, %v", m, m.Data, err)
		}
		if _, err := Read(bytes.NewReader(b.Bytes()[:b.Len()-20]), io.Discard); err == nil {
			t.Error("one that is cut short is read")
		}
	}
}

// FuzzData: what is accepted has known trees and a catalog of packs, and is written as it was read.
func FuzzData(f *testing.F) {
	text, err := json.Marshal(someData())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"trees":[{"kind":"disk","id":"x"}]}`))
	f.Add([]byte(`{"catalog":{"packs":[{"name":"../../etc/passwd","bytes":1}]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := parseData(b)
		if err != nil {
			return
		}
		for _, one := range d.Trees {
			if one.Kind != Layer && one.Kind != Snapshot && one.Kind != Volume || one.ID == "" {
				t.Errorf("%+v", one)
			}
		}
		for _, p := range d.Catalog.Packs {
			if _, ok := target.ParsePack(p.Name); !ok {
				t.Errorf("%+v", p)
			}
		}
		text, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseData(text)
		if err != nil || len(again.Trees) != len(d.Trees) || again.Bytes() != d.Bytes() {
			t.Errorf("written again: %+v, %v", again, err)
		}
	})
}
