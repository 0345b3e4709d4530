package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/appliance"
	"github.com/sandboxd/sandboxd/internal/bundle"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/internal/release"
	"github.com/sandboxd/sandboxd/pkg/image"
)

// bundleKey is the public key that a host trusts.
const bundleKey = "/etc/sandboxd/bundle.pub"

func bundleCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bundle",
		Short: "Make and check bundles: one signed file with all that a host without a network needs",
		Example: `  sandboxd bundle create -o sandboxd-1.2.0.bundle --key sandboxd.key --image base.tar
  sandboxd bundle verify sandboxd-1.2.0.bundle`,
	}
	cmd.AddCommand(bundleCreateCommand(), bundleVerifyCommand(), bundleShowCommand(), bundleDiffCommand(), bundleInstallCommand())
	return cmd
}

// inputs are the flags of bundle create.
type inputs struct {
	out, key, password, verifier, arch, version, commit string
	debian, aptSources                                  string
	packages, images, files, sboms                      []string
}

func bundleCreateCommand() *cobra.Command {
	var in inputs
	cmd := &cobra.Command{
		Use:   "create -o FILE --key SECRETKEY",
		Short: "Make a bundle of packages, images and files, and sign it",
		Long: `Make a bundle and sign it with a secret key of minisign ("minisign -G" makes one). The environment
variable SOURCE_DATE_EPOCH (seconds since 1970) is the time that the bundle notes. Equal inputs
make equal bytes.

A package is a .deb or .rpm; its name says name, version and architecture. An image is an archive
that "sandboxctl image import" reads. --file takes any other file, or a directory with all files
below it. All four flags can be given several times. Each name in the bundle must be unique.

--debian adds all packages of Debian that the given ones need, down to libc6, for hosts of that
suite: apt fetches them from the sources of this host, and checks their signatures. Of these, a host
gets those that it needs and has not. --apt-sources names a file with other sources
(sources.list(5)), for a suite that this host does not use.

The bundle begins with a script and a program that checks and installs it; the program is this
one, or what --verifier names. It must be linked statically.`,
		Example: `  export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
  sandboxd bundle create -o sandboxd-1.2.0.bundle --key sandboxd.key \
    --package sandboxd_1.2.0_amd64.deb --image base.tar --file documents=docs --sbom sbom.json`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVarP(&in.out, "output", "o", "", "file to write")
	f.StringVar(&in.key, "key", "", "file with the secret key")
	f.StringVar(&in.password, "password-file", "", "file with the password of the secret key (default: ask)")
	f.StringArrayVar(&in.packages, "package", nil, "a .deb or .rpm")
	f.StringArrayVar(&in.images, "image", nil, "archive of an image")
	f.StringArrayVar(&in.files, "file", nil, "another file or directory, as NAME=PATH")
	f.StringArrayVar(&in.sboms, "sbom", nil, "bill of materials: CycloneDX, in JSON")
	f.StringVar(&in.debian, "debian", "", "suite of Debian, such as bookworm, whose packages are added where the given ones need them")
	f.StringVar(&in.aptSources, "apt-sources", "", "file with the sources for --debian (default: those of this host)")
	f.StringVar(&in.verifier, "verifier", "", "program sandboxd that checks the bundle (default: this program)")
	f.StringVar(&in.arch, "arch", runtime.GOARCH, "architecture that the bundle is for: amd64 or arm64")
	f.StringVar(&in.version, "release", release.Version(), "version of sandboxd that the bundle has")
	f.StringVar(&in.commit, "commit", "", "commit that it was built from")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if in.out == "" || in.key == "" {
			return usageError{errors.New("bundle create: want -o FILE and --key SECRETKEY; see sandboxd bundle create --help")}
		}
		plan, err := in.plan()
		if err == nil && in.debian != "" {
			var fetched string
			if fetched, err = os.MkdirTemp("", "sandboxd-bundle"); err == nil {
				defer os.RemoveAll(fetched)
				err = in.fetch(cmd.Context(), &plan, fetched, cmd.ErrOrStderr())
			}
		}
		if err != nil {
			return fmt.Errorf("bundle create: %w", err)
		}
		if err := bundle.Create(cmd.Context(), in.out, plan); err != nil {
			return fmt.Errorf("bundle create: %w", err)
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), in.out)
		return err
	}
	return cmd
}

