// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The shortcut: a packet of an open flow goes straight to the interface that it leaves by.
// The node's IP stack does not see it. Userspace says where nobody else looks at such packets
// (shortcut.go).
#ifndef SHORTCUT_H
#define SHORTCUT_H

#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "index.h"
#include "layout.h"
#include "maps.h"
#include "packet.h"
#include "track.h"

#define FAMILY_IPV4 2
#define FAMILY_IPV6 10
#define NO_NEIGHBOUR 7 // bpf_fib_lookup has found the interface alone

// Every 1.1 s, one packet per direction takes the IP stack, so that the kernel revalidates the
// neighbour. Packets of the same batch overtake it, which TCP tolerates. A datagram takes the
// stack only after a pause, so that a stream keeps its order; a stream without pauses sends one
// every 34 s (the kernel forgets a neighbour after 60 s). Both are powers of two in ns: 1 << REFRESH.
#define REFRESH 30
#define REFRESH_BUSY 35
#define PAUSE 20000000 // ns: two ticks of the slowest clock

// shortcuts_open says whether packets of a flow take shortcuts at all. Userspace permits that for a second at a
// time. Before shortcuts end, new flows take none: connection tracking has to see their whole handshake.
static __always_inline int shortcuts_open(const struct flow *f, __u64 now)
{
	struct control *c = control();
	return c && c->shortcuts_until > now && (!c->shortcuts_ending || (f->state == OPEN && f->answered < c->shortcuts_ending));
}

// is_plain says whether a packet asks for nothing that only the IP stack does.
static __always_inline int is_plain(struct __sk_buff *skb, const struct packet *p)
{
	__u32 header = p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	return p->transport == link_header + header && !p->fragment && p->ttl > 1 &&
	       (p->tuple.protocol == IPPROTO_TCP || p->tuple.protocol == IPPROTO_UDP) && !skb->mark && skb->pkt_type == PACKET_HOST;
}

// may_go says whether a packet of a flow can only be one that is translated: of an open flow,
// or the endpoint's answer to the client's SYN, which passes the stack. If rules there have translated
// that too, the endpoint knows the client by what they made of it.
static __always_inline int may_go(const struct packet *p, const struct flow *f, int from)
{
	if (!(f->seen & PASSED))
		return 0;
	if (f->state == OPEN)
		return !(p->flags & SYN);
	return f->state == ASKING && from && f->protocol == IPPROTO_TCP && is_syn_ack(p, f);
}

// longest is the length from the IP header on, of a packet or of the segments that it will be.
// Bytes may follow a packet, which the IP stack would cut off: they go along.
static __always_inline __u32 longest(const struct __sk_buff *skb, const struct packet *p)
{
	__u32 whole = skb->len - link_header;
	return skb->gso_size ? whole - p->payload + skb->gso_size : whole;
}

// refreshes says whether a packet takes the IP stack for its neighbour's sake.
static __always_inline int refreshes(const struct flow *f, int from, __u64 now)
{
	__u64 last = f->way[from].last ?: f->started, apart = last ^ now;
	if (!(apart >> REFRESH))
		return 0;
	// Another CPU may be a tick ahead.
	return f->protocol == IPPROTO_TCP || (__s64)(now - last) >= PAUSE || apart >> REFRESH_BUSY;
}

static __always_inline __u32 ways_of(__u32 ifindex)
{
	enum way *w = bpf_map_lookup_elem(&ways, &ifindex);
	return w ? *w : 0;
}

// HOP_LASTS is how long a hop is known, in ns: shorter than changes of routes and neighbours take to arrive.
#define HOP_LASTS 4000000

// known_slot is where a hop of a flow's packets is known, if it is.
static __always_inline struct hop *known_slot(__u32 found)
{
	__u32 at = (flow_in(found) << 1 | (role_in(found) == TO_ENDPOINT)) % HOPS;
	return bpf_map_lookup_elem(&hops, &at);
}

// is_known says whether k is the hop of a packet.
static __always_inline int is_known(const struct hop *k, struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 found, __u64 now)
{
	struct control *c = control();
	return k->reference == found && k->until > now && k->generation == f->generation && k->attempts == f->attempts && c && k->ways_number == c->ways_number &&
	       k->from == skb->ifindex && k->tos == p->tos && k->mtu >= longest(skb, p);
}

