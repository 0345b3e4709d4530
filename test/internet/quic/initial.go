// Package quic makes and reads the first packet of a connection by QUIC: an Initial packet
// of version 1 (RFC 9000, section 17.2.2) with a ClientHello. Its keys follow from what
// stands in it (RFC 9001, section 5.2), so whoever sees the packet can read the name.
package quic

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	size    = 1200 // of the datagram, at least (RFC 9000, section 14.1)
	idSize  = 8    // of the connection's ID
	numSize = 4    // of the packet's number
	start   = 1 + 4 + 1 + idSize + 1 + 1 + 2
	tag     = 16 // of AES-GCM
)

var salt = []byte{
	0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8, 0x0c, 0xad, 0xcc, 0xbb, 0x7f, 0x0a,
}

// Initial is the first packet of a client that asks for a name.
func Initial(name string) ([]byte, error) {
	hello, err := clientHello(name)
	if err != nil {
		return nil, err
	}
	p := make([]byte, start+numSize, size)
	p[0], p[4], p[5] = 0xc0|numSize-1, 1, idSize
	if _, err := rand.Read(p[6 : 6+idSize]); err != nil {
		return nil, err
	}
	binary.BigEndian.PutUint16(p[start-2:], 0x4000|(size-start)) // a number of two bytes (section 16)
	body := make([]byte, size-start-numSize-tag)                 // zeros are padding (section 19.1)
	body[0] = 6                                                  // a frame CRYPTO from the beginning (section 19.6)
	binary.BigEndian.PutUint16(body[2:], 0x4000|uint16(len(hello)))
	if copy(body[4:], hello) < len(hello) {
		return nil, fmt.Errorf("a ClientHello of %d bytes takes two packets", len(hello))
	}
	key, iv, mask, err := keys(p[6 : 6+idSize])
	if err != nil {
		return nil, err
	}
	p = key.Seal(p, iv, body, p) // the number is 0
	hide(mask, p)
	return p, nil
}

// Name is the name that a packet of Initial asks for.
func Name(p []byte) (string, error) {
	p = bytes.Clone(p)
	if len(p) != size || p[0]&0xf0 != 0xc0 || !bytes.Equal(p[1:6], []byte{0, 0, 0, 1, idSize}) {
		return "", errors.New("not the first packet of QUIC")
	}
	key, iv, mask, err := keys(p[6 : 6+idSize])
	if err != nil {
		return "", err
	}
	hide(mask, p)
	body, err := key.Open(nil, iv, p[start+numSize:], p[:start+numSize])
	if err != nil {
		return "", err
	}
	n := int(binary.BigEndian.Uint16(body[2:])) & 0x3fff
	if body[0] != 6 || body[1] != 0 || n > len(body)-4 {
		return "", errors.New("it does not begin with a ClientHello")
	}
	name, errSeen := "", errors.New("seen")
	q := tls.QUICServer(&tls.QUICConfig{TLSConfig: &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			name = h.ServerName
			return nil, errSeen
		},
	}})
	defer q.Close() //nolint:errcheck // it is not used
	if err := q.Start(context.Background()); err != nil {
		return "", err
	}
	if err := q.HandleData(tls.QUICEncryptionLevelInitial, body[4:4+n]); !errors.Is(err, errSeen) {
		return "", err
	}
	return name, nil
}

// clientHello is what a client of TLS sends by QUIC.
func clientHello(name string) ([]byte, error) {
	q := tls.QUICClient(&tls.QUICConfig{TLSConfig: &tls.Config{
		ServerName: name, MinVersion: tls.VersionTLS13, NextProtos: []string{"h3"}, CurvePreferences: []tls.CurveID{tls.X25519},
	}})
	defer q.Close() //nolint:errcheck // it is not used
	q.SetTransportParameters([]byte{1, 0})
	if err := q.Start(context.Background()); err != nil {
		return nil, err
	}
	for e := q.NextEvent(); e.Kind != tls.QUICNoEvent; e = q.NextEvent() {
		if e.Kind == tls.QUICWriteData {
			return bytes.Clone(e.Data), nil
		}
	}
	return nil, errors.New("crypto/tls makes no ClientHello")
}

// keys are those of the client's first packets: for the body, and for what hides the number.
func keys(id []byte) (key cipher.AEAD, iv []byte, mask cipher.Block, err error) {
	secret, err := hkdf.Extract(sha256.New, id, salt)
	expand := func(secret []byte, label string, n int) (out []byte) {
		if err != nil {
			return make([]byte, n)
		}
		label = "tls13 " + label
		info := string([]byte{0, byte(n), byte(len(label))}) + label + "\x00"
		out, err = hkdf.Expand(sha256.New, secret, info, n)
		return out
	}
	client := expand(secret, "client in", sha256.Size)
	k, iv, m := expand(client, "quic key", 16), expand(client, "quic iv", 12), expand(client, "quic hp", 16)
	if err != nil {
		return nil, nil, nil, err
	}
	block, err := aes.NewCipher(k)
	if err != nil {
		return nil, nil, nil, err
	}
	if key, err = cipher.NewGCM(block); err != nil {
		return nil, nil, nil, err
	}
	mask, err = aes.NewCipher(m)
	return key, iv, mask, err
}

// hide hides the packet's number, and shows it again (RFC 9001, section 5.4).
func hide(mask cipher.Block, p []byte) {
	m := make([]byte, aes.BlockSize)
	mask.Encrypt(m, p[start+4:start+4+aes.BlockSize])
	p[0] ^= m[0] & 0xf
	for i := range numSize {
		p[start+i] ^= m[1+i]
	}
}
