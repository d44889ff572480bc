// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// What the maps hold. bpf2go derives the Go types from these structs. Addresses are
// IPv6, IPv4 ones are mapped into it (::ffff:0:0/96). Addresses and ports are in
// network byte order, times are ns of CLOCK_MONOTONIC.
#ifndef LAYOUT_H
#define LAYOUT_H

#include <linux/types.h>

struct address {
	__be32 word[4];
};

// tuple is the source and destination of a packet.
struct tuple {
	struct address src, dst;
	__be16 sport, dport;
	__u8 protocol;
	__u8 fragment; // 1: a key of fragments, whose identification is in place of the ports
	__u8 zero[2];
};

// Roles of a flow's packets. C is the client, V the Service's address, E the endpoint, N the
// node's address; m is the client's port between the hooks, n the masquerading port.
enum role {
	ROLE_NONE,
	TO_ENDPOINT,  // ingress: C -> V becomes C:m -> E
	MASQUERADE,   // egress:  C:m -> E becomes N:n -> E
	UNMASQUERADE, // ingress: E -> N:n becomes E -> C:m
	TO_CLIENT,    // egress:  E -> C:m becomes V -> C; ingress: E -> N:n of a client on the node itself (node.h)
	STALE,        // the same, of an endpoint that was given up: dropped
};

// bucket is a part of the index (index.h).
#define SLOTS 7
struct bucket {
	__u64 slot[SLOTS];
	__u64 moved; // tuples whose home this is and that are elsewhere, as it was full
};

enum state {
	FREE,
	ASKING, // an endpoint has been chosen and has not answered
	MOVING, // it was given up; userspace chooses another one
	OPEN,
	CLOSED,
	VACATED, // the same, and its client uses its tuples again: it has none
};

// Options of a flow.
enum option {
	OPTION_MASQUERADE = 1,
	OPTION_IPV6 = 2,
	OPTION_DIRECT = 4, // to the endpoint itself, by a port of a Service's flow (direct.h); with OPTION_MASQUERADE: from the node
	OPTION_NODE = 16, // the client is on the node itself (node.h): N:n -> E, without MASQUERADE and UNMASQUERADE
	OPTION_MOVED = 8, // between the hooks, the client has a port that userspace has chosen
};

// Marks of a flow: what has been seen of it.
enum seen {
	CLIENT_FIN = 1,
	ENDPOINT_FIN = 2,
	CLIENT_FIN_ACKED = 4,
	ENDPOINT_FIN_ACKED = 8,
	CLIENT_RST = 16,
	ENDPOINT_RST = 32,
	CLOSING_TOLD = 64,
	CONFIRMED = 128, // the client has completed the handshake
	COLLIDED = 256,  // another flow has the tuple of the way back
	RECORDED = 512,  // userspace has written the record
	KNOWN = 1024,    // userspace follows the flow
	PASSED = 2048,   // a packet of the client has left the node
	CLIENT_AHEAD = 4096, // segments behind a gap have come: ahead says up to where
	ENDPOINT_AHEAD = 8192,
	CLIENT_LEAVING = 32768, // the client's end has come to the node, perhaps no further
	CHALLENGED = 16384, // userspace asks the client whether the connection goes on, or has just asked
	ENDPOINT_RST_DOUBTED = 65536, // an RST has come in the window, and perhaps the receiver believes it
	CLIENT_RST_DOUBTED = 131072,
	FIRST_WANTED = 262144, // userspace has lost the SYN, and wants it when it comes again
	CLIENT_MISSED = 524288, // the receiver has reported a gap in what the client has sent
	ENDPOINT_MISSED = 1048576,
};

// direction counts packets from the client (0) or from the endpoint (1).
struct direction {
	__u64 bytes;   // payload; TCP: without retransmissions; SCTP: user data as it passes
	__u64 packets; // UDP: datagrams; SCTP: messages; TCP: not counted
	__u64 last;    // when the last one came, less a tick at most
	__u32 end;     // TCP: sequence number after the last byte seen; SCTP: the packets' verification tag; UDP: of the client's last datagram, as in struct packet
	__u32 acked;   // TCP: the latest acknowledgement sent in this direction
};

// LINE begins a cache line.
#define LINE __attribute__((aligned(64)))

// flow is the state of one connection or UDP session. CPUs that handle packets of both
// directions share its lines: the first two change rarely once the flow has an endpoint.
struct flow {
	// What the index compares.
	LINE struct address client;
	struct address vip, endpoint;
	__be16 client_port, vip_port, endpoint_port, middle_port, node_port;
	__u8 protocol;
	__u8 attempts; // to find an endpoint
	enum option options;

