package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const module = "github.com/sandboxd/sandboxd/"

// A job is one unit of work of a lane.
type job struct {
	name    string   // "test/e2e TestStop"
	pkg     string   // import path, of a test program
	convert string   // the program that turns its output into events
	argv    []string // a test program, or `go test -json`, or a script
	dir     string
	env     []string
	script  bool
	lane    bool   // it runs in a lane, not on the real host
	alone   bool   // it measures time
	after   string // the job that must end before
	cost    int    // about how many seconds it takes
	image   string // the large image that it imports
}

// apart are the packages in which each test is a job of its own. Each subtest
// that is named here is a job, too.
var apart = map[string]map[string][]string{
	"test/e2e": {
		"TestStories":          {"runc", "runsc"},
		"TestKillAtEveryStep":  {"runc", "runsc"},
		"TestErrorAtEveryStep": {"runc", "runsc"},
		"TestKillInRecovery":   {"runc", "runsc"},
		"TestVolumes":          {"runc", "runsc"},
	},
	"test/attacks": {
		"TestAttacks": {"runc", "runsc", "api"},
	},
	"test/compat": {
		"TestQuickstarts": {"runc", "runsc"},
	},
	"test/documents": {},
	"test/vm": {
		"TestStory": strings.Fields(allStories),
	},
}

// The stories of whole machines (test/vm): those of a push, and all. STORY@SUITE is one on another
// Debian than scripts/test-vm.sh takes by itself.
const (
	pushStories = "service"
	allStories  = "service power reboot limits neighbours clock pools packages bundle upgrade deploy year arm64 " +
		"reboot@trixie packages@trixie bundle@trixie upgrade@trixie deploy@trixie"
)

// costs are the seconds that long jobs take on a machine with two cores. The longest jobs
// begin first. A wrong estimate costs time and nothing else.
var costs = map[string]int{
	"test/fixtures":                         1000,
	"lint":                                  900,
	"unit":                                  890,
	"test/vm TestStory/service":             1100,
	"test/offline":                          1800,
	"test/vm TestStory/neighbours":          700,
	"test/vm TestStory/pools":               1300,
	"test/vm TestStory/reboot":              500,
	"test/vm TestStory/reboot@trixie":       600,
	"test/vm TestStory/limits":              450,
	"test/vm TestStory/power":               440,
	"test/vm TestStory/clock":               240,
	"test/vm TestStory/packages":            600,
	"test/vm TestStory/packages@trixie":     600,
	"test/vm TestStory/upgrade":             900,
	"test/vm TestStory/upgrade@trixie":      900,
	"test/vm TestStory/year":                3600,
	"test/vm TestStory/arm64":               1200,
	"test/vm TestStory/bundle":              900,
	"test/vm TestStory/bundle@trixie":       900,
	"test/vm TestStory/deploy":              1500,
	"test/vm TestStory/deploy@trixie":       1800,
	"test/year":                             150,
	"test/e2e TestStories/runsc":            180,
	"pkg/image":                             370,
	"pkg/snapshot":                          400,
	"pkg/sandbox":                           60,
	"test/packages":                         60,
	"test/compat TestQuickstarts/runsc":     100,
	"test/compat TestQuickstarts/runc":      100,
	"test/compat TestJudges":                140,
	"test/compat TestDocuments":             130,
	"test/compat TestPythonCodeInterpreter": 110,
	"test/e2e TestStories/runc":             90,
	"test/e2e TestKillAtEveryStep/runsc":    100,
	"test/e2e TestVault":                    30,
	"test/e2e TestInspected":                60,
	"pkg/egress":                            120,
	"test/attacks TestProofs":               60,
	"pkg/cgroups":                           60,
}

// images are the jobs that import an image which takes as long as a short job. A lane keeps
// what was imported into its instance, so jobs with one image run in one lane as long as
// other lanes have something else to do.
var images = map[string]string{
	"test/compat TestJudges":                "code-interpreter",
	"test/compat TestPythonCodeInterpreter": "code-interpreter",
	"test/compat TestQuickstarts/runc":      "code-interpreter",
	"test/compat TestQuickstarts/runsc":     "code-interpreter",
	"test/e2e TestStories/runc":             "code-interpreter",
	"test/e2e TestStories/runsc":            "code-interpreter",
}

// onHost are jobs that need the real host's network.
var onHost = map[string]bool{
	"test/fixtures":                 true, // downloads
	"test/offline":                  true, // downloads Go modules
	"pkg/image":                     true, // builds an image of Debian packages
	"test/documents TestQuickstart": true, // it tries what a user does on a host
}

func init() {
	for _, story := range strings.Fields(allStories) {
		onHost["test/vm TestStory/"+story] = true // makes a machine's disk of Debian packages
	}
}

// alone are jobs that compare times; other jobs at the same time would change them.
var alone = map[string]bool{
	"test/e2e TestChangeVersionHundred": true,
}

// fixtures is the job that fills the cache with images and official clients, for the jobs
// of `apart`.
const fixtures = "test/fixtures"

// A pkg is a package with tests.
type pkg struct {
	ImportPath, Dir           string
	TestGoFiles, XTestGoFiles []string
	TestImports, XTestImports []string
}

func (p pkg) name() string { return strings.TrimPrefix(p.ImportPath, module) }

