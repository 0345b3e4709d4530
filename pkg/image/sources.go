package image

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// AptSources returns the sources of a suite, its updates and its security suite from a
// host's /etc/apt, as lines of sources.list(5). It leaves out other repositories of the
// host: an image holds only what its recipe names, from Debian.
func AptSources(etc fs.FS, suite string) (string, error) {
	var files []string
	for _, pattern := range []string{"sources.list", "sources.list.d/*.list", "sources.list.d/*.sources"} {
		found, err := fs.Glob(etc, pattern)
		if err != nil {
			return "", err
		}
		files = append(files, found...)
	}
	var lines []string
	for _, name := range files {
		f, err := etc.Open(name)
		if err != nil {
			return "", fmt.Errorf("read apt sources: %w", err)
		}
		parse := parseList
		if strings.HasSuffix(name, ".sources") {
			parse = parseDeb822
		}
		got, err := parse(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return "", fmt.Errorf("read apt sources %s: %w", name, err)
		}
		for _, src := range got {
			if src.fits(suite) && !slices.Contains(lines, src.line()) {
				lines = append(lines, src.line())
			}
		}
	}
	if len(lines) == 0 {
		return "", errs.New(errs.Unsupported, "the apt sources of this host lack component main of suite %q: add it, or choose "+
			"another suite", suite)
	}
	return strings.Join(lines, "\n") + "\n", nil
}

// source is one suite of one repository.
type source struct {
	options    string // "signed-by=… trusted=…"
	uri, suite string
	components []string
}

func (s source) fits(suite string) bool {
	return (s.suite == suite || s.suite == suite+"-updates" || s.suite == suite+"-security") && slices.Contains(s.components, "main")
}

func (s source) line() string {
	o := ""
	if s.options != "" {
		o = " [" + s.options + "]"
	}
	return "deb" + o + " " + s.uri + " " + s.suite + " " + strings.Join(s.components, " ")
}

// parseList reads the one-line style of sources.list(5).
func parseList(r io.Reader) (list []source, err error) {
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		line, _, _ := strings.Cut(sc.Text(), "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb ")
		if !ok {
			continue
		}
		var s source
		rest = strings.TrimSpace(rest)
		if o, after, ok := strings.Cut(strings.TrimPrefix(rest, "["), "]"); ok && strings.HasPrefix(rest, "[") {
			s.options, rest = strings.Join(strings.Fields(o), " "), after
		}
		f := strings.Fields(rest)
		if len(f) < 3 {
			continue
		}
		s.uri, s.suite, s.components = f[0], f[1], f[2:]
		list = append(list, s)
	}
	return list, sc.Err()
}

// parseDeb822 reads the stanzas of a .sources file.
func parseDeb822(r io.Reader) (list []source, err error) {
	fields, last := map[string]string{}, ""
	flush := func() {
		list = append(list, expand(fields)...)
		fields, last = map[string]string{}, ""
	}
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		line := sc.Text()
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			fields[last] += "\n" + strings.TrimSpace(line)
		default:
			k, v, _ := strings.Cut(line, ":")
			last = strings.ToLower(strings.TrimSpace(k))
			fields[last] = strings.TrimSpace(v)
		}
	}
	flush()
	return list, sc.Err()
}

// expand makes a source of each URI and suite of a stanza.
func expand(f map[string]string) (list []source) {
	if strings.EqualFold(f["enabled"], "no") || !slices.Contains(strings.Fields(f["types"]), "deb") {
		return nil
	}
	var options []string
	for _, o := range [][2]string{
		{"signed-by", "signed-by"},
		{"trusted", "trusted"},
		{"architectures", "arch"},
		{"check-valid-until", "check-valid-until"},
	} {
		v := strings.Join(strings.Fields(f[o[0]]), ",")
		// A key given in full has no one-line form; then mmdebstrap searches the host's
		// keyrings for one that fits.
		if v == "" || o[0] == "signed-by" && !strings.HasPrefix(v, "/") {
			continue
		}
		options = append(options, o[1]+"="+v)
	}
	for _, uri := range strings.Fields(f["uris"]) {
		for _, suite := range strings.Fields(f["suites"]) {
			list = append(list, source{strings.Join(options, " "), uri, suite, strings.Fields(f["components"])})
		}
	}
	return list
}
