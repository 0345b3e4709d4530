package names

import (
	"slices"

	"github.com/miekg/dns"
)

// served are the types that a guest may ask for. The others can only carry data.
var served = []uint16{
	dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeCNAME, dns.TypeMX, dns.TypeNS, dns.TypeSOA, dns.TypePTR, dns.TypeTXT,
	dns.TypeSRV, dns.TypeCAA, dns.TypeNAPTR, dns.TypeDS, dns.TypeDNSKEY, dns.TypeTLSA, dns.TypeSSHFP,
}

// Served reports whether guests may ask for the type.
func Served(typ uint16) bool { return slices.Contains(served, typ) }

// Text reports whether the type is one that carries any text.
func Text(typ uint16) bool { return typ == dns.TypeTXT }

// TypeName is the name of a type, as in "AAAA".
func TypeName(typ uint16) string { return dns.Type(typ).String() }

// RcodeName is the name of a code of an answer, as in "NXDOMAIN".
func RcodeName(rcode uint8) string { return dns.RcodeToString[int(rcode)] }
