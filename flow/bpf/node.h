// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Clients on this node itself. Services' addresses are local here, so that their packets leave by
// lo, whose egress sends those of open flows to the endpoint:
//
//	C -> V     egress of lo: N:n -> E, by the interface that leads to E
//	E -> N:n   ingress of that: V -> C, as if it had come in by a device of ours
//
// The device accepts packets with an address of this node as source, which are martian elsewhere.
// First packets come in there too, so that ingress, the table and userspace handle them like those of
// other clients. N and n are the node's.
#ifndef NODE_H
#define NODE_H

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "index.h"
#include "layout.h"
#include "maps.h"
#include "packet.h"
#include "shortcut.h"
#include "table.h"
#include "track.h"
#include "upcall.h"

// NODE_MACS are the destination, which is the device's address (flow/device.go), and the source of
// what it receives.
#define NODE_MACS {2, 's', 'l', 'u', 'i', 'c', 2, 's', 'l', 'u', 'i', 'c'}

// deliver redirects a packet to the ingress of the node's own device. passage is its tc_index.
GLOBAL int deliver(struct __sk_buff *skb, __u32 passage)
{
	struct control *c = control();
	struct {
		__u8 macs[2 * ETH_ALEN];
		__be16 protocol;
	} head = {NODE_MACS, skb->protocol};
	if (!c || !c->node_device || (!link_header && bpf_skb_change_head(skb, ETH_HLEN, 0)))
		return TCX_DROP;
	if (bpf_skb_store_bytes(skb, 0, &head, ETH_HLEN, 0))
		return TCX_DROP;
	skb->tc_index = passage;
	return bpf_redirect(c->node_device, BPF_F_INGRESS);
}

// is_from_node says whether a packet at ingress has come from the node itself.
static __always_inline int is_from_node(const struct __sk_buff *skb)
{
	struct control *c = control();
	return c && skb->ifindex == c->node_device;
}

// decides_node says whether the table may decide about the node's own client.
static __always_inline int decides_node(const struct packet *p, const struct served *s)
{
	struct control *c = control();
	return (s->options & DECIDE_NODE) && c && !(p->tuple.protocol == IPPROTO_UDP && (c->hides & ASKS_NODE_UDP));
}

// is_loopback says whether a packet's source is a loopback address: our device delivers no answers to those.
static __always_inline int is_loopback(const struct packet *p)
{
	const struct address *a = &p->tuple.src;
	if (p->ipv6)
		return !(a->word[0] | a->word[1] | a->word[2]) && a->word[3] == bpf_htonl(1);
	return (a->word[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
}

// serves_node says whether a packet of no flow at lo's egress may be the first one of a client on the
// node. Privileged ports are the relay's, because endpoints may admit no others. What comes from a
// Service's own port is the relay's too.
GLOBAL int serves_node(struct __sk_buff *skb, const struct packet *p)
{
	struct control *c = control();
	if (!c || !p || !c->node_device || p->fragment || skb->mark || bpf_ntohs(p->tuple.sport) < FIRST_PORT || is_loopback(p))
		return 0;
	// Only their sender can fragment datagrams of IPv6 that are too long for their way: here, the relay.
	if (p->tuple.protocol == IPPROTO_UDP ? p->ipv6 : p->tuple.protocol != IPPROTO_TCP || !is_opening(p))
		return 0;
	__u64 now = bpf_ktime_get_ns();
	if (c->node_until <= now || !is_alive(c, now))
		return 0;
	struct destination d = {.addr = p->tuple.dst, .port = p->tuple.dport, .protocol = p->tuple.protocol};
	struct served *s = bpf_map_lookup_elem(&destinations, &d);
	if (!s || !(s->options & ASK_NODE))
		return 0;
	d.addr = p->tuple.src;
	d.port = p->tuple.sport;
	return !bpf_map_lookup_elem(&destinations, &d) && !is_relayed(p, c, now);
}

#define TOO_LONG 8 // bpf_fib_lookup: for the route's MTU

// allow_fragments lets the IP stack fragment a datagram. The client's socket believes in the MTU of
// lo: it may have forbidden that, and left out the identification.
GLOBAL int allow_fragments(struct __sk_buff *skb)
{
	const __u32 at = offsetof(struct iphdr, id);
	__be32 old, new = bpf_htonl(bpf_get_prandom_u32() << 16);
	if (bpf_skb_load_bytes(skb, link_header + at, &old, sizeof(old)))
		return -1;
	return bpf_l3_csum_replace(skb, link_header + offsetof(struct iphdr, check), old, new, sizeof(new)) ||
	       bpf_skb_store_bytes(skb, link_header + at, &new, sizeof(new), 0);
}

// send sends a packet of the node's flow, which is translated, to its endpoint. One that is too long
// for its way comes in by the device: the IP stack sends a TCP client the MTU, and fragments a datagram.
GLOBAL int send(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 index)
{
	__u32 found = reference(index, TO_ENDPOINT);
	__u64 now = bpf_ktime_get_coarse_ns();
	struct control *c = control();
	struct hop *k = known_slot(found);
	if (!p || !f || !c || !k)
		return TCX_DROP;
	struct bpf_redir_neigh next = {.nh_family = p->ipv6 ? FAMILY_IPV6 : FAMILY_IPV4};
	int settled = f->state == OPEN; // before, the endpoint may be another one next
	if (settled && is_known(k, skb, p, f, found, now)) {
		__builtin_memcpy(next.ipv6_nh, k->next, sizeof(next.ipv6_nh));
		skb->tc_index = TRANSLATED;
		return bpf_redirect_neigh(k->ifindex, &next, sizeof(next), 0);
	}
	struct bpf_fib_lookup fib = {
		.family = p->ipv6 ? FAMILY_IPV6 : FAMILY_IPV4,
		.l4_protocol = p->tuple.protocol,
		.sport = f->node_port,
		.dport = f->endpoint_port,
		.tot_len = longest(skb, p),
		.ifindex = LOOPBACK,
	};
	if (p->ipv6) {
		fib.flowinfo = bpf_htonl((__u32)p->tos << 20);
		__builtin_memcpy(fib.ipv6_src, &f->node, sizeof(f->node));
		__builtin_memcpy(fib.ipv6_dst, &f->endpoint, sizeof(f->endpoint));
	} else {
		fib.tos = p->tos;
		fib.ipv4_src = f->node.word[3];
		fib.ipv4_dst = f->endpoint.word[3];
	}
	long status = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (status == TOO_LONG) {
		if (p->tuple.protocol == IPPROTO_UDP && !p->ipv6 && !p->fragment && allow_fragments(skb))
			return TCX_DROP;
		return deliver(skb, TRANSLATED);
	}
	if (status && status != NO_NEIGHBOUR)
		return TCX_DROP;
	__builtin_memcpy(next.ipv6_nh, fib.ipv6_dst, sizeof(next.ipv6_nh));
	if (!status && settled) {
		know(k, skb, p, f, found, now, c->ways_number, &fib);
		__builtin_memcpy(k->next, next.ipv6_nh, sizeof(k->next));
	}
	skb->tc_index = TRANSLATED;
	return bpf_redirect_neigh(fib.ifindex, &next, sizeof(next), 0);
}

#endif
