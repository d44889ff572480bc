package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/tproxy"
)

// steeringOptions are the flags that say how packets are steered in, and what
// is made in the kernel for that.
type steeringOptions struct {
	mode       choice
	backend    choice
	table      string
	steerMark  mark
	replyMark  mark
	socketMark mark
	steerTable int
	replyTable int
	replyPorts portRange
	conntrack  choice
	bpfRoot    string
}

func newSteeringOptions() steeringOptions {
	return steeringOptions{
		mode:      newChoice(choose.Modes...),
		backend:   newChoice(choose.Backends...),
		conntrack: newChoice(redirect.Conntracks...),
		steerMark: route.DefaultSteerMark,
		replyMark: route.DefaultReplyMark,

		socketMark: route.DefaultSocketMark,
	}
}

// register adds the flags that choose, and those that name.
func (o *steeringOptions) register(f *pflag.FlagSet) {
	f.Var(&o.mode, "redirect", "steering mode; auto takes the first one that works here")
	f.Var(&o.backend, "tproxy-backend", "implementation of tproxy; auto takes the first one that works here")
	f.Var(&o.replyPorts, "reply-ports", "local ports of connections to endpoints that keep the client's address; off never keeps it (default: "+defaultReplyPorts+")")
	f.Var(&o.conntrack, "conntrack", "whether connections to endpoints bypass connection tracking; auto keeps them in it once rules of another program look at their state")
	o.registerNames(f)
}

// defaultReplyPorts says what no range means.
var defaultReplyPorts = fmt.Sprintf("%d-%d, without netfilter %d-%d",
	redirect.ReplyPorts[0], redirect.ReplyPorts[1], choose.DefaultReplyPorts[0], choose.DefaultReplyPorts[1])

// registerNames adds the flags that name what steering makes in the kernel.
func (o *steeringOptions) registerNames(f *pflag.FlagSet) {
	f.StringVar(&o.table, "nft-table", tproxy.DefaultTable, "name of the nftables table, and of the lock that keeps a second proxy out of the network namespace")
	f.StringVar(&o.bpfRoot, "bpf-root", bpffs.DefaultRoot, "where the BPF file system is mounted, for pins; empty: BPF programs end with the process")
	f.Var(&o.steerMark, "steer-mark", "bit of packet marks for steered packets")
	f.Var(&o.replyMark, "reply-mark", "bit of packet marks for replies to clients' own addresses")
	f.Var(&o.socketMark, "socket-mark", "bit of packet marks for packets of our sockets with the node's address that bypass connection tracking")
	f.IntVar(&o.steerTable, "route-table-steer", route.DefaultSteerTable, "routing table for external and load balancer IPs that are not this node's")
	f.IntVar(&o.replyTable, "route-table-replies", route.DefaultReplyTable, "routing table for replies to clients' own addresses; without netfilter, the next one too")
}

// instance tells this proxy from others in the network namespace; it is empty for the
// usual one.
func (o *steeringOptions) instance() string {
	if o.table == tproxy.DefaultTable {
		return ""
	}
	return o.table
}

// choose returns what the choice of a mode is made from.
func (o *steeringOptions) choose(nodeIPs addresses) choose.Options {
	return choose.Options{
		Mode:    o.mode.value,
		Backend: o.backend.value,
		Table:   o.table,
		Routes: route.Options{
			NodeIPs:    nodeIPs,
			SteerMark:  uint32(o.steerMark),
			ReplyMark:  uint32(o.replyMark),
			SteerTable: o.steerTable,
			ReplyTable: o.replyTable,
		},
		SocketMark: uint32(o.socketMark),
		ReplyPorts: o.replyPorts.ports,
		NoReplies:  o.replyPorts.off,
		Conntrack:  redirect.Conntrack(o.conntrack.value),
		BPFRoot:    o.bpfRoot,
	}
}

// validate says what is wrong with the flags.
func (o *steeringOptions) validate() error {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
	if o.table == "" || len(o.table) > 100 || strings.Trim(o.table, letters) != "" {
		return fmt.Errorf("--nft-table: %q is not a name of at most 100 letters, digits, hyphens and underscores", o.table)
	}
	all := o.choose(nil)
	all.Routes.SocketMark = all.SocketMark
	if err := all.Routes.WithDefaults().Validate(); err != nil {
		return fmt.Errorf("--steer-mark, --reply-mark, --socket-mark, --route-table-steer and --route-table-replies: %w", err)
	}
	return nil
}

// mark is a flag that takes one bit of packets' marks.
type mark uint32

func (m *mark) Type() string   { return "mark" }
func (m *mark) String() string { return fmt.Sprintf("%#x", uint32(*m)) }

func (m *mark) Set(s string) error {
	n, err := strconv.ParseUint(s, 0, 32)
	if err != nil || n == 0 || n&(n-1) != 0 {
		return fmt.Errorf("%q is not a single bit of 32, such as %#x", s, route.DefaultSteerMark)
	}
	*m = mark(n)
	return nil
}

// portRange is a flag that takes the first and the last of a range of ports, or
// "off".
type portRange struct {
	ports [2]uint16
	off   bool
}

func (r *portRange) Type() string  { return "FIRST-LAST|off" }
func (*portRange) words() []string { return []string{"off"} }

func (r *portRange) String() string {
	switch {
	case r.off:
		return "off"
	case r.ports == [2]uint16{}:
		return ""
	}
	return fmt.Sprintf("%d-%d", r.ports[0], r.ports[1])
}

func (r *portRange) Set(s string) error {
	if s == "off" {
		*r = portRange{off: true}
		return nil
	}
	first, last, ok := strings.Cut(s, "-")
	from, err1 := strconv.ParseUint(first, 10, 16)
	to, err2 := strconv.ParseUint(last, 10, 16)
	if !ok || err1 != nil || err2 != nil || from == 0 || from > to {
		return fmt.Errorf("%q is not a range of ports such as 61000-65534, nor off", s)
	}
	if to == 65535 {
		return fmt.Errorf("%q: the kernel takes no policy routing rule for a range that ends with 65535; write %d-65534", s, from)
	}
	*r = portRange{ports: [2]uint16{uint16(from), uint16(to)}}
	return nil
}
