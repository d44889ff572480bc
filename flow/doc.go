// Package flow is the second data path: the kernel forwards the packets of a connection,
// and userspace only decides where they go. It serves clients whose packets this node
// forwards, pods and other hosts, and most of the node's own clients (node.go). The relay
// behind it (packages stream and datagram) serves everything else.
//
// # What happens to a packet
//
//	SYN, or first datagram
//	  |
//	ingress program
//	  +-- to no destination of ours, or the relay's --------> IP stack, as without a flow
//	  |
//	  +-- the table decides: chooses E, writes the flow ---> rewrite -> IP stack -> egress -> E
//	  |      notice -> worker: its record                       ^
//	  |                                                         |
//	  +-- else an upcall -> worker: policy and balancer         |
//	         choose E, writes the flow                          |
//	           | AF_PACKET, with the flow's mark                |
//	         egress program: enters the tuples -----------------+ back to ingress
//
// BPF programs at the interfaces rewrite addresses where netfilter has its own
// translations: destinations at tcx ingress, before routing and connection tracking,
// sources at tcx egress, after them. So routing, connection tracking, FORWARD rules and
// network policies see the client and the endpoint in both directions, from the SYN on,
// and never the Service's address.
//
//	C -> V      ingress of the client's interface: C:m -> E
//	C:m -> E    egress, if the client's address is hidden: N:n -> E
//	E -> N:n    ingress: E -> C:m
//	E -> C:m    egress of the client's interface: V -> C
//
// C is the client, V the Service's address, E the endpoint, N the node. m is the client's
// own port, unless another connection of this client has the tuple; n is a port of the
// node. Each line is a tuple that a flow has: the index (bpf/index.h, bpf/index.go) finds by it
// the flow's state in the map flows.
//
// # Shortcuts
//
// While nothing else looks at forwarded packets, those of open flows skip the IP stack: the
// program at ingress does the rewrites of both hooks, finds the next interface by the routing
// tables, and redirects the packet to that interface or to its peer (bpf/shortcut.h). Userspace
// permits that for a second at a time, and says at which interfaces (shortcut.go, package bypass).
//
// # Who decides
//
// Where the Service alone decides, the table in BPF does (bpf/table.h; table.go fills it by
// policy.Uniform, ranges.go the source ranges): the packet goes on at once, and the worker hears of the
// flow by a notice (begun.go). Where the client is to be hidden, the table asks the routing tables for the
// node's address, and takes a port that no flow and no socket has. Indices of free flows are in a ring
// that both sides take from (bpf/spares.go). The table goes on while no process runs; the next one finds these flows in shared memory. A
// client that uses the port of a closed connection again gets a new flow, and the table takes
// the old one's tuples. After a failed attempt userspace decides for a while: its balancer
// knows which endpoints to leave out.
//
// Otherwise, a SYN, or a datagram, of an unknown flow to a served destination goes up a ring. The
// same policy and balancer decide as for relayed connections. The flow's state is written
// to shared memory, and the packet goes back by an AF_PACKET socket, with a mark that
// names the flow. The egress program recognizes the mark, enters the tuples itself, and
// puts the packet back to the ingress of its interface. So a decision costs one system
// call, which it shares with others of the same moment.
//
// The way back is claimed first. If another flow has its tuple, the sender gets ENOBUFS
// and takes another port m.
//
// # Retries
//
// If an endpoint answers a SYN with an RST or an ICMP error, or not within the time of
// --dial-timeouts, the same SYN goes to the next endpoint. The state changes by
// compare-and-swap from asking to open (in BPF, by the SYN-ACK) or to moving (here), so that
// exactly one of both happens. A SYN-ACK that comes too late is answered with an RST. If no
// endpoint is left, the client gets the RST. Datagrams whose endpoint is closed are sent to
// the next one too.
//
// # What passes to the relay
//
//   - everything, until the Server has started
//   - clients of this node whose packets rules of others judge (node.go), or that no device serves
//   - packets with a VLAN tag (the VLAN's interface shows them again), and IPv6 packets with
//     other headers than three options headers and then a fragment header
//   - first packets that are fragmented, segmented (GRO) or longer than a frame; the rest
//     of such a UDP session follows them. Later fragments follow the flow, once the first
//     one of their packet has come
//   - new flows, while userspace gives no sign of life, while the ring or the flow table is
//     full, or a service port has too many undecided flows or incomplete handshakes: a
//     flood meets the relay's SYN cookies
//   - connections and sessions that the relay serves already
//   - service ports with the annotation sluice.dev/datapath: relay, and those that hold
//     connections, or send or accept PROXY headers
//
// # SCTP
//
// INIT is the SYN of an association, and ABORT its RST. The kernel need not have SCTP. The
// relay does need it, so that without it what passes to the relay is refused. See
// bpf/association.h for its state, and bpf/sctp.h for CRCs and addresses.
//
// # Rooms
//
// This package decides: worker.go and dial.go about new flows, path.go and table.go about
// Services, adopt.go about flows that a process before has left. Package bpf is what runs in the
// kernel and the memory that both sides share, attach keeps its programs at the interfaces, and
// bypass finds what else on the node looks at packets.
package flow
