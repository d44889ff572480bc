// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Reads packets' headers.
#ifndef PACKET_H
#define PACKET_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "chunks.h"
#include "layout.h"

// link_header is the length of the link header: 14, or 0 where there is none (L3
// devices such as WireGuard). Userspace loads the programs once for each.
const volatile __u32 link_header = ETH_HLEN;

// serves_sctp is 0 on kernels before 6.4: their verifier follows too many paths through
// functions, and SCTP's are too long to be inlined.
const volatile __u32 serves_sctp = 1;

// unlikely makes the compiler move the code after a condition out of the way, so that the
// instructions for most packets lie close together.
#define unlikely(condition) __builtin_expect(!!(condition), 0)

// Verdicts of tcx (Linux 6.6): other programs look at the packet too, or it is dropped.
enum tcx { TCX_NEXT = -1, TCX_DROP = 2 };

// What a packet's tc_index says on its way from one program to the next one. Cilium uses the
// lower bits.
enum passage {
	PUT_BACK = 0x5100,   // userspace has put it back
	TRANSLATED = 0x5200, // there is nothing left to do
	HALFWAY = 0x5300,    // of a hidden client's flow: the first of two translations is done
	NOTED = 0x5400,      // TRANSLATED, and egress notes that the packet has passed
	JUDGED = 0x5500,     // NOTED, and egress follows it: only what has passed ends a connection
};

// is_translated says whether ingress has translated a packet.
static __always_inline int is_translated(const struct __sk_buff *skb)
{
	return skb->tc_index >= TRANSLATED && skb->tc_index <= JUDGED;
}

enum fragment { WHOLE, FIRST_FRAGMENT, LATER_FRAGMENT };

enum tcp_flag { FIN = 1, SYN = 2, RST = 4, ACK = 16, LATER = 128 }; // LATER is ours: JUDGED

struct packet {
	struct tuple tuple;
	__u32 transport; // offset of the transport header
	__u32 end;       // offset behind the packet; padding may follow
	__u32 payload;   // length of what follows it; of a later fragment's, all of it; SCTP: user data
	__u32 sequence;  // SCTP: the initiate tag; UDP: length and checksum, or 0 if it will be segmented
	__u32 ack;       // SCTP: the verification tag
	__u32 chunks;    // of SCTP: enum chunk
	__u32 messages;  // of SCTP that end in this packet; datagrams of UDP that begin in it
	union {
		__u32 identification; // of a fragment, until it is joined
		__u32 begun;          // the flow that it has begun, in consider
	};
	__u8 flags;           // of TCP; SCTP: LATER alone
	__u8 ipv6;
	__u8 fragment;
	__u8 unchecked; // UDP without a checksum
	__u16 check;    // of the IPv4 header
	__u8 ttl;       // IPv6: hop limit
	__u8 tos;       // IPv6: traffic class
};

struct fragment_header {
	__u8 next, reserved;
	__be16 offset;
	__be32 identification;
};

static __always_inline void map_ipv4(struct address *a, __be32 ipv4)
{
	a->word[0] = 0;
	a->word[1] = 0;
	a->word[2] = bpf_htonl(0xffff);
	a->word[3] = ipv4;
}

static __always_inline void copy_address(struct address *to, const void *from)
{
	__builtin_memcpy(to, from, sizeof(*to));
}

static __always_inline int same_address(const struct address *a, const struct address *b)
{
	return a->word[0] == b->word[0] && a->word[1] == b->word[1] && a->word[2] == b->word[2] && a->word[3] == b->word[3];
}

#define LARGEST_HEADERS 8191 // offset of a transport header

// load copies a header. A helper does it if the packet is not linear there.
static __always_inline int load(struct __sk_buff *skb, __u32 at, void *to, const __u32 size)
{
	__u64 from = at;
	// The verifier has to see the bound.
	asm volatile("" : "+r"(from));
	void *start = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	if (unlikely(from > LARGEST_HEADERS || start + from + size > end))
		return bpf_skb_load_bytes(skb, at, to, size);
	__builtin_memcpy(to, start + from, size);
	return 0;
}

// bytes_left is how much of a packet follows an offset, if it is long enough. total counts
// from the IP header on.
static __always_inline __s64 bytes_left(__u32 total, __u32 to)
{
	return (__s64)total + link_header - to;
}

static __always_inline int parse_ipv4(struct __sk_buff *skb, struct packet *p, __u32 *total)
{
	struct iphdr ip;
	if (unlikely(load(skb, link_header, &ip, sizeof(ip))))
		return -1;
	if (unlikely(ip.version != 4 || ip.ihl < 5))
		return -1;
	map_ipv4(&p->tuple.src, ip.saddr);
	map_ipv4(&p->tuple.dst, ip.daddr);
	p->tuple.protocol = ip.protocol;
	p->transport = link_header + ip.ihl * 4;
	*total = bpf_ntohs(ip.tot_len);
	__u16 offset = bpf_ntohs(ip.frag_off);
	if (unlikely(offset & 0x3fff))
		p->fragment = offset & 0x1fff ? LATER_FRAGMENT : FIRST_FRAGMENT;
	p->identification = ip.id;
	p->check = ip.check;
	p->ttl = ip.ttl;
	p->tos = ip.tos;
	return 0;
}

