package flow

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/host/kernel"
)

// device is an interface of Sluice's own, by which packets of the node's own clients come in again
// (bpf/node.h). It leads nowhere.
type device struct {
	nl     *netlink.Handle
	socket *nl.SocketHandle
	name   string
	index  int
}

const (
	// deviceAlias marks a device as Sluice's: other programs may use the same name.
	deviceAlias = "made by sluice"
	// deviceMTU is large enough never to limit a packet.
	deviceMTU = 65535
)

var (
	// deviceMAC is NODE_MACS of bpf/node.h.
	deviceMAC = net.HardwareAddr{2, 's', 'l', 'u', 'i', 'c'}
	// deviceAddr lets packets pass the kernel's loose source check (rp_filter 2), which drops what
	// arrives at an interface without an address. It is a loopback address, which is local without
	// the device too.
	deviceAddr = netip.MustParsePrefix("127.83.76.2/32")
	// deviceKinds are tried in this order: few kernels lack both.
	deviceKinds = []string{"dummy", "ifb"}
)

// openDevice makes a proxy's device, or takes over that of the process before.
func openDevice(namespace int, proxy string) (*device, error) {
	handle, err := kernel.Open(namespace, syscall.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	in := netns.None()
	if namespace != 0 {
		in = netns.NsHandle(namespace)
	}
	s, err := nl.GetNetlinkSocketAt(in, netns.None(), syscall.NETLINK_ROUTE)
	if err != nil {
		handle.Close()
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	d := &device{nl: handle, socket: &nl.SocketHandle{Socket: s}, name: kernel.OwnDevice(proxy)}
	if err := d.make(); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *device) close() {
	d.nl.Close()
	d.socket.Close()
}

// make makes the device if it is not there, and sets it up.
func (d *device) make() error {
	if err := d.tryMake(); err != nil {
		return fmt.Errorf("interface %s: %w", d.name, err)
	}
	return nil
}

func (d *device) tryMake() error {
	link, err := d.nl.LinkByName(d.name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		link, err = d.add()
	}
	if err != nil {
		return err
	}
	if a := link.Attrs(); a.Alias != deviceAlias {
		return errors.New("another program's")
	}
	d.index = link.Attrs().Index
	if err := d.configure(); err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: deviceAddr.Addr().AsSlice(), Mask: net.CIDRMask(32, 32)}, Scope: int(netlink.SCOPE_HOST)}
	if err := d.nl.AddrReplace(link, addr); err != nil {
		return fmt.Errorf("address: %w", err)
	}
	return d.nl.LinkSetUp(link)
}

// add makes the device.
func (d *device) add() (link netlink.Link, err error) {
	for _, kind := range deviceKinds {
		l := &netlink.GenericLink{LinkAttrs: netlink.NewLinkAttrs(), LinkType: kind}
		l.Name, l.MTU, l.HardwareAddr = d.name, deviceMTU, deviceMAC
		if err = d.nl.LinkAdd(l); err == nil {
			break
		}
		err = fmt.Errorf("make one of the type %s: %w", kind, err)
	}
	if err != nil {
		return nil, err
	}
	if link, err = d.nl.LinkByName(d.name); err != nil {
		return nil, err
	}
	link.Attrs().Alias = deviceAlias
	return link, d.nl.LinkSetAlias(link, deviceAlias)
}

// configure makes the kernel accept packets whose source is an address of the node, and forward
// packets; the device gets no link-local address. It uses netlink, because /proc/sys may be
// read-only.
func (d *device) configure() error {
	const (
		afSpec                               = 26         // IFLA_AF_SPEC
		inetConf                             = 1          // IFLA_INET_CONF
		forwarding, sourceCheck, acceptLocal = 1, 8, 23   // IPV4_DEVCONF_...
		addressMode, noAddress               = 8, byte(1) // IFLA_INET6_ADDR_GEN_MODE
	)
	for family, settings := range map[int]func(*nl.RtAttr){
		syscall.AF_INET: func(a *nl.RtAttr) {
			conf := a.AddRtAttr(inetConf, nil)
			conf.AddRtAttr(forwarding, nl.Uint32Attr(1))
			conf.AddRtAttr(sourceCheck, nl.Uint32Attr(0))
			conf.AddRtAttr(acceptLocal, nl.Uint32Attr(1))
		},
		syscall.AF_INET6: func(a *nl.RtAttr) { a.AddRtAttr(addressMode, []byte{noAddress}) },
	} {
		request := nl.NewNetlinkRequest(syscall.RTM_SETLINK, syscall.NLM_F_ACK)
		request.Sockets = map[int]*nl.SocketHandle{syscall.NETLINK_ROUTE: d.socket}
		message := nl.NewIfInfomsg(syscall.AF_UNSPEC)
		message.Index = int32(d.index)
		request.AddData(message)
		spec := nl.NewRtAttr(afSpec, nil)
		settings(spec.AddRtAttr(family, nil))
		request.AddData(spec)
		_, err := request.Execute(syscall.NETLINK_ROUTE, 0)
		if family == syscall.AF_INET6 && (errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EINVAL)) {
			continue // no IPv6
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// there reports whether the device is still as Sluice made it.
func (d *device) there() bool {
	l, err := d.nl.LinkByIndex(d.index)
	return err == nil && l.Attrs().Alias == deviceAlias && l.Attrs().Flags&net.FlagUp != 0
}

// removeDevice removes a proxy's device, and reports whether there was one.
func removeDevice(nl *netlink.Handle, proxy string) bool {
	l, err := nl.LinkByName(kernel.OwnDevice(proxy))
	return err == nil && l.Attrs().Alias == deviceAlias && nl.LinkDel(l) == nil
}
