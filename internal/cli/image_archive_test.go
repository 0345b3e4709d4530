package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestImages(t *testing.T) {
	d := newDaemon(t)
	dir := t.TempDir()
	file, layout, plain := filepath.Join(dir, "a.tar"), filepath.Join(dir, "layout"), filepath.Join(dir, "plain")
	for _, err := range []error{
		os.WriteFile(file, []byte("an archive"), 0o600), os.Mkdir(layout, 0o755), os.Mkdir(plain, 0o755),
		os.WriteFile(filepath.Join(layout, "oci-layout"), []byte("{}"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	saved, half, absent := filepath.Join(dir, "s.tar"), filepath.Join(dir, "t.tar"), filepath.Join(dir, "absent")
	for args, want := range map[string]result{
		"image import " + file + " mine:1":      {0, "mine:1\n", ""},
		"image import --format rootfs - mine:1": {0, "mine:1\n", ""},
		"image import " + layout:                {0, "mine:1\n", ""},
		"image load -i " + file:                 {0, "mine:1\n", ""},
		"image load":                            {0, "mine:1\n", ""},
		"image prune":                           {0, "old:false\nsha256:1\nTotal reclaimed space: 3MiB\n", ""},
		"image prune -a":                        {125, "", "use -f to confirm"},
		"image prune -a -f -q":                  {0, "old:true\nsha256:1\n", ""},
		"image export python":                   {0, "an archive", ""},
		"image save python -o " + saved:         {0, "", ""},
		"image import " + file + " bad":         {125, "", "layer 3 is \\x1b bad"},
		"image import " + absent:                {125, "", "absent: no such file"},
		"image import " + plain + " x":          {125, "", "tar -C"},
		"image export nope":                     {125, "", "not found"},
		"image export torn -o " + half:          {125, "", "broke"},
		"image export torn -o /absent/t.tar":    {125, "", "no such file"},
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != want.code || r.out != want.out || !strings.Contains(r.errout, want.errout) ||
			want.errout == "" && r.errout != "" {
			t.Errorf("%s: %+v, want %+v", args, r, want)
		}
	}
	for _, want := range []string{
		`format=auto&name=mine%3A1 10 "an archive"`, `format=rootfs&name=mine%3A1 -1 "typed"`,
		` 10 "an archive"`, ` -1 "typed"`, `format=auto -1 "oci-layout`,
	} {
		if !slices.ContainsFunc(d.uploads, func(got string) bool { return strings.HasPrefix(got, want) }) {
			t.Errorf("no upload %q among %q", want, d.uploads)
		}
	}
	if b, err := os.ReadFile(saved); err != nil || string(b) != "an archive" {
		t.Errorf("exported %q, %v", b, err)
	}
	left, _ := os.ReadDir(dir)
	if len(left) != 4 { // a.tar, layout, plain, s.tar: nothing of what broke
		t.Errorf("left: %v", left)
	}
	if r := d.run(t, "image", "inspect", "python"); r.code != 0 || !strings.Contains(r.out, `"team": "a"`) {
		t.Errorf("inspect %+v", r)
	}
}
