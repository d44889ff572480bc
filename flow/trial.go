package flow

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/flow/attach"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// Addresses of a trial, for documentation (RFC 5737, RFC 3849): nobody has them.
var trialAddresses = [...]struct{ client, endpoint, vip netip.AddrPort }{
	{netip.MustParseAddrPort("198.51.100.2:40000"), netip.MustParseAddrPort("203.0.113.2:8080"), netip.MustParseAddrPort("192.0.2.1:80")},
	{netip.MustParseAddrPort("[2001:db8::2]:40000"), netip.MustParseAddrPort("[2001:db8:1::2]:8080"), netip.MustParseAddrPort("[2001:db8:2::1]:80")},
}

// hasRights returns the first right that the process lacks for kernel flows. The kernel's
// verifier refuses arithmetic on pointers without CAP_PERFMON.
func hasRights() error {
	if c, is := sys.Missing(sys.NetAdmin, sys.BPF, sys.Perfmon, sys.NetRaw); is {
		return fmt.Errorf("%s is missing", c)
	}
	return nil
}

// Try loads the programs and has them translate the packets of a connection, and returns why
// that does not work here. Nothing in the kernel changes but for its duration.
func Try() error {
	if err := hasRights(); err != nil {
		return err
	}
	k, err := bpf.Open(1, nil)
	if err != nil {
		return err
	}
	defer k.Close()
	if err := attach.Try(); err != nil {
		return err
	}
	k.Control.Magic = 1 << bpf.FlowBits
	i, err := newInjector(k.Control.Magic)
	if err != nil {
		return err
	}
	i.close()
	return try(k, 1)
}

// try runs packets through the programs that will serve, and returns why these do not translate them
// here. The spares are filled, and this process has taken none yet.
func (s *Server) try() error {
	index, ok := s.kernel.Spares.Take()
	if !ok {
		return nil // flows of the process before have all: there they work
	}
	s.worker.tried++
	defer s.kernel.Spares.Give(index)
	return try(s.kernel, index)
}

// try lets programs translate the packets of a connection of each family, as the flow with an
// index that is free: the SYN that userspace puts back, the same from the client, and the
// endpoint's answer. The kernel runs them at no interface (BPF_PROG_TEST_RUN).
func try(k *bpf.Kernel, index uint32) error {
	const first = 1000 // sequence number
	f := &k.Flows[index]
	for _, a := range trialAddresses {
		*f = bpf.KernelFlow{
			Generation: f.Generation + 1, Ifindex: loopback, Protocol: syscall.IPPROTO_TCP, Inject: 1, FirstSequence: first, State: bpf.KernelStateASKING,
			Client: bpf.AddressOf(a.client.Addr()), ClientPort: bpf.Wire(a.client.Port()), MiddlePort: bpf.Wire(a.client.Port()),
			Vip: bpf.AddressOf(a.vip.Addr()), VipPort: bpf.Wire(a.vip.Port()),
			Endpoint: bpf.AddressOf(a.endpoint.Addr()), EndpointPort: bpf.Wire(a.endpoint.Port()),
		}
		if a.vip.Addr().Is6() {
			f.Options = bpf.KernelOptionOPTION_IPV6
		}
		f.Way[0].End, f.Way[1].Acked = first+1, first+1
		syn := func(to netip.AddrPort) []byte {
			return trialFrame(reset{from: a.client, to: to, sequence: first, flags: flagSYN})
		}
		answer := func(from netip.AddrPort) []byte {
			return trialFrame(reset{from: from, to: a.client, sequence: 2 * first, ack: first + 1, flags: flagSYN | flagACK})
		}
		for _, step := range []struct {
			name     string
			program  *ebpf.Program
			mark     uint32
			in, want []byte
			verdict  uint32
		}{
			{"a packet that userspace puts back", k.Ethernet.Egress, k.Control.Magic | index, syn(a.vip), syn(a.vip), tcRedirect},
			{"a client's packet", k.Ethernet.Ingress, 0, syn(a.vip), syn(a.endpoint), tcxNext},
			{"an endpoint's answer", k.Ethernet.Egress, 0, answer(a.endpoint), answer(a.vip), tcxNext},
		} {
			out := make([]byte, len(step.in))
			verdict, err := step.program.Run(&ebpf.RunOptions{Data: step.in, DataOut: out, Context: trialContext(step.mark)})
			if err == nil && (verdict != step.verdict || !bytes.Equal(out, step.want)) {
				err = fmt.Errorf("verdict %d, %x; want %d, %x", int32(verdict), out, int32(step.verdict), step.want)
			}
			if err != nil {
				k.Index.EraseAll(index)
				f.State = bpf.KernelStateFREE
				return fmt.Errorf("a trial of the BPF programs: %s: %w", step.name, err)
			}
		}
		opened := f.State == bpf.KernelStateOPEN
		k.Index.EraseAll(index)
		f.State = bpf.KernelStateFREE
		if !opened {
			return errors.New("a trial of the BPF programs: an endpoint's answer opens no connection")
		}
	}
	return nil
}

// Numbers of linux/pkt_cls.h and linux/bpf.h.
const (
	tcRedirect = 7         // TC_ACT_REDIRECT
	tcxNext    = 1<<32 - 1 // TCX_NEXT
	loopback   = 1         // the interface that the kernel says a trial's packet is at
	skBuffSize = 192       // struct __sk_buff
	skBuffMark = 2 * 4     // its offset there
)

// trialContext returns the __sk_buff of a test run with this mark.
func trialContext(mark uint32) []byte {
	b := make([]byte, skBuffSize)
	binary.NativeEndian.PutUint32(b[skBuffMark:], mark)
	return b
}

// trialFrame returns a TCP segment in an Ethernet frame.
func trialFrame(segment reset) []byte {
	b := make([]byte, 12, 128)
	kind := uint16(syscall.ETH_P_IP)
	if segment.from.Addr().Is6() {
		kind = syscall.ETH_P_IPV6
	}
	return segment.append(binary.BigEndian.AppendUint16(b, kind))
}
