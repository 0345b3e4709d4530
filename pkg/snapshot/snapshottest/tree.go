package snapshottest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// hardLinks are the names in Lower that are one file.
var hardLinks = []string{"/usr/bin/hard", "/usr/bin/plain2"}

// Lower is the tar of a small image: every kind of entry, and files enough for
// inode numbers to meet.
func Lower() []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(name string, typ byte, mode int64, uid, gid int, content string, xattrs map[string]string) {
		h := &tar.Header{
			Name: "./" + name, Typeflag: typ, Mode: mode, Uid: uid, Gid: gid, ModTime: time.Unix(1700000000, 0),
			Format: tar.FormatPAX,
		}
		switch typ {
		case tar.TypeReg:
			h.Size = int64(len(content))
		case tar.TypeSymlink, tar.TypeLink:
			h.Linkname, content = content, ""
		case tar.TypeChar:
			h.Devmajor, h.Devminor = 1, 3
		}
		for k, v := range xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			panic(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			panic(err)
		}
	}
	for _, d := range []string{"", "bin", "dev", "etc", "srv", "usr", "usr/bin", "usr/lib", "usr/lib/dir", "usr/share"} {
		add(d+"/", tar.TypeDir, 0o755, 0, 0, "", nil)
	}
	add("tmp/", tar.TypeDir, 0o1777, 0, 0, "", nil)
	add("dev/null", tar.TypeChar, 0o666, 0, 0, "", nil)
	add("etc/conf", tar.TypeReg, 0o644, 0, 0, "conf\n", nil)
	add("etc/shadow", tar.TypeReg, 0o640, 0, 42, "secret\n", nil)
	add("etc/resolv.conf", tar.TypeSymlink, 0o777, 0, 0, "../run/resolv.conf", nil)
	add("usr/bin/of-33", tar.TypeReg, 0o755, 33, 33, "33", nil)
	add("usr/bin/plain", tar.TypeReg, 0o755, 0, 0, "plain", map[string]string{"user.note": "kept", "trusted.overlay.opaque": "y"})
	add("usr/bin/plain2", tar.TypeReg, 0o755, 0, 0, "plain2", nil)
	add("usr/bin/hard", tar.TypeLink, 0o755, 0, 0, "./usr/bin/plain2", nil)
	add("usr/bin/ping", tar.TypeReg, 0o755, 0, 0, "ping", map[string]string{"security.capability": string(fileCaps())})
	add("usr/bin/su", tar.TypeReg, 0o4755, 0, 0, "su", nil)
	add("usr/bin/wall", tar.TypeReg, 0o2755, 0, 5, "wall", map[string]string{"system.posix_acl_access": string(acl(7))})
	add("usr/bin/link", tar.TypeSymlink, 0o777, 0, 0, "plain", nil)
	add("usr/lib/dir/old", tar.TypeReg, 0o644, 0, 0, "old", nil)
	add("usr/share/goes", tar.TypeReg, 0o644, 0, 0, "goes", nil)
	for i := range 3000 {
		add(fmt.Sprintf("usr/share/lower-%04d", i), tar.TypeReg, 0o644, 0, 0, fmt.Sprint("lower", i), nil)
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// manifest prints one line for each file: what a move must not change.
func manifest(root string, w io.Writer) error {
	return filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		content := ""
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			content = fmt.Sprintf("%x", sha256.Sum256(b))
		case unix.S_IFLNK:
			if content, err = os.Readlink(p); err != nil {
				return err
			}
		}
		x, err := xattrs(p, "trusted.overlay.")
		if oldACLs() {
			x = namedInACL.ReplaceAllString(x, "${1}........")
		}
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "%s %o %d:%d %s %s\n", strings.TrimPrefix(p, strings.TrimSuffix(root, "/")), st.Mode, st.Uid, st.Gid,
			content, x)
		return err
	})
}

// Kernels before 6.2 show those whom an ACL on an overlay of idmapped layers
// names as nobody in a user namespace; what they are on the disk is right.
var (
	oldACLs = sync.OnceValue(func() bool {
		var u unix.Utsname
		var major, minor int
		err := unix.Uname(&u)
		if err == nil {
			_, err = fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
		}
		return err == nil && (major < 6 || major == 6 && minor < 2)
	})
	namedInACL = regexp.MustCompile(`(posix_acl_[a-z]+=02000000(?:[0-9a-f]{16})0200[0-9a-f]{4})[0-9a-f]{8}`)
)

// xattrs prints the extended attributes of a file, but those with a prefix.
func xattrs(p, but string) (string, error) {
	names := make([]byte, 4096)
	n, err := unix.Llistxattr(p, names)
	if err != nil {
		return "", fmt.Errorf("llistxattr %s: %w", p, err)
	}
	var all []string
	for name := range strings.SplitSeq(strings.TrimRight(string(names[:n]), "\x00"), "\x00") {
		if name == "" || but != "" && strings.HasPrefix(name, but) || strings.HasPrefix(name,
			"trusted.SGI_ACL_") { // xfs shows root ACLs twice
			continue
		}
		v := make([]byte, 4096)
		n, err := unix.Lgetxattr(p, name, v)
		if err != nil {
			return "", fmt.Errorf("lgetxattr %s %s: %w", p, name, err)
		}
		all = append(all, fmt.Sprintf("%s=%x", name, v[:n]))
	}
	slices.Sort(all)
	return strings.Join(all, " "), nil
}

// Collisions returns pairs of different files below root that show the same
// device and inode number.
func Collisions(root string) (pairs []string, files int, err error) {
	type key struct{ dev, ino uint64 }
	seen := map[key]string{}
	err = filepath.WalkDir(root, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		files++
		name := strings.TrimPrefix(p, root)
		k := key{st.Dev, st.Ino}
		if other, ok := seen[k]; ok && !(slices.Contains(hardLinks, name) && slices.Contains(hardLinks, other)) {
			pairs = append(pairs, other+" = "+name)
		}
		seen[k] = name
		return nil
	})
	if files == 0 {
		err = errors.Join(err, errors.New("no files"))
	}
	return pairs, files, err
}
