// Package tartest helps targets of fuzzing that read tars.
package tartest

import (
	"archive/tar"
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

const block = 512

// Sum is a copy of a tar in which each header has the checksum of its bytes. Without it a
// fuzzer that changes one byte of a header has changed the checksum alone: no reader looks at
// the rest.
func Sum(b []byte) []byte {
	b = bytes.Clone(b)
	for at := 0; at+block <= len(b); {
		h := b[at : at+block]
		at += block
		if bytes.Count(h, []byte{0}) == block {
			continue // the end, but readers may go on
		}
		copy(h[148:156], "        ") // the checksum counts itself as spaces
		sum := 0
		for _, c := range h {
			sum += int(c)
		}
		copy(h[148:156], fmt.Sprintf("%06o\x00 ", sum))
		switch h[156] {
		case tar.TypeLink, tar.TypeSymlink, tar.TypeChar, tar.TypeBlock, tar.TypeDir, tar.TypeFifo:
			continue // has no content, whatever its size says
		}
		size, err := strconv.ParseInt(strings.Trim(string(h[124:136]), " \x00"), 8, 64)
		if err == nil && size > 0 {
			at += int(min(size, int64(len(b)))+block-1) &^ (block - 1)
		}
	}
	return b
}
