package world

import (
	"fmt"
	"net/netip"
	"time"
)

// TranslateSCTP has iptables translate the service's address to the server's first one
// for SCTP: the kernel of the guest has no nftables for IP.
func (w *World) TranslateSCTP() error {
	return w.node("iptables-legacy", "-w", "-t", "nat", "-A", "PREROUTING", "-p", "sctp", "-d", w.VIP.String(),
		"-j", "DNAT", "--to-destination", w.Endpoints[0].String())
}

// BalanceSCTP has IPVS forward the service's SCTP ports to the server by translation, as
// kube-proxy's mode ipvs does.
func (w *World) BalanceSCTP(ports []uint16) error {
	if err := w.AnyIP(); err != nil {
		return err
	}
	for _, port := range ports {
		service := netip.AddrPortFrom(w.VIP, port).String()
		if err := w.node("ipvsadm", "-A", "--sctp-service", service, "-s", "rr"); err != nil {
			return err
		}
		server := netip.AddrPortFrom(w.Endpoints[0], port).String()
		if err := w.node("ipvsadm", "-a", "--sctp-service", service, "-r", server, "-m"); err != nil {
			return err
		}
	}
	return nil
}

// node runs a program on the node to its end.
func (w *World) node(program string, args ...string) error {
	if _, err := w.Node.Run(Command{Path: program, Args: args}, 10*time.Second); err != nil {
		return fmt.Errorf("on the node: %w", err)
	}
	return nil
}