func (in inputs) plan() (p bundle.Plan, err error) {
	seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil || seconds < 0 {
		return p, usageError{fmt.Errorf("SOURCE_DATE_EPOCH is %q: set it to the seconds since 1970 that the bundle shall note, "+
			"for example to $(git log -1 --format=%%ct)", os.Getenv("SOURCE_DATE_EPOCH"))}
	}
	p.Manifest = bundle.Manifest{
		Version: in.version, Commit: in.commit, OS: "linux", Architecture: in.arch, Created: time.Unix(seconds, 0),
	}
	if p.Verifier = in.verifier; p.Verifier == "" {
		if p.Verifier, err = os.Executable(); err != nil {
			return p, err
		}
	}
	if p.Sources, err = in.sources(); err != nil {
		return p, err
	}
	p.Key, err = bundle.ReadSecretKey(in.key, in.ask)
	return p, err
}

// fetch adds what the packages need of Debian.
func (in inputs) fetch(ctx context.Context, p *bundle.Plan, dir string, out io.Writer) error {
	w := appliance.Wish{Arch: in.arch, Dir: dir, Out: out}
	for _, f := range in.packages {
		if filepath.Ext(f) == ".deb" {
			w.Packages = append(w.Packages, f)
		}
	}
	if len(w.Packages) == 0 {
		return usageError{errors.New("bundle create: --debian needs a .deb whose dependencies it adds, by --package")}
	}
	sources, err := image.AptSources(os.DirFS("/etc/apt"), in.debian)
	if in.aptSources != "" {
		var b []byte
		b, err = os.ReadFile(in.aptSources)
		sources = string(b)
	}
	if err != nil {
		return fmt.Errorf("%w; --apt-sources names a file with the sources of %s", err, in.debian)
	}
	w.Sources = sources
	files, err := appliance.Fetch(ctx, w)
	if err != nil {
		return fmt.Errorf("fetch packages of %s: %w", in.debian, err)
	}
	given := map[string]bool{}
	for _, s := range p.Sources {
		given[s.Package] = true
	}
	for _, file := range files {
		s, err := bundle.Packaged(file, in.arch)
		if err != nil {
			return err
		}
		if s.IfNeeded = true; !given[s.Package] {
			p.Sources = append(p.Sources, s)
		}
	}
	return nil
}

// ask returns the password of the secret key.
func (in inputs) ask() (string, error) {
	if in.password != "" {
		b, err := os.ReadFile(in.password)
		return strings.TrimRight(string(b), "\r\n"), err
	}
	stdin := int(os.Stdin.Fd())
	if !term.IsTerminal(stdin) {
		return "", usageError{fmt.Errorf("the secret key %s is encrypted, and there is no terminal to ask for its password: "+
			"use --password-file", in.key)}
	}
	fmt.Fprintf(os.Stderr, "Password of %s: ", in.key)
	b, err := term.ReadPassword(stdin)
	fmt.Fprintln(os.Stderr)
	return string(b), err
}

