package vault

import (
	"crypto/rand"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// Create reads the vault of an API client: CredentialVaultCreateRequest of
// api/opensandbox/egress.yaml. Both arrays may be missing. Errors are errs.Invalid. Beside name and
// source, a credential may have env (Credential.Env), which that document does not have.
func Create(data []byte) (*Vault, error) { return create(data, false) }

// CreateTrusted is Create for the administrator of the host, whose credentials may also come
// from files and commands:
//
//	{"type": "file", "path": "/etc/…", "cacheSeconds": 60}
//	{"type": "command", "argv": ["/usr/bin/…", "…"], "cacheSeconds": 60}
//
// cacheSeconds is from 0 to 86400 and may be missing.
func CreateTrusted(data []byte) (*Vault, error) { return create(data, true) }

func create(data []byte, trusted bool) (*Vault, error) {
	var credentials []*Credential
	var bindings []*Binding
	err := read(data, func(r *reader) fields {
		return fields{
			"credentials": r.credentials(&credentials, trusted),
			"bindings":    r.bindings(&bindings),
		}
	})
	if err != nil {
		return nil, err
	}
	v := &Vault{0, map[string]*Credential{}, map[string]*Binding{}}
	return v.changed(change{credentials: mutation[*Credential]{add: credentials}, bindings: mutation[*Binding]{add: bindings}}, trusted)
}

// credentials reads an array of credentials into p.
func (r *reader) credentials(p *[]*Credential, trusted bool) func(at string) error {
	return func(at string) error {
		return r.array(at, MaxCredentials, func(at string) error {
			c := &Credential{Placeholder: newPlaceholder()}
			mentions := false
			if _, err := r.object(at, fields{
				"name": r.text(&c.Name), "source": r.source(&c.Source, trusted),
				"env": r.said(&c.Env, &mentions),
			}); err != nil {
				return err
			}
			c.keepsEnv = !mentions
			if err := checkEnv(at, c.Env); err != nil {
				return err
			}
			if c.Source.Type == "" {
				return invalid(at, "it has no source; want {name, source: {type: \"inline\", value}}")
			}
			*p = append(*p, c)
			return checkName(at, c.Name)
		})
	}
}

// PlaceholderPrefix is how the placeholder of a credential begins. After it come 26 characters of
// base32 (RFC 4648), as crypto/rand.Text draws them: 130 bits.
const PlaceholderPrefix = "sbxph_"

func newPlaceholder() string { return PlaceholderPrefix + rand.Text() }

// source reads a source into s. The type may be missing, as in a dict that the Python SDK takes:
// then it is inline.
func (r *reader) source(s *Source, trusted bool) func(at string) error {
	return func(at string) error {
		var kind, value string
		var seconds int64
		var cached bool
		present, err := r.object(at, fields{
			"type": r.text(&kind), "value": r.text(&value), "path": r.text(&s.Path),
			"argv": r.texts(&s.Argv, maxArgs), "cacheSeconds": r.number(&seconds, &cached),
		})
		if err != nil || !present {
			return err
		}
		s.Type, s.Value = SourceType(kind), NewSecret(value)
		switch {
		case kind == "":
			s.Type = Inline
		case !slices.Contains([]SourceType{Inline, File, Command}, s.Type):
			return invalid(at, "its type is unknown; want inline")
		case s.Type != Inline && !trusted:
			return invalid(at, "only the administrator of the host may take a credential from a file or a command; want "+
				"{type: \"inline\", value}")
		}
		if s.Type != Inline {
			s.Cache = DefaultCache
			if cached && (seconds < 0 || seconds > int64(MaxCache/time.Second)) {
				return invalid(at, "cacheSeconds is from 0 to %d", MaxCache/time.Second)
			}
			if cached {
				s.Cache = time.Duration(seconds) * time.Second
			}
		} else if cached {
			return invalid(at, "an inline value has no cacheSeconds")
		}
		return s.check(at)
	}
}

// bindings reads an array of bindings into p.
func (r *reader) bindings(p *[]*Binding) func(at string) error {
	return func(at string) error {
		return r.array(at, MaxBindings, func(at string) error {
			b := &Binding{}
			if _, err := r.object(at, fields{"name": r.text(&b.Name), "match": r.match(&b.Match), "auth": r.auth(&b.Auth)}); err != nil {
				return err
			}
			switch {
			case b.Match.Hosts == nil:
				return invalid(at, "it has no match; want match: {hosts: [\"api.example.com\"]}")
			case b.Auth.Type == "":
				return invalid(at, "it has no auth; want auth: {type, …}")
			}
			*p = append(*p, b)
			if err := checkName(at, b.Name); err != nil {
				return err
			}
			return b.compile(at)
		})
	}
}

// match reads a match into m, in normal form, with defaults for what is missing or empty.
func (r *reader) match(m *Match) func(at string) error {
	return func(at string) error {
		var ports []int64
		present, err := r.object(at, fields{
			"schemes": r.texts(&m.Schemes, maxSchemes), "hosts": r.texts(&m.Hosts, MaxHosts), "methods": r.texts(&m.Methods, MaxMethods),
			"paths": r.texts(&m.Paths, MaxPaths),
			"ports": func(at string) error {
				return r.array(at, maxSchemes, func(at string) error {
					var n int64
					var set bool
					if err := r.number(&n, &set)(at); err != nil {
						return err
					}
					ports = append(ports, n)
					return nil
				})
			},
		})
		if err != nil || !present {
			return err
		}
		if err := m.normalize(at); err != nil {
			return err
		}
		for _, port := range ports {
			if port != 80 && port != 443 { // these are taken and mean nothing, as in OpenSandbox: the scheme says the port
				return invalid(at+".ports", "port %d is neither 443, that of https, nor 80, that of http; leave ports out", port)
			}
		}
		return nil
	}
}

// maxSchemes is a bound for arrays that can have two elements that differ.
const maxSchemes = 8

// normalize brings m into the form that Match describes.
func (m *Match) normalize(at string) error {
	defaults(&m.Schemes, "https")
	defaults(&m.Methods, http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete)
	defaults(&m.Paths, "/*")
	if len(m.Hosts) == 0 {
		return invalid(at, "it has no hosts; want hosts: [\"api.example.com\"]")
	}
	for i, s := range m.Schemes {
		if m.Schemes[i] = strings.ToLower(s); m.Schemes[i] != "https" && m.Schemes[i] != "http" {
			return invalid(at+".schemes", "%q is neither https nor http", short(s))
		}
	}
	for i, host := range m.Hosts {
		name, err := policy.NormalName(host)
		if err != nil || !strings.Contains(strings.TrimPrefix(name, "*."), ".") {
			return invalid(at+".hosts", "%q is no full name of a host; write api.example.com, or *.example.com for all names below it, "+
				"without scheme, port or address", short(host))
		}
		m.Hosts[i] = name
	}
	for i, method := range m.Methods {
		m.Methods[i] = strings.ToUpper(method)
		if !isToken(method) || strings.Contains(method, "*") || Forbidden(m.Methods[i]) {
			return invalid(at+".methods", "%q is no method that a binding may have; write GET, or leave methods out for GET, POST, PUT, "+
				"PATCH and DELETE", short(method))
		}
	}
	for _, list := range []*[]string{&m.Schemes, &m.Hosts, &m.Methods, &m.Paths} {
		*list = unique(*list)
	}
	return nil
}

// Forbidden reports whether a method may not be sent to a host that a binding is for: TRACE and
// TRACK, whose answer is the request with its credentials, and CONNECT, behind which no request
// can be seen.
func Forbidden(method string) bool {
	return slices.Contains([]string{http.MethodTrace, "TRACK", http.MethodConnect}, strings.ToUpper(method))
}

func defaults(p *[]string, values ...string) {
	if len(*p) == 0 {
		*p = values
	}
}

// unique is list without later duplicates.
func unique(list []string) []string {
	var out []string
	for _, s := range list {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// auth reads an auth into a.
func (r *reader) auth(a *Auth) func(at string) error {
	return func(at string) error {
		var kind, credential, name string
		var headers []Header
		present, err := r.object(at, fields{
			"type": r.text(&kind), "credential": r.text(&credential), "name": r.text(&name),
			"headers": func(at string) error {
				return r.array(at, MaxHeaders, func(at string) error {
					var h Header
					_, err := r.object(at, fields{"name": r.text(&h.Name), "credential": r.text(&h.Credential)})
					headers = append(headers, h)
					return err
				})
			},
			"substitutions": func(at string) error {
				return r.array(at, MaxSubstitutions, func(at string) error {
					var s Substitution
					var in []string
					_, err := r.object(at, fields{
						"credential": r.text(&s.Credential), "placeholder": r.text(&s.Placeholder), "in": r.texts(&in, 16),
					})
					for _, place := range unique(in) {
						s.In = append(s.In, Place(place))
					}
					a.Substitutions = append(a.Substitutions, s)
					return err
				})
			},
		})
		if err != nil || !present {
			return err
		}
		a.Type = AuthType(kind)
		has := [3]bool{credential != "", name != "", headers != nil}
		var want [3]bool
		switch a.Type {
		case Bearer, Basic:
			want[0], a.Headers = true, []Header{{"Authorization", credential}}
		case APIKey:
			want[0], want[1], a.Headers = true, true, []Header{{name, credential}}
		case CustomHeaders:
			want[2], a.Headers = true, headers
		case Passthrough:
		default:
			return invalid(at, "its type is none of bearer, basic, apiKey, customHeaders and passthrough")
		}
		for i, field := range [3]string{"credential", "name", "headers"} {
			if has[i] && !want[i] {
				return invalid(at, "type %s has no %s", kind, field)
			} else if want[i] && !has[i] {
				return invalid(at, "type %s wants %s", kind, field)
			}
		}
		return a.normalize(at)
	}
}