static __always_inline int parse_ipv6(struct __sk_buff *skb, struct packet *p, __u32 *total)
{
	struct ipv6hdr ip;
	if (load(skb, link_header, &ip, sizeof(ip)))
		return -1;
	if (ip.version != 6)
		return -1;
	p->ipv6 = 1;
	p->ttl = ip.hop_limit;
	p->tos = ip.priority << 4 | ip.flow_lbl[0] >> 4;
	copy_address(&p->tuple.src, &ip.saddr);
	copy_address(&p->tuple.dst, &ip.daddr);
	__u8 next = ip.nexthdr;
	__u32 at = link_header + sizeof(ip);
	*total = sizeof(ip) + bpf_ntohs(ip.payload_len);
	// Hop-by-hop and destination options. A routing header changes the destination,
	// so that such a packet passes.
#pragma unroll
	for (int i = 0; i < 3; i++) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_DSTOPTS)
			break;
		__u8 option[2];
		if (bpf_skb_load_bytes(skb, at, option, sizeof(option)))
			return -1;
		next = option[0];
		at += (option[1] + 1) * 8;
	}
	if (next == IPPROTO_FRAGMENT) {
		struct fragment_header f;
		if (bpf_skb_load_bytes(skb, at, &f, sizeof(f)))
			return -1;
		next = f.next;
		at += sizeof(f);
		if (f.offset & bpf_htons(0xfff8))
			p->fragment = LATER_FRAGMENT;
		else if (f.offset & bpf_htons(1))
			p->fragment = FIRST_FRAGMENT;
		p->identification = f.identification;
	}
	p->tuple.protocol = next;
	p->transport = at;
	return 0;
}

// is_segmented says whether a packet is several segments in one (GRO, or a sender's GSO).
// gso_segs is 0 if it comes from a virtual machine.
static __always_inline int is_segmented(const struct __sk_buff *skb)
{
	return skb->gso_size || skb->gso_segs > 1;
}

// is_single says whether a packet is neither a part of one nor several: userspace can put it back.
static __always_inline int is_single(const struct __sk_buff *skb, const struct packet *p)
{
	return !p->fragment && !is_segmented(skb);
}

// parse reads the headers. It returns -1 for a packet that Sluice leaves alone.
static __always_inline int parse(struct __sk_buff *skb, struct packet *p)
{
	__u32 total = 0;
	// The VLAN's own interface shows the packet again, without the tag.
	if (unlikely(skb->vlan_present))
		return -1;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (parse_ipv4(skb, p, &total))
			return -1;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (parse_ipv6(skb, p, &total))
			return -1;
	} else {
		return -1;
	}
	if (unlikely(is_segmented(skb)))
		total = skb->len - link_header; // the header's may be 0 (BIG TCP)
	if (unlikely(total + link_header > skb->len))
		return -1;
	__s64 left = bytes_left(total, p->transport);
	if (unlikely(left < 0))
		return -1;
	p->payload = left;
	p->end = p->transport + left;
	if (unlikely(p->fragment == LATER_FRAGMENT))
		return 0;
	if (p->tuple.protocol == IPPROTO_TCP) {
		struct tcphdr tcp;
		if (unlikely(load(skb, p->transport, &tcp, sizeof(tcp))))
			return -1;
		if (unlikely(tcp.doff < 5 || left < tcp.doff * 4))
			return -1;
		p->tuple.sport = tcp.source;
		p->tuple.dport = tcp.dest;
		p->sequence = bpf_ntohl(tcp.seq);
		p->ack = bpf_ntohl(tcp.ack_seq);
		p->flags = tcp.fin * FIN | tcp.syn * SYN | tcp.rst * RST | tcp.ack * ACK;
		p->payload = left - tcp.doff * 4;
		return 0;
	}
	if (p->tuple.protocol == IPPROTO_UDP) {
		// The length and the checksum, which an error quotes, are in the place of a sequence number.
		__be16 udp[4];
		if (unlikely(load(skb, p->transport, udp, sizeof(udp)) || left < 8))
			return -1;
		p->tuple.sport = udp[0];
		p->tuple.dport = udp[1];
		p->payload = left - 8;
		p->messages = skb->gso_size ? (p->payload + skb->gso_size - 1) / skb->gso_size : 1;
		p->unchecked = !udp[3];
		if (!unlikely(is_segmented(skb)))
			p->sequence = (__u32)bpf_ntohs(udp[2]) << 16 | bpf_ntohs(udp[3]);
		return 0;
	}
	if (unlikely(serves_sctp && p->tuple.protocol == IPPROTO_SCTP)) {
		struct {
			__be16 source, destination;
			__be32 tag;
		} head;
		struct chunks c = {};
		// Chunks are padded to four bytes.
		if (left < COMMON_HEADER + CHUNK_HEADER || left % 4 || bpf_skb_load_bytes(skb, p->transport, &head, sizeof(head)))
			return -1;
		read_chunks(skb, p->transport + COMMON_HEADER, p->end, &c);
		p->tuple.sport = head.source;
		p->tuple.dport = head.destination;
		p->ack = bpf_ntohl(head.tag);
		p->sequence = c.tag;
		p->chunks = c.kinds;
		p->messages = c.messages;
		p->payload = c.bytes;
		return 0;
	}
	if (p->tuple.protocol == (p->ipv6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return left < 8 ? -1 : 0;
	return -1;
}

#endif
