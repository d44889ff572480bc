package sys

import (
	"encoding/binary"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Captured is a packet that an interface received or sent.
type Captured struct {
	Time  time.Time
	Wire  int    // its length, of which fewer bytes may be kept
	Data  []byte // from the IP header on; valid until the next call
	Frame Frame
}

// Frame is what the link says of a packet (packet(7)).
type Frame struct {
	EtherType uint16
	Interface uint32
	Hardware  uint16 // of the interface: ARPHRD_ETHER
	Kind      uint8  // PACKET_HOST, PACKET_OUTGOING
	Length    uint8  // of Address
	Address   [8]byte
}

// Outgoing reports whether this node sent the packet.
func (f Frame) Outgoing() bool { return f.Kind == unix.PACKET_OUTGOING }

// Sniffer receives the packets of all interfaces of a network namespace. It is not safe
// for concurrent use.
type Sniffer struct {
	fd   int
	data []byte
	oob  []byte
}

// NewSniffer opens a Sniffer that keeps the first snap bytes of each packet. It needs
// CAP_NET_RAW.
func NewSniffer(snap int) (*Sniffer, error) {
	fd, e := socket(unix.AF_PACKET, unix.SOCK_DGRAM, 0) // nothing comes until it is bound
	if e != 0 {
		return nil, fmt.Errorf("packet socket: %w", e)
	}
	const buffer = 32 << 20
	setInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer)
	e = AttachFilter(fd, []FilterOp{{Code: FilterReturn, K: uint32(snap)}})
	for _, option := range []struct{ level, name int }{{unix.SOL_SOCKET, unix.SO_TIMESTAMPNS}, {unix.SOL_PACKET, unix.PACKET_AUXDATA}} {
		if e == 0 {
			e = setInt(fd, option.level, option.name, 1)
		}
	}
	var err error
	if e != 0 {
		err = e
	} else {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL)})
	}
	if err != nil {
		Close(fd)
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	return &Sniffer{fd: fd, data: make([]byte, snap), oob: make([]byte, unix.CmsgSpace(int(unsafe.Sizeof(unix.Timespec{})))+unix.CmsgSpace(int(unsafe.Sizeof(auxdata{}))))}, nil
}

func networkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// auxdata is struct tpacket_auxdata.
type auxdata struct {
	status, length, kept      uint32
	mac, net, vlanTCI, vlanID uint16
}

// Next returns the next packet; os.ErrDeadlineExceeded if none comes for patience.
func (s *Sniffer) Next(patience time.Duration) (Captured, error) {
	for {
		n, controlLen, _, from, err := unix.Recvmsg(s.fd, s.data, s.oob, 0)
		switch err {
		case nil:
			return s.captured(n, controlLen, from), nil
		case unix.EINTR, unix.ENETDOWN: // an interface has gone down
		case unix.EAGAIN:
			ready, err := unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
			if err == nil && ready == 0 {
				return Captured{}, os.ErrDeadlineExceeded
			}
			if err != nil && err != unix.EINTR {
				return Captured{}, fmt.Errorf("packet socket: %w", err)
			}
		default:
			return Captured{}, fmt.Errorf("packet socket: %w", err)
		}
	}
}

func (s *Sniffer) captured(n, controlLen int, from unix.Sockaddr) Captured {
	c := Captured{Data: s.data[:n], Wire: n}
	if a, ok := from.(*unix.SockaddrLinklayer); ok {
		c.Frame = Frame{EtherType: networkOrder(a.Protocol), Interface: uint32(a.Ifindex), Hardware: a.Hatype, Kind: a.Pkttype, Length: a.Halen, Address: a.Addr}
	}
	rest := s.oob[:controlLen]
	for len(rest) > 0 {
		header, value, next, err := unix.ParseOneSocketControlMessage(rest)
		if err != nil {
			break
		}
		rest = next
		switch {
		case header.Level == unix.SOL_SOCKET && header.Type == unix.SO_TIMESTAMPNS && len(value) >= int(unsafe.Sizeof(unix.Timespec{})):
			t := (*unix.Timespec)(unsafe.Pointer(&value[0]))
			c.Time = time.Unix(t.Unix())
		case header.Level == unix.SOL_PACKET && header.Type == unix.PACKET_AUXDATA && len(value) >= int(unsafe.Sizeof(auxdata{})):
			c.Wire = int((*auxdata)(unsafe.Pointer(&value[0])).length)
		}
	}
	if c.Time.IsZero() {
		c.Time = time.Now()
	}
	return c
}

// Dropped returns how many packets the kernel dropped since the last call, as they were
// read too slowly.
func (s *Sniffer) Dropped() (int, error) {
	stats, err := unix.GetsockoptTpacketStats(s.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return 0, fmt.Errorf("packet socket: %w", err)
	}
	return int(stats.Drops), nil
}

// Close ends the capture.
func (s *Sniffer) Close() { Close(s.fd) }