// plan compiles the test programs and returns the jobs that run them.
func plan(top string, all, race bool, only, part string) ([]*job, error) {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return nil, err
	}
	tags, stories := "seccomp,vm", pushStories
	if all {
		tags, stories = tags+",all", allStories
	}
	packages, err := list(top, tags)
	if err != nil {
		return nil, err
	}
	jobs, programs, err := arrange(top, tags, stories, packages)
	if err != nil {
		return nil, err
	}
	if part != "" {
		if jobs, err = partOf(jobs, part); err != nil {
			return nil, err
		}
	}
	jobs = slices.DeleteFunc(jobs, func(j *job) bool { return !wanted.MatchString(j.name) })
	if len(jobs) == 0 {
		return nil, fmt.Errorf("no job has a name that matches %q", only)
	}
	return jobs, compile(top, tags, race, programs)
}

// arrange cuts the tests of packages into jobs. It also returns the packages whose
// test programs the jobs run.
func arrange(top, tags, stories string, packages []pkg) (jobs []*job, programs []string, err error) {
	unit := &job{
		name: "unit", dir: top,
		// lint vets the tests, too. What is compiled with -trimpath serves every checkout.
		argv: []string{
			"go", "test", "-race", "-json", "-count=1", "-vet=off", "-trimpath", "-timeout=40m",
			"-tags", strings.Replace(tags, ",vm", "", 1),
		},
	}
	jobs = []*job{unit, {name: "lint", dir: top, argv: []string{"scripts/lint.sh"}, script: true}}
	for _, p := range packages {
		if _, ok := apart[p.name()]; !ok {
			unit.argv = append(unit.argv, p.ImportPath)
		}
		tests, others, err := rootTests(p)
		if err != nil {
			return nil, nil, err
		}
		if len(tests) == 0 {
			continue
		}
		programs = append(programs, p.ImportPath)
		jobs = append(jobs, split(top, stories, p, tests, others)...)
	}
	for _, j := range jobs {
		j.cost, j.alone, j.image = costs[j.name], alone[j.name], images[j.name]
		j.lane = j.lane && !onHost[j.name]
	}
	return jobs, programs, nil
}

// list returns the packages that have tests.
func list(top, tags string) (all []pkg, err error) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,TestGoFiles,XTestGoFiles", "-tags", tags, "./...")
	cmd.Dir, cmd.Stderr = top, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	for from := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := from.Decode(&p); err == io.EOF {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		if len(p.TestGoFiles)+len(p.XTestGoFiles) > 0 {
			all = append(all, p)
		}
	}
}

// split makes the jobs of a package's root tests. In a package of `apart`, the tests that
// need no root are one job.
func split(top, stories string, p pkg, tests, others []string) (jobs []*job) {
	limit := "40m" // a job that takes longer hangs
	if p.name() == "test/vm" {
		limit = "80m"
	}
	program := func(name, run, skip string) *job {
		j := &job{
			name: name, pkg: p.ImportPath, dir: p.Dir, lane: true, convert: filepath.Join(top, "build", "tools", "test2json"),
			argv: []string{
				filepath.Join(top, "build", "test-bin", filepath.Base(p.ImportPath)+".test"), "-test.v=test2json",
				"-test.timeout=" + limit, "-test.run=" + run,
			},
			env: []string{"SANDBOXD_TEST=root", "SANDBOXD_BIN=" + filepath.Join(top, "build", "bin")},
		}
		if skip != "" {
			j.argv = append(j.argv, "-test.skip="+skip)
		}
		return j
	}
	subtests, ok := apart[p.name()]
	if !ok {
		return []*job{program(p.name(), "^("+strings.Join(tests, "|")+")$", "")}
	}
	if len(others) > 0 {
		jobs = append(jobs, program(p.name(), "^("+strings.Join(others, "|")+")$", ""))
	}
	for _, test := range tests {
		name, run := p.name()+" "+test, "^"+test+"$"
		rest := ""
		if named := subtests[test]; named != nil {
			for _, sub := range named {
				if p.name() == "test/vm" && !slices.Contains(strings.Fields(stories), sub) {
					continue
				}
				jobs = append(jobs, program(name+"/"+sub, run+"/^"+sub+"$", ""))
			}
			rest = run + "/^(" + strings.Join(named, "|") + ")$"
		}
		jobs = append(jobs, program(name, run, rest))
	}
	for _, j := range jobs {
		j.after = fixtures
		j.env = append(j.env, "STORIES="+stories)
	}
	return jobs
}

// compile builds the test programs of packages, and test2json, which reads their output. With race, those below
// test/ have the race detector. In others it does not work: internal/confine starts itself in an empty root.
func compile(top, tags string, race bool, packages []string) error {
	test := []string{"go", "test", "-c", "-trimpath", "-tags", tags, "-o", filepath.Join("build", "test-bin") + "/"}
	detects := func(p string) bool { return race && strings.HasPrefix(p, module+"test/") }
	commands := [][]string{
		{"go", "build", "-trimpath", "-o", filepath.Join("build", "tools", "test2json"), "cmd/test2json"},
		slices.Concat(test, slices.DeleteFunc(slices.Clone(packages), detects)),
	}
	if race {
		others := slices.DeleteFunc(slices.Clone(packages), func(p string) bool { return !detects(p) })
		commands = append(commands, slices.Concat(test, []string{"-race"}, others))
	}
	for _, argv := range commands {
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir = top
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
		}
	}
	return nil
}
