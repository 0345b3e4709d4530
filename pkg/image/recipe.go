package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Recipe is a recipe.toml; rootfs/README.md describes the keys for authors.
type Recipe struct {
	Suite    string   `toml:"suite"`    // default: the host's
	Variant  string   `toml:"variant"`  // default: minbase
	Packages []string `toml:"packages"` // installed without recommended packages
	Exclude  []string `toml:"exclude"`  // dpkg path-exclude
	Include  []string `toml:"include"`  // dpkg path-include
	Hooks    []string `toml:"hooks"`    // shell, on the host, $1 is the root
	Env      []string `toml:"env"`
	Workdir  string   `toml:"workdir"`
	User     string   `toml:"user"`
	// Versions are the programs whose version the image tells, each with the package that
	// has the version. That of the distribution is told in any case.
	Versions map[string]string `toml:"versions"`
}

var (
	recipeForm  = regexp.MustCompile(`^[a-z0-9]+(?:[._-][a-z0-9]+)*$`)
	packageForm = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]*(?::[a-z0-9]+)?$`) // Debian policy §5.6.7
	wordForm    = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)
)

// Recipes returns the names of the recipes of this host.
func (s *Store) Recipes() ([]string, error) {
	found, err := filepath.Glob(filepath.Join(s.cfg.RecipesDir, "*", "recipe.toml"))
	if err != nil {
		return nil, fmt.Errorf("list recipes: %w", err)
	}
	var names []string
	for _, p := range found {
		names = append(names, filepath.Base(filepath.Dir(p)))
	}
	return names, nil
}

// recipe reads the recipe of a name. It fails with errs.Invalid or errs.NotFound.
func (s *Store) recipe(name string) (Recipe, error) {
	var r Recipe
	if !recipeForm.MatchString(name) {
		return r, errs.New(errs.Invalid, "recipe %.80q: want a name of lower-case letters, digits, '.', '_' and '-'", name)
	}
	file := filepath.Join(s.cfg.RecipesDir, name, "recipe.toml")
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		names, _ := s.Recipes()
		return r, errs.Wrap(err, errs.NotFound, "no recipe %q; this host has: %s", name, strings.Join(names, ", "))
	}
	if err != nil {
		return r, errs.New(errs.Internal, "recipe %s: %v", name, err)
	}
	defer f.Close()
	err = toml.NewDecoder(f).DisallowUnknownFields().Decode(&r)
	if strict, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		return r, errs.New(errs.Invalid, "recipe %s: unknown key:\n%s", name, strict.String())
	}
	if bad, ok := errors.AsType[*toml.DecodeError](err); ok {
		return r, errs.New(errs.Invalid, "recipe %s:\n%s", name, bad.String())
	}
	if err != nil {
		return r, errs.New(errs.Invalid, "recipe %s: %v", name, err)
	}
	if r.Variant == "" {
		r.Variant = "minbase"
	}
	if r.User == "" {
		r.User = "root"
	}
	if r.Workdir == "" {
		r.Workdir = "/"
	}
	if err := r.check(); err != nil {
		return r, errs.New(errs.Invalid, "recipe %s: %v", name, err)
	}
	return r, nil
}

// check reports everything that is wrong with a recipe.
func (r *Recipe) check() error {
	var all []error
	bad := func(format string, args ...any) { all = append(all, fmt.Errorf(format, args...)) }
	if r.Suite != "" && !wordForm.MatchString(r.Suite) {
		bad("suite %q is not a valid suite name", r.Suite)
	}
	if !wordForm.MatchString(r.Variant) {
		bad("variant %q is not a valid variant name", r.Variant)
	}
	for _, p := range r.Packages {
		if !packageForm.MatchString(p) {
			bad("%q is not a valid package name", p)
		}
	}
	for program, p := range r.Versions {
		if !recipeForm.MatchString(program) || !slices.Contains(r.Packages, p) {
			bad("versions: want PROGRAM = PACKAGE, a package of packages; got %q = %q", program, p)
		}
	}
	for _, p := range append(slices.Clone(r.Exclude), r.Include...) {
		if !strings.HasPrefix(p, "/") || strings.ContainsAny(p, "\n'") {
			bad("%q is not an absolute path", p)
		}
	}
	for _, e := range r.Env {
		if k, _, ok := strings.Cut(e, "="); !ok || !record.IsVariable(k) || strings.ContainsRune(e, 0) {
			bad("env %q is not KEY=VALUE", e)
		}
	}
	if !path.IsAbs(r.Workdir) || path.Clean(r.Workdir) != r.Workdir {
		bad("workdir %q is not a clean absolute path", r.Workdir)
	}
	return errors.Join(all...)
}

func (r *Recipe) config() record.ImageConfig {
	return record.ImageConfig{Env: r.Env, Workdir: r.Workdir, User: r.User}
}

// hostSuite is the Debian suite of the host.
func hostSuite() (string, error) {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			return strings.Trim(v, `"'`), nil
		}
	}
	return "", errs.New(errs.Unsupported, "/etc/os-release has no VERSION_CODENAME: set suite = \"…\" in the recipe")
}
