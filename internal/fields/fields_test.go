package fields

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

type embedded struct {
	Deep string `json:"deep"`
}

type request struct {
	embedded
	Timeout *int64            `json:"timeout,omitempty"`
	Image   *struct{ X int }  `json:"image"`
	ID      string            `json:"id"`
	Env     map[string]string `json:"env"`
	Plain   int
	Hidden  int `json:"-"`
	//lint:ignore U1000 that is what is tested
	unseen int
}

type itself struct{ Name string }

func (*itself) UnmarshalJSON([]byte) error { return nil }

func TestUnknown(t *testing.T) {
	for body, want := range map[string]string{
		`{}`: "[]  ", `{"timeout":1,"image":{},"id":"","env":{},"Plain":1,"deep":""}`: "[]  ",
		`{"TIMEOUT":1,"plain":2}`:        "[]  ",
		`{"timout":1}`:                   "[timout] timout timeout",
		`{"timeoutt":1}`:                 "[timeoutt] timeoutt timeout",
		`{"timeouf":1}`:                  "[timeouf] timeouf timeout",
		`{"tiemout":1}`:                  "[tiemout] tiemout timeout",
		`{"Timout":1}`:                   "[Timout] Timout timeout",
		`{"imeout":1}`:                   "[imeout] imeout timeout",
		`{"timout":1,"timeout":2}`:       "[timout]  ", // what it could mean is there
		`{"timout":1,"Timeout":2}`:       "[timout]  ",
		`{"tmout":1}`:                    "[tmout]  ", // two edits
		`{"resourceRequests":{},"a":1}`:  "[a resourceRequests]  ",
		`{"b":1,"images":[],"ids":2}`:    "[b ids images] ids id",
		`{"dep":"x"}`:                    "[dep] dep deep",
		`{"Hidden":1,"unseen":2}`:        "[Hidden unseen]  ",
		`{"":1}`:                         "[]  ", // one unknown name, which is empty
		`{"image":{"timout":1}}`:         "[]  ", // only the top is looked at
		`[1]`:                            "[]  ",
		`null`:                           "[]  ",
		`{"timout":1`:                    "[]  ",
		"{\"tim\u00e9out\":1}":           "[timéout]  ", // two bytes more: no near miss
		`{"embedded":1,"timeout":1}`:     "[embedded]  ",
		`{"timout":1,"timout":2,"id":1}`: "[timout] timout timeout",
	} {
		names, typo, meant := Unknown([]byte(body), &request{})
		if got := fmt.Sprintf("%v %s %s", names, typo, meant); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
	var anything any
	for _, v := range []any{nil, &anything, &map[string]string{}, request{}, &itself{}, &[]string{}, new(json.RawMessage)} {
		if names, typo, _ := Unknown([]byte(`{"timout":1}`), v); names != nil || typo != "" {
			t.Errorf("%T: %v", v, names)
		}
	}
}

func TestTell(t *testing.T) {
	many := make([]string, 20)
	for i := range many {
		many[i] = fmt.Sprint("n", i)
	}
	for want, names := range map[string][]string{
		"":                       nil,
		"a, b_c":                 {"a", "b_c"},
		"a%2C+b%0D%0ASet-Cookie": {"a, b\r\nSet-Cookie"},
		strings.Repeat("x", 64):  {strings.Repeat("x", 1000)},
		"n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, ...": many,
	} {
		h := http.Header{}
		if Tell(h, names); h.Get(Header) != want {
			t.Errorf("%.60q: %q, want %q", names, h.Get(Header), want)
		}
	}
}
