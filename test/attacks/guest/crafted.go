package main

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// spoof sends a datagram with a foreign source address: SOURCE DESTINATION:PORT.
func spoof(args []string) (string, error) {
	to := netip.MustParseAddrPort(args[1])
	udp := binary.BigEndian.AppendUint16([]byte{0x80, 0}, to.Port())
	return "", sendRaw(netip.MustParseAddr(args[0]), to.Addr(), unix.IPPROTO_UDP, append(udp, 0, 8, 0, 0)) // 0: without a checksum
}

// bare sends a segment of TCP that belongs to no connection, with the flag ACK alone:
// DESTINATION:PORT.
func bare(args []string) (string, error) {
	to := netip.MustParseAddrPort(args[0])
	from := netip.MustParseAddr(ownAddress())
	tcp := binary.BigEndian.AppendUint16([]byte{0x80, 0}, to.Port())
	tcp = append(tcp, 0, 0, 0, 1, 0, 0, 0, 1, 5<<4, 1<<4, 0x10, 0, 0, 0, 0, 0)
	pseudo := append(append(from.AsSlice(), to.Addr().AsSlice()...), 0, unix.IPPROTO_TCP, 0, byte(len(tcp)))
	binary.BigEndian.PutUint16(tcp[16:], checksum(append(pseudo, tcp...)))
	return "", sendRaw(from, to.Addr(), unix.IPPROTO_TCP, tcp)
}

// checksum is that of RFC 1071, of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// sendRaw sends a packet whose header it writes itself: raw(7). The kernel writes the length
// and the checksum of that header.
func sendRaw(from, to netip.Addr, proto byte, body []byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ip := []byte{4<<4 | 5, 0, 0, 0, 0, 0, 0, 0, 64, proto, 0, 0}
	ip = append(append(ip, from.AsSlice()...), to.AsSlice()...)
	return unix.Sendto(fd, append(ip, body...), 0, &unix.SockaddrInet4{Addr: to.As4()})
}

// arp says to the other end of the link that this sandbox has an address: ADDRESS.
func arp(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	link, err := net.InterfaceByName("eth0")
	if err != nil {
		return "", err
	}
	mac, all := []byte(link.HardwareAddr), []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	ip := netip.MustParseAddr(args[0]).AsSlice()
	frame := append(append(append([]byte{}, all...), mac...), 0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 2) // an answer of RFC 826
	frame = append(append(append(frame, mac...), ip...), all...)
	to := &unix.SockaddrLinklayer{Ifindex: link.Index, Halen: 6, Addr: [8]byte(append(all, 0, 0))}
	return "", unix.Sendto(fd, append(frame, ip...), 0, to)
}