	LINE struct address node;
	__u64 started;    // when the first packet came
	__u32 generation; // changes with each use of the index
	__u32 ifindex;    // of the client's interface; of the node's own connections (direct.h) 0
	__u32 service;    // index of loads
	__u32 first_sequence; // TCP: of the client's SYN; SCTP: the initiate tag of its INIT; UDP: of the first datagram, as in struct packet
	__u32 challenge;  // TCP: what userspace has acknowledged in answer to another SYN; 0 if nothing
	__u64 confirmed;  // when the client completed the handshake
	__u32 missed[2];  // TCP: segments that came after their receiver had acknowledged what lies before them again

	LINE enum state state;
	enum seen seen;
	enum seen first_end; // the mark that came first of those that end a connection
	__u32 inject;   // packets that userspace has sent and inject.h has not seen
	__u32 fin[2];   // sequence numbers after the FINs; SCTP: see association.h
	__u32 ahead[2]; // sequence numbers after the segments that lie behind a gap
	__u32 again[2]; // TCP: segments that have come by before
	__u64 answered; // when the endpoint answered
	__u64 data;     // when its first payload came
	__u64 closed;

	LINE struct direction way[2];
};

// set names a set of ranges of addresses, or of clients. Userspace derives it from the ranges, or
// from the service port's name.
struct set {
	__u32 half[2];
};

// range is a key of ranges: a range of addresses, after the set that has it.
struct range {
	__u32 bits; // of both
	struct set set;
	struct address addr;
};

// destination is a key of destinations: an address that Services are reached at.
struct destination {
	struct address addr;
	__be16 port;
	__u8 protocol;
	__u8 zero;
};

// Options of a destination.
enum deciding {
	DECIDE_RANDOM = 1, // else round-robin
	HIDE_PODS = 2,     // endpoints see the node's address instead of a pod's
	HIDE_OTHERS = 4,   // the same, of all other clients
	ASK_NEW = 8,       // userspace decides about clients that session affinity does not remember
	ASK_NODE = 64, // the node's own clients have flows; else the relay serves them
	DECIDE_NODE = 128, // and are like others here; else userspace decides about them
};

struct served {
	__u32 service; // index of loads
	__u32 list, count; // of places, whose slots are 0 to count - 1; 0: userspace decides
	__u32 pods_list, pods_count; // the same, for pods
	__u32 turn;    // of round-robin
	enum deciding options;
	struct set sources; // clients that are not in it get no answer; 0: all do
	struct set group;   // whose clients session affinity remembers, in clients
	__u64 window;       // for so many ns after the last connection; 0: no affinity
};

// slot is a key of places. A list never changes: its successor has another number, so
// that a program which still knows the old one finds what it expects, or nothing.
struct slot {
	__u32 list, number;
};

// place is an endpoint.
struct place {
	struct address addr;
	__be16 port;
	__u16 own; // 1: at an address of this node, which hides nobody
};

// client is a key of clients.
struct client {
	struct set group;
	struct address addr;
};

// pin is the endpoint that session affinity gives a client.
struct pin {
	struct address addr;
	__be16 port;
	__u16 zero;
	__u32 spare;
	__u64 used; // when the last connection began
};

// member is a key of members: an endpoint of a list.
struct member {
	__u32 list;
	__be16 port;
	__u16 zero;
	struct address addr;
};

// origin_key is a key of origins: a range of addresses. The longest range counts.
struct origin_key {
	__u32 bits;
	struct address addr;
};

// origin is what policy has to know about a client.
struct origin {
	__u32 link; // hosts with the same number reach each other without this node; 0 is none
	__u16 pod;  // 1: a pod, whose address the endpoint may see
	__u16 own;  // 1: an address of this node, and no range
};

// powers are those of x that CRCs need (sctp.h): of[n] is x^(32 n). hidden[n] is what an
// address adds that becomes a parameter to skip, n words before the end. Userspace computes
// them.
#define POWERS (1 << 14)
struct powers {
	__u32 of[POWERS], hidden[POWERS];
};

// load counts what one service port occupies. Differences count; both only grow.
struct load {
	__u64 asked, decided;    // upcalls: EVENT_ASK, EVENT_CHALLENGE
	__u64 begun, confirmed;  // handshakes, until the client has completed them
	__u64 opened, ended;     // flows
	__u64 ask_until;         // until then, userspace decides: an endpoint has failed
};

// What the table may choose of the node's.
enum hiding {
	HIDES = 1,       // addresses and ports for hidden clients, and ports for the node's own
	HIDES_NODE = 2,  // the address that routing chooses for all of the latter
	ASKS_NODE_UDP = 4, // nothing for their datagrams: userspace is asked
};