func (in inputs) sources() (all []bundle.Source, err error) {
	for _, file := range in.packages {
		s, err := bundle.Packaged(file, in.arch)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	add := func(kind, name, file string) {
		all = append(all, bundle.Source{Member: bundle.Member{Name: name, Kind: kind}, Path: file})
	}
	for _, file := range in.images {
		add(bundle.Image, "images/"+filepath.Base(file), file)
	}
	for _, file := range in.sboms {
		add(bundle.SBOM, "sbom/"+filepath.Base(file), file)
	}
	for _, f := range in.files {
		name, file, ok := strings.Cut(f, "=")
		if !ok || name == "" || file == "" {
			return nil, usageError{fmt.Errorf("--file %q: want NAME=PATH, where NAME is the name in the bundle", f)}
		}
		err := filepath.WalkDir(file, func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			below, err := filepath.Rel(file, p)
			add(bundle.File, path.Join(name, filepath.ToSlash(below)), p)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// bundleFlags adds the flags of a command that reads bundles.
func bundleFlags(cmd *cobra.Command) (keys *[]string, format *string) {
	keys = keyFlag(cmd)
	format = cmd.Flags().StringP("output", "o", "table", "output format: table or json")
	return keys, format
}

func keyFlag(cmd *cobra.Command) *[]string {
	return cmd.Flags().StringArray("key", []string{bundleKey}, "public key of minisign that is trusted, or a file with one")
}

func knownFormat(format string) error {
	if format != "table" && format != "json" {
		return usageError{fmt.Errorf("--output %q: want table or json", format)}
	}
	return nil
}

func readKeys(given []string) (keys []bundle.Key, err error) {
	for _, one := range given {
		k, err := bundle.ReadKey(one)
		if err != nil {
			return nil, err
		}
		keys = append(keys, k)
	}
	return keys, nil
}

func openBundle(ctx context.Context, file string, given []string) (*bundle.Bundle, error) {
	keys, err := readKeys(given)
	if err != nil {
		return nil, err
	}
	return bundle.Open(ctx, file, keys)
}

func bundleVerifyCommand() *cobra.Command {
	var (
		force              bool
		installed, extract string
	)
	cmd := &cobra.Command{
		Use:   "verify FILE",
		Short: "Check the signature of a bundle, all that is in it, and that it is for this host",
		Long: `Check that a trusted key signed the bundle, that it is for this host and not older than the
installed sandboxd, and each file in it. The exit status is 1 if the bundle may not be used.
Without --extract nothing is written. docs/design/appliance.md says how to check the signature
with minisign instead.`,
		Example: `  sandboxd bundle verify sandboxd-1.2.0.bundle
  sandboxd bundle verify sandboxd-1.2.0.bundle --key bundle.pub --extract unpacked`,
		Args: cobra.ExactArgs(1),
	}
	keys, format := bundleFlags(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "accept a version older than the installed one")
	cmd.Flags().StringVar(&installed, "installed", release.Version(), "version that is installed here; empty for none")
	cmd.Flags().StringVar(&extract, "extract", "", "new directory to write the files of the bundle to")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := knownFormat(*format); err != nil {
			return err
		}
		b, err := openBundle(cmd.Context(), args[0], *keys)
		if err != nil {
			return fmt.Errorf("bundle verify: %w", err)
		}
		defer b.Close()
		err = b.For(bundle.Host{OS: runtime.GOOS, Architecture: runtime.GOARCH, Installed: installed, Force: force})
		switch {
		case err != nil:
		case extract == "":
			err = b.Check(cmd.Context())
		default:
			err = b.Extract(cmd.Context(), extract, func(bundle.Member) bool { return true })
		}
		if err != nil {
			return fmt.Errorf("bundle verify: %w", err)
		}
		if *format == "json" {
			return text.JSON(cmd.OutOrStdout(), about(b))
		}
		return summary(cmd.OutOrStdout(), b)
	}
	return cmd
}

func bundleShowCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show FILE",
		Short: "Print what a bundle holds, after checking its signature",
		Long: `Print what a bundle holds. The signature is checked, and not whether the bundle is for this host.
The form of the JSON is stable.`,
		Example: `  sandboxd bundle show sandboxd-1.2.0.bundle
  sandboxd bundle show sandboxd-1.2.0.bundle --key bundle.pub -o json`,
		Args: cobra.ExactArgs(1),
	}
	keys, format := bundleFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := knownFormat(*format); err != nil {
			return err
		}
		b, err := openBundle(cmd.Context(), args[0], *keys)
		if err != nil {
			return fmt.Errorf("bundle show: %w", err)
		}
		defer b.Close()
		if *format == "json" {
			return text.JSON(cmd.OutOrStdout(), about(b))
		}
		if err := summary(cmd.OutOrStdout(), b); err != nil {
			return err
		}
		var rows [][]string
		for _, m := range b.Members {
			rows = append(rows, []string{m.Kind, m.Name, cmp.Or(m.Version, "-"), text.Bytes(m.Size), m.Mode, m.SHA256[:12]})
		}
		fmt.Fprintln(cmd.OutOrStdout())
		return text.Table(cmd.OutOrStdout(), []string{"KIND", "NAME", "VERSION", "SIZE", "MODE", "SHA256"}, rows)
	}
	return cmd
}

// shown is a bundle in JSON.
type shown struct {
	bundle.Manifest
	Key     string `json:"key"` // ID of the key that signed it
	Comment string `json:"trusted_comment"`
	Bytes   int64  `json:"bytes"`
}

