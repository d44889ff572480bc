package world

import (
	"fmt"
	"os/exec"
	"strings"
)

// neighbours are the rules of the programs beside a service proxy on a node that kubeadm made,
// as iptables-restore reads them: the kubelet's, flannel's for pods that have the client's and
// the server's networks, and those of the CNI plugin portmap for one host port.
const neighbours = `*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:CNI-DN-0 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:FLANNEL-POSTRTG - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: cbr0" -m multiport --dports 8088 -j CNI-DN-0
-A CNI-DN-0 -s POD/32 -p tcp -m tcp --dport 8088 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-0 -p tcp -m tcp --dport 8088 -j DNAT --to-destination POD:80
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s PODS -d PODS -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s PODS ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s PODS -d PODS -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
COMMIT
*filter
:FLANNEL-FWD - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A FLANNEL-FWD -s PODS -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d PODS -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
`

// Rules returns what iptables-restore takes of them, for a range of pods and one of them.
func Rules(pods, pod string) string {
	return strings.NewReplacer("PODS", pods, "POD", pod).Replace(neighbours)
}

// Neighbours gives the node the rules of a cluster's node. Only for an IPv4 World.
func (w *World) Neighbours() error {
	return w.Node.Do(func() error {
		cmd := exec.Command("iptables-restore", "--noflush")
		cmd.Stdin = strings.NewReader(Rules("10.0.0.0/14", w.Endpoints[0].String()))
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("iptables-restore: %w: %s", err, out)
		}
		return nil
	})
}
