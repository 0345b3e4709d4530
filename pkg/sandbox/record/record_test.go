package record

import (
	"strings"
	"testing"
)

// TestTakeImage: a sandbox runs what its client says, unless that asked for the image's
// own command: then ENTRYPOINT stays, and arguments take the place of CMD.
func TestTakeImage(t *testing.T) {
	for _, c := range []struct {
		entrypoint, cmd, asked string
		own                    bool
		want                   string
	}{
		{"e -v", "serve", "", false, ""},
		{"e -v", "serve", "x y", false, "x y"},
		{"e -v", "serve", "", true, "e -v serve"},
		{"e -v", "serve", "x y", true, "e -v x y"},
		{"", "serve", "", true, "serve"},
		{"", "serve", "x", true, "x"},
		{"e", "", "", true, "e"},
		{"", "", "", true, ""},
	} {
		i := Image{Config: ImageConfig{
			Entrypoint: strings.Fields(c.entrypoint), Cmd: strings.Fields(c.cmd), Labels: map[string]string{"of": "the image"},
		}}
		s := Spec{Entrypoint: strings.Fields(c.asked), ImageCommand: c.own}
		ok := s.TakeImage(i)
		if got := strings.Join(s.Entrypoint, " "); got != c.want || ok == (c.own && c.want == "") || s.Image.Config.Labels != nil {
			t.Errorf("%+v: %q, %v", c, got, ok)
		}
	}
}
