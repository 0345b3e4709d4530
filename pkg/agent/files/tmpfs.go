package files

import (
	"bytes"
	"os"

	"golang.org/x/sys/unix"
)

// TmpfsUsed is what the files in all tmpfs hold, in bytes: memory that belongs to no
// process, but counts for the limit.
func TmpfsUsed() (sum int64) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return 0
	}
	seen := map[uint64]bool{} // one may be mounted in many places
	for line := range bytes.Lines(mounts) {
		f := bytes.Fields(line)
		if len(f) < 3 || string(f[2]) != "tmpfs" {
			continue
		}
		path := unescape(f[1])
		var st unix.Stat_t
		var fs unix.Statfs_t
		if unix.Stat(path, &st) != nil || seen[st.Dev] || unix.Statfs(path, &fs) != nil {
			continue
		}
		seen[st.Dev] = true
		if fs.Type == unix.TMPFS_MAGIC && fs.Blocks > fs.Bfree { // not what is mounted over it
			sum += int64(fs.Blocks-fs.Bfree) * fs.Bsize
		}
	}
	return sum
}

// unescape undoes what the kernel does to spaces, tabs, newlines and backslashes
// (seq_file's mangle_path).
func unescape(b []byte) string {
	out := make([]byte, 0, len(b))
	for i := 0; i < len(b); i++ {
		if b[i] == '\\' && i+3 < len(b) {
			out = append(out, (b[i+1]-'0')<<6|(b[i+2]-'0')<<3|(b[i+3]-'0'))
			i += 3
			continue
		}
		out = append(out, b[i])
	}
	return string(out)
}