func about(b *bundle.Bundle) shown {
	return shown{Manifest: b.Manifest, Key: b.Key.ID(), Comment: b.Comment, Bytes: b.Bytes}
}

func summary(w io.Writer, b *bundle.Bundle) error {
	var size int64
	for _, m := range b.Members {
		size += m.Size
	}
	rows := [][]string{
		{"version:", b.Version},
		{"commit:", cmp.Or(b.Commit, "-")},
		{"for:", b.OS + "/" + b.Architecture},
		{"created:", b.Created.Format(time.RFC3339)},
		{"signed by:", b.Key.ID() + " (" + b.Key.From + ")"},
		{"size:", text.Bytes(b.Bytes)},
		{"files:", fmt.Sprintf("%d, %s unpacked", len(b.Members), text.Bytes(size))},
	}
	for _, r := range rows {
		if _, err := fmt.Fprintf(w, "%-10s %s\n", r[0], r[1]); err != nil {
			return err
		}
	}
	return nil
}

func bundleDiffCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "diff OLD NEW",
		Short: "Print which packages, images and files differ between two bundles",
		Long: `Print which packages, images and files were added, removed or changed from the bundle OLD to the
bundle NEW. If both have bills of materials, print the versions of what is in programs and images,
too. The signatures of both are checked. The form of the JSON is stable.`,
		Example: `  sandboxd bundle diff sandboxd-1.1.0.bundle sandboxd-1.2.0.bundle`,
		Args:    cobra.ExactArgs(2),
	}
	keys, format := bundleFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := knownFormat(*format); err != nil {
			return err
		}
		var both []*bundle.Bundle
		for _, file := range args {
			b, err := openBundle(cmd.Context(), file, *keys)
			if err != nil {
				return fmt.Errorf("bundle diff: %w", err)
			}
			defer b.Close()
			both = append(both, b)
		}
		d := difference{both[0].Version, both[1].Version, bundle.Diff(&both[0].Manifest, &both[1].Manifest), nil}
		if both[0].Has(bundle.SBOM) && both[1].Has(bundle.SBOM) {
			old, err := both[0].Inventory(cmd.Context())
			if err != nil {
				return fmt.Errorf("bundle diff: %w", err)
			}
			next, err := both[1].Inventory(cmd.Context())
			if err != nil {
				return fmt.Errorf("bundle diff: %w", err)
			}
			d.Components = bundle.DiffParts(old, next)
		}
		if *format == "json" {
			return text.JSON(cmd.OutOrStdout(), d)
		}
		return d.print(cmd.OutOrStdout())
	}
	return cmd
}

// difference is what bundle diff prints.
type difference struct {
	Old        string              `json:"old_version"`
	New        string              `json:"new_version"`
	Changes    []bundle.Change     `json:"changes"`
	Components []bundle.PartChange `json:"components"` // null if a bundle has no bill of materials
}

func (d difference) print(w io.Writer) error {
	fmt.Fprintf(w, "sandboxd %s to %s\n", d.Old, d.New)
	var rows [][]string
	for _, c := range d.Changes {
		rows = append(rows, []string{
			c.Change, c.Kind, c.Name, state(c.Old, memberVersion), state(c.New, memberVersion),
			state(c.Old, memberSize), state(c.New, memberSize),
		})
	}
	err := text.Table(w, []string{"CHANGE", "KIND", "NAME", "OLD", "NEW", "OLD SIZE", "NEW SIZE"}, rows)
	if err != nil || d.Components == nil {
		return err
	}
	rows = nil
	for _, c := range d.Components {
		rows = append(rows, []string{
			c.Change, cmp.Or(c.In, "-"), c.Name, cmp.Or(strings.Join(c.Old, " "), "-"), cmp.Or(strings.Join(c.New, " "), "-"),
		})
	}
	fmt.Fprintln(w)
	return text.Table(w, []string{"CHANGE", "IN", "COMPONENT", "OLD", "NEW"}, rows)
}

func memberVersion(m bundle.Member) string { return cmp.Or(m.Version, m.SHA256[:12]) }
func memberSize(m bundle.Member) string    { return text.Bytes(m.Size) }

// state is what a side of a difference shows; "-" if it has no such member.
func state(m *bundle.Member, of func(bundle.Member) string) string {
	if m == nil {
		return "-"
	}
	return of(*m)
}
