package tracking

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
)

// Protocols, and the attributes of their timeouts (linux/nfnetlink_cttimeout.h).
const (
	protocolTCP = syscall.IPPROTO_TCP
	protocolUDP = syscall.IPPROTO_UDP

	timeoutEstablished = 3 // CTA_TIMEOUT_TCP_ESTABLISHED
	timeoutCloseWait   = 5 // CTA_TIMEOUT_TCP_CLOSE_WAIT
	timeoutUnreplied   = 1 // CTA_TIMEOUT_UDP_UNREPLIED
	timeoutReplied     = 2 // CTA_TIMEOUT_UDP_REPLIED
)

const (
	subsystem  = 8 // NFNL_SUBSYS_CTNETLINK_TIMEOUT
	defaultSet = 3 // IPCTNL_MSG_TIMEOUT_DEFAULT_SET

	attributeL3Proto = 2 // CTA_TIMEOUT_L3PROTO
	attributeL4Proto = 3 // CTA_TIMEOUT_L4PROTO
	attributeData    = 4 // CTA_TIMEOUT_DATA
)

// setTimeouts sets default timeouts of the calling thread's network namespace; those
// that are not named stay. Needs CAP_NET_ADMIN and the module nfnetlink_cttimeout.
func setTimeouts(protocol uint8, seconds map[uint16]uint32) error {
	r := nl.NewNetlinkRequest(subsystem<<8|defaultSet, syscall.NLM_F_ACK)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: syscall.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	r.AddData(nl.NewRtAttr(attributeL3Proto, binary.BigEndian.AppendUint16(nil, syscall.AF_INET)))
	r.AddData(nl.NewRtAttr(attributeL4Proto, []byte{protocol}))
	data := nl.NewRtAttr(attributeData|syscall.NLA_F_NESTED, nil)
	for attribute, value := range seconds {
		data.AddRtAttr(int(attribute), binary.BigEndian.AppendUint32(nil, value))
	}
	r.AddData(data)
	if _, err := r.Execute(syscall.NETLINK_NETFILTER, 0); err != nil {
		return fmt.Errorf("timeouts by netlink: %w", err)
	}
	return nil
}
