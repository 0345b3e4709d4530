package api

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/image"
)

func TestPullRoute(t *testing.T) {
	w := newWorld(t)
	for body, want := range map[string]struct {
		status int
		says   string
	}{
		`{"name":"registry.example.com/x:1"}`: {
			200,
			`{"progress":{"stage":"download","bytes":1,"total":2}}` + "\n" + `{"image":{"name":"python"`,
		},
		`{"name":"registry.example.com/late"}`: {
			200,
			`{"error":{"code":"SANDBOX::FORBIDDEN","message":"the registry refuses the password"}}`,
		},
		`{"name":"registry.example.com/denied"}`: {
			403,
			"refuses the password",
		},
		`{"name":"other.example.com/x"}`: {
			404,
			"IMAGE::NOT_FOUND",
		},
		`{"name":"registry.example.com/x","auth":7}`: {400, "auth"},
		`{"name":"registry.example.com/x","auth":{"username":"u"}}`: {
			400,
			"needs both",
		},
		`{"name":"registry.example.com/x","auth":{"username":"a:b","password":"s3cret"}}`: {
			400,
			"has a character",
		},
		`{"name":"registry.example.com/x","auth":{"username":"u","password":"s3cret\n"}}`: {
			400,
			"has a character",
		},
		`{"name":"registry.example.com/x","auth":{"username":"u","password":"` + strings.Repeat("s3cret", 4000) + `"}}`: {400, "at most"},
		`{"name":"registry.example.com/x","auth":{"username":"robot","password":"s3cret"}}`:                             {200, `"image"`},
	} {
		a := w.do("POST", "/v1/images/pull", body)
		if a.StatusCode != want.status || !strings.Contains(string(a.body), want.says) || strings.Contains(string(a.body), "s3cret") {
			t.Errorf("pull %.100s: %d %s; want %d and %s", body, a.StatusCode, a.body, want.status, want.says)
		}
	}
	given := 0
	for _, ctx := range w.pulled {
		if auth, ok := image.AuthOf(ctx); ok {
			given++
			if auth != (image.Auth{Username: "robot", Password: "s3cret"}) {
				t.Error("other credentials reached the pull")
			}
		}
	}
	if given != 1 {
		t.Errorf("%d pulls had credentials", given)
	}
}

// TestCreateOfFar: an image that is not here is answered at once if a registry
// may have it, and its credentials go to nobody but who pulls it.
func TestCreateOfFar(t *testing.T) {
	w := newWorld(t)
	body := `{"image":{"uri":"registry.example.com/team/app:7","auth":{"username":"robot","password":"s3cret"}},"entrypoint":["true"]}`
	a := w.do("POST", "/v1/sandboxes", body)
	if a.StatusCode != 202 {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	if auth, ok := image.AuthOf(w.asked[0]); !ok || auth.Password != "s3cret" {
		t.Error("the credentials did not reach who pulls")
	}
	for id, r := range w.recs {
		kept, err := json.Marshal(r)
		if err != nil || r.Spec.Image.Ref() != "registry.example.com/team/app:7" || len(r.Spec.Image.Layers) > 0 ||
			r.Spec.ImageURI != "registry.example.com/team/app:7" {
			t.Errorf("%s, %v", kept, err)
		}
		for _, path := range []string{"/v1/sandboxes/" + id, "/v1/sandboxes", "/v1/sandboxes/" + id + "/inspect", "/v1/sandboxes/" + id +
			"/diagnostics/events"} {
			kept = append(kept, w.do("GET", path, "").body...)
		}
		if strings.Contains(string(kept), "s3cret") || strings.Contains(string(a.body), "s3cret") {
			t.Errorf("the password is shown: %s", kept)
		}
	}
	for _, body := range []string{
		`{"image":{"uri":"registry.example.com/x","auth":{"username":"u","password":""}},"entrypoint":["true"]}`,
		`{"image":{"uri":"python","auth":{"username":"","password":"s3cret"}},"entrypoint":["true"]}`,
	} {
		if a := w.do("POST", "/v1/sandboxes", body); a.StatusCode != 400 || !strings.Contains(string(a.body), "image.auth") ||
			strings.Contains(string(a.body), "s3cret") {
			t.Errorf("%d %s", a.StatusCode, a.body)
		}
	}
	if a := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"other.example.com/x"},"entrypoint":["true"]}`); a.StatusCode != 404 ||
		!strings.Contains(string(a.body), "IMAGE::NOT_FOUND") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}