// know notes the hop of a packet that bpf_fib_lookup has found.
static __always_inline void know(struct hop *k, struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 found, __u64 now, __u32 ways_number, const struct bpf_fib_lookup *fib)
{
	k->reference = found;
	k->generation = f->generation;
	k->attempts = f->attempts;
	k->ways_number = ways_number;
	k->from = skb->ifindex;
	k->tos = p->tos;
	k->mtu = fib->mtu_result;
	k->ifindex = fib->ifindex;
	k->until = now + HOP_LASTS;
}

// find_shortcut finds where a packet of a flow goes by the routing tables: from the client if it is found as TO_ENDPOINT,
// else from the endpoint. It returns NULL if the packet takes the IP stack: also if its neighbour is
// unknown, or if it is too long.
static __noinline struct hop *find_shortcut(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 found)
{
	if (link_header != ETH_HLEN || (f->options & OPTION_NODE))
		return NULL;
	__u64 now = bpf_ktime_get_coarse_ns();
	int from = role_in(found) != TO_ENDPOINT;
	if (!shortcuts_open(f, now) || !may_go(p, f, from) || !is_plain(skb, p) || refreshes(f, from, now))
		return NULL;
	struct control *c = control();
	struct hop *k = known_slot(found);
	if (!c || !k)
		return NULL;
	if (is_known(k, skb, p, f, found, now))
		return k;
	__u32 number = *(volatile __u32 *)&c->ways_number; // before ways
	if (!(ways_of(skb->ifindex) & WAY_FROM))
		return NULL;
	const struct address *src = from ? &f->endpoint : &f->client, *dst = from ? &f->client : &f->endpoint;
	struct bpf_fib_lookup fib = {
		.family = p->ipv6 ? FAMILY_IPV6 : FAMILY_IPV4,
		.l4_protocol = p->tuple.protocol,
		.sport = from ? f->endpoint_port : f->middle_port,
		.dport = from ? f->middle_port : f->endpoint_port,
		.tot_len = longest(skb, p),
		.ifindex = skb->ifindex,
	};
	if (p->ipv6) {
		fib.flowinfo = bpf_htonl((__u32)p->tos << 20);
		__builtin_memcpy(fib.ipv6_src, src, sizeof(*src));
		__builtin_memcpy(fib.ipv6_dst, dst, sizeof(*dst));
	} else {
		fib.tos = p->tos;
		fib.ipv4_src = src->word[3];
		fib.ipv4_dst = dst->word[3];
	}
	if (bpf_fib_lookup(skb, &fib, sizeof(fib), 0) || fib.ifindex == skb->ifindex)
		return NULL;
	__u32 ways = ways_of(fib.ifindex);
	if (!(ways & WAY_INTO))
		return NULL;
	know(k, skb, p, f, found, now, number, &fib);
	k->peer = ways & WAY_PEER;
	__builtin_memcpy(k->macs[0], fib.dmac, ETH_ALEN);
	__builtin_memcpy(k->macs[1], fib.smac, ETH_ALEN);
	return k;
}

// priority_of is what ip_forward makes of TOS for queues and VLANs: four bits for each value of
// the two bits that count. IPv6 has no such rule.
static __always_inline __u32 priority_of(const struct __sk_buff *skb, const struct packet *p)
{
	return p->ipv6 ? skb->priority : 0x4620 >> (p->tos >> 1 & 12) & 15;
}

// hand_over sends a packet where it goes. Its addresses and its hop limit are right.
static __always_inline int hand_over(struct __sk_buff *skb, const struct packet *p, const struct hop *h)
{
	if (bpf_skb_store_bytes(skb, 0, h->macs, sizeof(h->macs), 0))
		return TCX_DROP;
	count(COUNT_SHORTCUTS);
	// A packet that comes out of a virtual interface has no priority.
	skb->priority = h->peer ? 0 : priority_of(skb, p);
	if (h->peer)
		return bpf_redirect_peer(h->ifindex, 0);
	skb->tc_index = TRANSLATED;
	return bpf_redirect(h->ifindex, 0);
}

#endif
