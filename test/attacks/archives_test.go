package attacks_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/client"
)

// confined is why no hostile archive is shown to succeed.
var confined = unproven("the child that unpacks has no other root; what it writes outside is written to nothing")

// archiveAttacks are images that would change the host while they are unpacked.
var archiveAttacks = []attack{
	unpacking("a name that leads up", func(w *target) []entry {
		return []entry{{tar.Header{Name: strings.Repeat("../", 12) + w.marker[1:]}, "changed"}}
	}),
	unpacking("an absolute name", func(w *target) []entry { return []entry{{tar.Header{Name: w.marker}, "changed"}} }),
	unpacking("a file through a link", func(w *target) []entry {
		return []entry{
			{tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: filepath.Dir(w.marker)}, ""},
			{tar.Header{Name: "l/marker"}, "changed"},
		}
	}),
	unpacking("a file over a link", func(w *target) []entry {
		return []entry{
			{tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: w.marker}, ""},
			{tar.Header{Name: "l"}, "changed"},
		}
	}),
	unpacking("a hard link out", func(w *target) []entry {
		return []entry{
			{tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: strings.Repeat("../", 12) + w.marker[1:]}, ""},
			{tar.Header{Name: "h"}, "changed"},
		}
	}),
	unpacking("a hard link to a link", func(w *target) []entry {
		return []entry{
			{tar.Header{Name: "s", Typeflag: tar.TypeSymlink, Linkname: w.marker}, ""},
			{tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "s"}, ""},
			{tar.Header{Name: "h"}, "changed"},
		}
	}),
	unpacking("a whiteout that leads up", func(w *target) []entry {
		return []entry{{tar.Header{Name: strings.Repeat("../", 12) + filepath.Dir(w.marker)[1:] + "/.wh.marker"}, ""}}
	}),
	unpacking("a device", func(*target) []entry {
		return []entry{{tar.Header{Name: "mem", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1}, ""}}
	}),
	unpacking("attributes of the overlay", func(*target) []entry {
		return []entry{{tar.Header{Name: "d/", Typeflag: tar.TypeDir, PAXRecords: map[string]string{
			"SCHILY.xattr.trusted.overlay.redirect": "/etc", "SCHILY.xattr.user.overlay.redirect": "/etc",
		}}, ""}}
	}),
	unpacking("/dev and /proc of links", func(*target) []entry { // CVE-2025-31133, 2025-52565
		return []entry{
			{tar.Header{Name: "dev/null", Typeflag: tar.TypeSymlink, Linkname: "/proc/sys/kernel/core_pattern"}, ""},
			{tar.Header{Name: "dev/console", Typeflag: tar.TypeSymlink, Linkname: "/proc/sysrq-trigger"}, ""},
			{tar.Header{Name: "proc", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, ""},
		}
	}),
	{
		name: "an archive: an endless one", wall: "an archive has a size, and its tar an end", held: words{"refused"}, daemon: confined,
		ask: func(t *testing.T, w *target) string {
			// A tar whose only file says that it has 1 TiB, and a gzip of it that ends early.
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			tw := tar.NewWriter(z)
			must(t, tw.WriteHeader(&tar.Header{Name: "big", Size: 1 << 40, Mode: 0o644}))
			_, err := z.Write(make([]byte, 8<<20))
			must(t, err)
			must(t, z.Close())
			return judged(t, w, w.image(t, b.Bytes()))
		},
	},
	{
		name: "an archive: none", wall: "what is no archive is refused", held: words{"refused"}, daemon: confined,
		ask: func(t *testing.T, w *target) string {
			return judged(t, w, w.image(t, bytes.Repeat([]byte("garbage"), 1<<16)))
		},
	},
}

type entry struct {
	head    tar.Header
	content string
}

// unpacking sends an image of these files.
func unpacking(name string, of func(w *target) []entry) attack {
	return attack{
		name: "an archive: " + name, wall: "names are checked, the child has no other root", held: words{"refused", "clean"},
		daemon: confined,
		ask: func(t *testing.T, w *target) string {
			var b bytes.Buffer
			tw := tar.NewWriter(&b)
			for _, e := range of(w) {
				e.head.Size = int64(len(e.content))
				if e.head.Mode == 0 {
					e.head.Mode = 0o755
				}
				must(t, tw.WriteHeader(&e.head))
				_, err := io.WriteString(tw, e.content)
				must(t, err)
			}
			must(t, tw.Close())
			return judged(t, w, w.image(t, b.Bytes()))
		},
	}
}

// judged is "refused", or "clean" if the archive was taken and the host is as it was.
func judged(t *testing.T, w *target, a answer) string {
	t.Helper()
	if word := unchanged(t, w, a.body); word != "unchanged" {
		return word
	}
	switch {
	case a.status >= 500 || a.status == 0:
		return a.word() + " " + a.body
	case a.status >= 400 || strings.Contains(a.body, `"code"`): // an import that has begun tells of its failure in its stream
		return "refused"
	}
	return "clean"
}

// unchanged is "unchanged" if the files of the host are as they were, else "ok".
func unchanged(t *testing.T, w *target, said string) string {
	t.Helper()
	b, err := os.ReadFile(w.marker)
	if err != nil || string(b) != secret {
		t.Logf("%.200s", said)
		return "ok"
	}
	names, err := os.ReadDir(w.dir)
	must(t, err)
	if len(names) != 2 {
		return "ok"
	}
	return "unchanged"
}

// uploadOf is a file for a sandbox.
func uploadOf(path string) client.Upload {
	const content = "changed"
	return client.Upload{
		Path: path, Mode: 644, Size: int64(len(content)),
		Open: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(content)), nil },
	}
}
