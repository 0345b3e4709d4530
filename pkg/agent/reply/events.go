package reply

import (
	"strconv"
	"unicode/utf8"
)

// appendText appends an event with a text and the blank line after it.
func appendText(dst []byte, typ string, text []byte, now int64) []byte {
	dst = append(dst, `{"type":"`...)
	dst = append(dst, typ...)
	dst = append(dst, `","text":`...)
	dst = appendQuoted(dst, text)
	dst = append(dst, `,"timestamp":`...)
	dst = strconv.AppendInt(dst, now, 10)
	return append(dst, "}\n\n"...)
}

// appendQuoted appends b as a JSON string; what is not UTF-8 becomes U+FFFD.
// encoding/json wants a string, an allocation and a second copy for that, and
// this is where every byte of output passes.
func appendQuoted(dst, b []byte) []byte {
	const hexDigits = "0123456789abcdef"
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(b); {
		c := b[i]
		if c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' {
			i++
			continue
		}
		if c < utf8.RuneSelf {
			dst = append(dst, b[start:i]...)
			switch c {
			case '"', '\\':
				dst = append(dst, '\\', c)
			case '\n':
				dst = append(dst, '\\', 'n')
			case '\r':
				dst = append(dst, '\\', 'r')
			case '\t':
				dst = append(dst, '\\', 't')
			default:
				dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
			}
			i++
			start = i
			continue
		}
		r, n := utf8.DecodeRune(b[i:])
		// U+0085, U+2028 and U+2029 end a line in JavaScript or in line readers such as
		// Python's str.splitlines, with which the SDK for code splits streams.
		if r == utf8.RuneError && n == 1 || r == '\u0085' || r == '\u2028' || r == '\u2029' {
			dst = append(dst, b[start:i]...)
			dst = append(dst, '\\', 'u', hexDigits[r>>12], hexDigits[r>>8&15], hexDigits[r>>4&15], hexDigits[r&15])
			i += n
			start = i
			continue
		}
		i += n
	}
	return append(append(dst, b[start:]...), '"')
}
