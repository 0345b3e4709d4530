package archtest

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// groups are the kinds of changes, as https://keepachangelog.com/en/1.1.0/ has them.
var groups = []string{"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}

var (
	// sectionHead matches the heading of a release: "## [1.2.3] - 2026-11-27".
	sectionHead = regexp.MustCompile(`^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2})( \[YANKED\])?)?$`)
	// versionForm is a version of semver.org without metadata, which no release has.
	versionForm = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?$`)
)

// changelogFaults says what is wrong with a changelog. tags are the tags of releases, "v1.2.3".
func changelogFaults(text string, tags []string) (faults []string) {
	bad := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	lines := strings.Split(text, "\n")
	if lines[0] != "# Changelog" {
		bad("line 1 is not %q", "# Changelog")
	}
	for _, reference := range []string{"https://keepachangelog.com/en/1.1.0/", "https://semver.org/spec/v2.0.0.html"} {
		if !strings.Contains(text, reference) {
			bad("it does not name %s", reference)
		}
	}
	var versions, dates []string
	seen, entries := map[string]bool{}, 1 // of the section; entries of the group
	section := ""
	for i, l := range lines {
		number := i + 1
		switch {
		case strings.HasPrefix(l, "## "):
			m := sectionHead.FindStringSubmatch(l)
			if m == nil {
				bad("line %d: %q is no heading of a release: want ## [1.2.3] - 2026-11-27", number, l)
				continue
			}
			if entries == 0 {
				bad("line %d: the group before has no entry", number)
			}
			section, seen, entries = m[1], map[string]bool{}, 1
			if section == "Unreleased" {
				if len(versions) > 0 || m[2] != "" {
					bad("line %d: Unreleased is the first section and has no date", number)
				}
				versions, dates = append(versions, section), append(dates, "9999-99-99")
				continue
			}
			if !versionForm.MatchString(section) {
				bad("line %d: %q is no version of a release", number, section)
			}
			if _, err := time.Parse(time.DateOnly, m[2]); err != nil {
				bad("line %d: release %s has no date as 2026-11-27", number, section)
			}
			versions, dates = append(versions, section), append(dates, m[2])
		case strings.HasPrefix(l, "### "):
			name := strings.TrimPrefix(l, "### ")
			if section == "" || !slices.Contains(groups, name) || seen[name] {
				bad("line %d: %q: a release has each of %q at most once", number, name, groups)
			}
			if entries == 0 {
				bad("line %d: the group before has no entry", number)
			}
			seen[name], entries = true, 0
		case strings.HasPrefix(l, "- "):
			if len(seen) == 0 {
				bad("line %d: an entry stands in no group", number)
			}
			entries++
		}
	}
	if entries == 0 {
		bad("the last group has no entry")
	}
	if len(versions) == 0 || versions[0] != "Unreleased" {
		bad("there is no section Unreleased at the top")
	}
	return append(faults, orderFaults(versions, dates, tags)...)
}

// orderFaults says what is wrong with the versions of a changelog as a list.
func orderFaults(versions, dates, tags []string) (faults []string) {
	for i, v := range versions {
		if i > 1 && compareVersions(versions[i-1], v) <= 0 {
			faults = append(faults, fmt.Sprintf("%s stands above %s, the newest is the first", versions[i-1], v))
		}
		if i > 0 && dates[i-1] < dates[i] {
			faults = append(faults, fmt.Sprintf("%s is of %s, after %s", v, dates[i], versions[i-1]))
		}
	}
	for _, tag := range tags {
		v := strings.TrimPrefix(tag, "v")
		if versionForm.MatchString(v) && !slices.Contains(versions, v) {
			faults = append(faults, fmt.Sprintf("the tag %s has no section [%s]: rename Unreleased before the tag is set", tag, v))
		}
	}
	return faults
}

// compareVersions compares two versions of releases in the order of semver.org, section 11.
func compareVersions(a, b string) int {
	x, y := versionForm.FindStringSubmatch(a), versionForm.FindStringSubmatch(b)
	if x == nil || y == nil {
		return 1 // said elsewhere
	}
	for i := 1; i <= 3; i++ {
		if c := compareWords(x[i], y[i]); c != 0 {
			return c
		}
	}
	switch {
	case x[4] == y[4]:
		return 0
	case x[4] == "":
		return 1
	case y[4] == "":
		return -1
	}
	return slices.CompareFunc(strings.Split(x[4], "."), strings.Split(y[4], "."), compareWords)
}

// compareWords compares numbers as numbers; they come before words.
func compareWords(a, b string) int {
	m, errA := strconv.Atoi(a)
	n, errB := strconv.Atoi(b)
	switch {
	case errA == nil && errB == nil:
		return m - n
	case errA == nil:
		return -1
	case errB == nil:
		return 1
	}
	return strings.Compare(a, b)
}

// TestChangelog holds that CHANGELOG.md has the form of keepachangelog.com, and a section for
// each tag of a release that this checkout knows.
func TestChangelog(t *testing.T) {
	text, err := os.ReadFile("../../CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	var tags []string
	if _, err := os.Stat("../../.git"); err == nil { // not in an archive of the source
		out, err := exec.Command("git", "-C", "../..", "tag", "--list", "v[0-9]*", "--merged", "HEAD").Output()
		if err != nil {
			t.Fatalf("git tag: %v", err)
		}
		tags = strings.Fields(string(out))
	}
	for _, f := range changelogFaults(string(text), tags) {
		t.Errorf("CHANGELOG.md: %s", f)
	}
}

// TestChangelogIsChecked holds that changelogFaults finds each fault.
func TestChangelogIsChecked(t *testing.T) {
	const head = "# Changelog\nhttps://keepachangelog.com/en/1.1.0/ https://semver.org/spec/v2.0.0.html\n## [Unreleased]\n"
	const good = "## [1.10.0] - 2027-02-01\n### Added\n- x\n### Fixed\n- y\n## [1.9.0-rc.2] - 2027-01-01\n### Security\n- z\n"
	for text, want := range map[string]string{
		head:                                  "",
		head + good:                           "",
		head + "### Added\n- x\n  y\n" + good: "",
		strings.Replace(head, "# Changelog", "# Changes", 1):  "line 1",
		strings.Replace(head, "1.1.0", "1.0.0", 1):            "does not name https://keepachangelog.com/en/1.1.0/",
		strings.Replace(head, "## [Unreleased]", "", 1):       "no section Unreleased",
		head + good + "## [Unreleased]\n":                     "Unreleased is the first section",
		head + "## 1.0.0 - 2027-01-01\n":                      "no heading of a release",
		head + "## [1.0.0]\n":                                 "no date",
		head + "## [1.0.0] - 2027-02-30\n":                    "no date",
		head + "## [v1.0.0] - 2027-02-01\n":                   "no version of a release",
		head + "### Improved\n- x\n":                          "at most once",
		head + "### Added\n- x\n### Added\n- y\n":             "at most once",
		head + "### Added\n### Fixed\n- y\n":                  "no entry",
		head + "### Added\n":                                  "the last group has no entry",
		head + "- x\n":                                        "in no group",
		head + "## [1.9.0] - 2027-02-01\n" + good:             "1.9.0 stands above 1.10.0",
		head + "## [1.11.0] - 2027-01-01\n" + good:            "1.10.0 is of 2027-02-01, after 1.11.0",
		head + good + "## [1.9.0] - 2027-01-01\n":             "1.9.0-rc.2 stands above 1.9.0",
		head + good + "## [1.9.0-rc.10] - 2026-12-31\n":       "1.9.0-rc.2 stands above 1.9.0-rc.10",
		head + good + "## [1.9.0-rc.1] - 2026-12-31\n":        "",
		head + good + "## [1.9.0-beta] - 2026-12-31 [YANKED]": "",
	} {
		got := strings.Join(changelogFaults(text, nil), "; ")
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s\nfaults %q, want %q", text, got, want)
		}
	}
	got := changelogFaults(head+good, []string{"v1.10.0", "v1.9.0-rc.2", "v1.8.0", "vault"})
	if len(got) != 1 || !strings.Contains(got[0], "tag v1.8.0") {
		t.Errorf("tags: %q", got)
	}
}
