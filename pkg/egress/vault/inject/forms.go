package inject

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net/url"
	"slices"
	"strings"
)

// minEcho is the length of the shortest value that is searched for in answers, in bytes: a
// shorter one stands in them by chance.
const minEcho = 8

// echoes are the forms in which a value is searched for in answers: as it is, percent-encoded with
// large and small letters, as in a JSON string (also with < > & or / escaped), and in base64 and
// base64url at each of the three places that it may have in a longer text that is encoded. Of a
// value that is base64 of user:password, as for basic, also that pair and the password. Forms that are the same
// are one needle.
func echoes(credential, value string) (all []needle) {
	texts := []string{value}
	if plain, err := base64.StdEncoding.DecodeString(value); err == nil {
		if _, password, ok := strings.Cut(string(plain), ":"); ok {
			texts = append(texts, string(plain), password)
		}
	}
	for _, text := range texts {
		if len(text) < minEcho {
			continue
		}
		forms := []string{text, jsonEscape(text, true), jsonEscape(text, false), strings.ReplaceAll(jsonEscape(text, false), "/", `\/`)}
		for _, form := range []string{escapeAll(text), url.QueryEscape(text), url.PathEscape(text)} {
			forms = append(forms, form, lowerHex(form))
		}
		for before := range 3 {
			for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
				forms = append(forms, base64At(enc, text, before))
			}
		}
		for _, form := range forms {
			if !slices.ContainsFunc(all, func(n needle) bool { return string(n.text) == form }) {
				all = append(all, needle{[]byte(form), credential})
			}
		}
	}
	return all
}

// base64At is the part of the base64 of a text, of which text is a part with before bytes (modulo
// three) before it, that depends on no byte but those of text.
func base64At(enc *base64.Encoding, text string, before int) string {
	all := enc.EncodeToString(append(make([]byte, before), text...))
	return all[(before*8+5)/6 : (before+len(text))*8/6]
}

// jsonEscape is text as it stands in a JSON string. With html, as encoding/json and others write
// it to be safe in a page: < > & as escapes.
func jsonEscape(text string, html bool) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(html)
	if e.Encode(text) != nil {
		return text // a string can be encoded
	}
	return strings.TrimSuffix(strings.TrimPrefix(strings.TrimSuffix(b.String(), "\n"), `"`), `"`)
}

// escapeAll is text with all bytes percent-encoded that are not unreserved (RFC 3986, section
// 2.3). As a part of a path or a query it ends neither a segment nor a parameter.
func escapeAll(text string) string { return strings.ReplaceAll(url.QueryEscape(text), "+", "%20") }

// An encoding is how a value, or a placeholder, is written in a part of a request.
type encoding func(string) string

func asItIs(s string) string { return s }

func inJSON(s string) string { return jsonEscape(s, false) }

// lowerHex is a text with its percent-encodings in small letters, which mean the same.
func lowerHex(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:i+3], bytes.ToLower(b[i+1:i+3]))
		}
	}
	return string(b)
}

// needlesOf are the forms in which a guest may write a placeholder where a value is written as
// by enc.
func needlesOf(credential, placeholder string, enc encoding) (all []needle) {
	forms := []string{placeholder}
	if escaped := enc(placeholder); escaped != placeholder {
		forms = append(forms, escaped, lowerHex(escaped))
	}
	forms = append(forms, jsonEscape(placeholder, true)) // as many clients write < > & in JSON
	for _, form := range forms {
		if !slices.ContainsFunc(all, func(n needle) bool { return string(n.text) == form }) {
			all = append(all, needle{[]byte(form), credential})
		}
	}
	return all
}
