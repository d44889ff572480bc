package tracking

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
)

// Connection is one that goes on, and that was answered: as packets pass netfilter's FORWARD hook.
type Connection struct {
	Protocol       uint8 // TCP or UDP
	Client, Server netip.AddrPort
	Timeout        time.Duration // until the next packet
}

// Numbers of linux/netfilter/nf_conntrack_common.h, nfnetlink_conntrack.h and nf_conntrack_tcp.h.
const (
	newEntry = 1 << 8 // NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_NEW

	answered = 1<<1 | 1<<2 | 1<<3 // IPS_SEEN_REPLY, IPS_ASSURED, IPS_CONFIRMED
	liberal  = 1 << 3             // IP_CT_TCP_FLAG_BE_LIBERAL: its windows are not known

	attributeStatus        = 3 // CTA_STATUS
	attributeFlagsOriginal = 4 // CTA_PROTOINFO_TCP_FLAGS_ORIGINAL
	attributeFlagsReply    = 5 // CTA_PROTOINFO_TCP_FLAGS_REPLY
)

// Know has connection tracking in the calling thread's network namespace know connections, as if it
// had seen them from the start, also those of which it has seen some packets. Needs CAP_NET_ADMIN and the
// module nf_conntrack_netlink.
func Know(connections []Connection) error {
	socket, err := nl.Subscribe(syscall.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("connection tracking by netlink: %w", err)
	}
	defer socket.Close()
	sockets := map[int]*nl.SocketHandle{syscall.NETLINK_NETFILTER: {Socket: socket}}
	for _, c := range connections {
		r := c.request()
		r.Sockets = sockets
		if _, err := r.Execute(syscall.NETLINK_NETFILTER, 0); err != nil && !errors.Is(err, syscall.EBUSY) { // it is just being deleted
			return fmt.Errorf("connection tracking by netlink: %s to %s: %w", c.Client, c.Server, err)
		}
	}
	return nil
}

func (c *Connection) request() *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(newEntry, syscall.NLM_F_CREATE|syscall.NLM_F_ACK)
	family := uint8(syscall.AF_INET)
	if c.Client.Addr().Is6() {
		family = syscall.AF_INET6
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	r.AddData(tuple(nl.CTA_TUPLE_ORIG, c.Protocol, c.Client, c.Server))
	r.AddData(tuple(nl.CTA_TUPLE_REPLY, c.Protocol, c.Server, c.Client))
	r.AddData(nl.NewRtAttr(attributeStatus, binary.BigEndian.AppendUint32(nil, answered)))
	r.AddData(nl.NewRtAttr(nl.CTA_TIMEOUT, binary.BigEndian.AppendUint32(nil, uint32(c.Timeout/time.Second))))
	if c.Protocol == protocolTCP {
		info := nl.NewRtAttr(nl.CTA_PROTOINFO|syscall.NLA_F_NESTED, nil)
		tcp := info.AddRtAttr(nl.CTA_PROTOINFO_TCP|syscall.NLA_F_NESTED, nil)
		tcp.AddRtAttr(nl.CTA_PROTOINFO_TCP_STATE, []byte{nl.TCP_CONNTRACK_ESTABLISHED})
		for _, flags := range []int{attributeFlagsOriginal, attributeFlagsReply} {
			tcp.AddRtAttr(flags, []byte{liberal, liberal}) // and their mask
		}
		r.AddData(info)
	}
	return r
}

// tuple is one direction of a connection.
func tuple(attribute int, protocol uint8, from, to netip.AddrPort) *nl.RtAttr {
	t := nl.NewRtAttr(attribute|syscall.NLA_F_NESTED, nil)
	src, dst := nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	if from.Addr().Is6() {
		src, dst = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	ip := t.AddRtAttr(nl.CTA_TUPLE_IP|syscall.NLA_F_NESTED, nil)
	ip.AddRtAttr(src, from.Addr().AsSlice())
	ip.AddRtAttr(dst, to.Addr().AsSlice())
	ports := t.AddRtAttr(nl.CTA_TUPLE_PROTO|syscall.NLA_F_NESTED, nil)
	ports.AddRtAttr(nl.CTA_PROTO_NUM, []byte{protocol})
	ports.AddRtAttr(nl.CTA_PROTO_SRC_PORT, binary.BigEndian.AppendUint16(nil, from.Port()))
	ports.AddRtAttr(nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, to.Port()))
	return t
}