// control is written by userspace.
struct control {
	__u64 beat; // when userspace last said that it is alive
	__u32 magic; // upper bits of the mark of injected packets
	__u32 most_undecided, most_unconfirmed; // for each service port
	__u32 most_flows;                       // the same
	__u16 first_reply, last_reply; // client ports whose replies steering takes for its own; 0 if none
	__u32 last_list; // the latest number of a list
	__u32 spare_mask; // spares is a ring of so many elements + 1
	__u32 least_spare; // a service port has more than most_flows while so many others are free
	// Indices of flows that are free: userspace has put them, both sides take them.
	__u64 given, taken;
	__u64 untold; // flows whose notice found no room in the ring
	__u64 netns;  // cookie of the network namespace; its inode's number is used again
	__u64 seed;   // of the index
	__u64 shortcuts_until; // until then, packets may take shortcuts
	__u64 shortcuts_ending; // since then, shortcuts are about to end, and flows that open take none; 0: they are not
	__u64 node_until; // until then, new connections of the node's own clients may become flows (node.h)
	__u32 node_device; // the interface of those; 0: none
	enum hiding hides;
	__u32 ways_number; // changes with each change of ways
	__u32 sleeps; // userspace reads no notices until one wakes it
	__u64 decides_until;   // until then, the table decides: nobody brings it up to date any more
};

// Ways that packets may take past the IP stack at an interface (shortcut.h).
enum way {
	WAY_FROM = 1, // those that come in here
	WAY_INTO = 2, // those that leave here
	WAY_PEER = 4, // and go to its peer at once
};

// hop is where a packet of a flow went a moment ago. Others like it go there without another
// look at the routing tables.
struct hop {
	__u64 until;
	__u32 reference, generation; // the flow, and the packet's role
	__u32 ways_number; // as control has it
	__u32 from; // the interface that the packet came in at
	__u16 mtu;
	__u8 tos;
	__u8 attempts; // of the flow
	__u32 ifindex; // of the next interface
	__u32 peer;    // to its peer, past the interface itself
	union {
		__u8 macs[2][6]; // destination, source
		__u32 next[4];   // or the next host's address
	};
};

// spare is an index of flows.
struct spare {
	__u64 flow;
};

enum event_kind {
	EVENT_ASK = 1,   // the first packet of a flow; the packet follows
	EVENT_REFUSED,   // the endpoint refused the flow
	EVENT_LATE,      // an endpoint that was given up answered; the packet follows
	EVENT_OPEN,      // the endpoint has answered a SYN
	EVENT_COLLISION, // the client has, or may have, a connection of its own with the same tuple
	EVENT_CLOSED,
	EVENT_UNREACHABLE, // an endpoint that had answered has closed its UDP port
	EVENT_BEGUN,  // the table has decided about a flow; the first packet follows if userspace could put it back
	EVENT_UNUSED, // an index that was taken in vain
	EVENT_UNANSWERED, // UDP: a datagram to an endpoint that has not answered yet; it follows
	EVENT_DIRECT, // a flow with OPTION_DIRECT has begun
	EVENT_CHALLENGE, // another SYN, or INIT, has come with the tuple of an open connection
};

// Reasons of EVENT_REFUSED.
enum reason {
	REASON_RST,
	REASON_PORT,       // ICMP port unreachable; of UDP, by the endpoint itself
	REASON_HOST,       // ICMP: any other unreachable
};

struct event {
	__u64 time;
	enum event_kind kind;
	__u32 flow;    // EVENT_ASK: the flow that had the tuple before, or 0
	__u32 service; // EVENT_ASK, EVENT_CHALLENGE: index of loads
	__u32 generation;
	__u32 ifindex;
	enum reason reason; // EVENT_CLOSED: what has been seen of the flow
	__u32 length;  // of the packet that follows
	__u32 header;  // of that, the length of its link header
	__u32 attempt; // EVENT_REFUSED: which of the flow's
	__u32 zero;
};

// Reasons why a packet passed to the relay, and other counts.
enum counter {
	COUNT_TRANSLATED,
	COUNT_ASKED,
	COUNT_INJECTED,
	COUNT_REFUSED,
	COUNT_LATE,
	COUNT_ICMP,
	COUNT_FRAGMENTS,
	COUNT_COLLISIONS,
	COUNT_SCTP_FRAGMENTS, // dropped: their ports cannot be changed
	COUNT_DECIDED, // flows that the table has decided about
	COUNT_SHORTCUTS, // packets that did not pass the IP stack
	COUNT_NOT_ADMITTED, // first packets that source ranges do not admit
	PASSED_NO_HEARTBEAT,
	PASSED_UNDECIDED,   // too many upcalls of the service port wait
	PASSED_UNCONFIRMED, // too many handshakes of the service port are incomplete
	PASSED_RING_FULL,
	PASSED_SOCKET,      // the relay has the connection already
	PASSED_RELAYED,     // the client's packets are being relayed
	PASSED_SHAPE,       // too large, segmented or fragmented, or not the first packet of SCTP
	COUNTERS,
};

#endif
