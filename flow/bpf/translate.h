// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Rewrites addresses and ports, and keeps checksums right: complete ones, those that
// a device completes later (CHECKSUM_PARTIAL holds the pseudo header's sum alone), and
// the sum that a device has computed (CHECKSUM_COMPLETE).
#ifndef TRANSLATE_H
#define TRANSLATE_H

#include <stddef.h>
#include <linux/bpf.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"
#include "packet.h"
#include "sctp.h"

// IPV6_PSEUDO is BPF_F_IPV6 (Linux 6.16): no checksum of the IPv6 header balances
// changed addresses, so that a device's sum of the packet stays as it is.
#define IPV6_PSEUDO (1ULL << 7)

#define BOTH (2 * sizeof(struct address))

// ports_of are both ports of a tuple, as they lie in a packet.
static __always_inline __be32 ports_of(const struct tuple *t)
{
	return *(const __be32 *)&t->sport;
}

// difference is that of the addresses' sums. Mapped IPv4 addresses have the difference
// of IPv4 addresses.
static __always_inline __s64 difference(const struct tuple *from, const struct tuple *to)
{
	return bpf_csum_diff((__be32 *)&from->src, BOTH, (__be32 *)&to->src, BOTH, 0);
}

// ipv4_difference is the same for IPv4, without a helper.
static __always_inline __s64 ipv4_difference(const struct tuple *from, const struct tuple *to)
{
	__u64 sum = (__u64)(__u32)~from->src.word[3] + (__u32)~from->dst.word[3] + to->src.word[3] + to->dst.word[3];
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

// replace_pseudo updates a checksum that covers the addresses.
static __always_inline int replace_pseudo(struct __sk_buff *skb, __u32 at, __s64 difference, __u64 flags, __u8 ipv6)
{
	flags |= BPF_F_PSEUDO_HDR;
	if (ipv6 && !bpf_l4_csum_replace(skb, at, 0, difference, flags | IPV6_PSEUDO))
		return 0;
	return bpf_l4_csum_replace(skb, at, 0, difference, flags);
}

// store_addresses writes both addresses of an IP header. unbalanced says that no checksum
// balances them in IPv6, so that a device's sum of the packet changes.
static __always_inline int store_addresses(struct __sk_buff *skb, __u32 header, const struct tuple *to, __u8 ipv6, int unbalanced)
{
	if (ipv6)
		return bpf_skb_store_bytes(skb, header + offsetof(struct ipv6hdr, saddr), &to->src, BOTH, unbalanced ? BPF_F_RECOMPUTE_CSUM : 0);
	__be32 both[2] = {to->src.word[3], to->dst.word[3]};
	return bpf_skb_store_bytes(skb, header + offsetof(struct iphdr, saddr), both, sizeof(both), 0);
}

// store_ipv4 writes the outer IPv4 header from its TTL on. Ports that follow it go with it.
static __always_inline int store_ipv4(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, __s64 difference, int hops, int ports)
{
	__u64 sum = (__u16)~p->check + (difference & 0xffff) + ((difference >> 16) & 0xffff);
	if (hops)
		sum += bpf_htons(0xffff - (1 << 8)); // the TTL is the upper byte of its word
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	struct {
		__u8 ttl, protocol;
		__u16 check;
		__be32 both[2], ports;
	} __attribute__((packed)) new = {p->ttl - hops, p->tuple.protocol, ~sum, {to->src.word[3], to->dst.word[3]}, ports_of(to)};
	__u32 size = ports ? sizeof(new) : sizeof(new) - sizeof(new.ports);
	return bpf_skb_store_bytes(skb, link_header + offsetof(struct iphdr, ttl), &new, size, 0);
}

// store_hop_limit writes the outer IPv6 header's.
static __always_inline int store_hop_limit(struct __sk_buff *skb, __u8 limit)
{
	return bpf_skb_store_bytes(skb, link_header + offsetof(struct ipv6hdr, hop_limit), &limit, 1, BPF_F_RECOMPUTE_CSUM);
}

// translate_sctp gives a packet the ports of a tuple. Only the first fragment has the CRC,
// and does not say how much follows it.
static __always_inline int translate_sctp(struct __sk_buff *skb, const struct packet *p, const struct tuple *to)
{
	__be32 old = ports_of(&p->tuple), new = ports_of(to);
	if (old == new)
		return 0;
	if (p->fragment) {
		count(COUNT_SCTP_FRAGMENTS);
		return -1;
	}
	return replace_ports(skb, p->transport, p->end - p->transport, old, new);
}

// translate gives a packet the addresses and ports of a tuple, and a hop limit that is
// smaller by hops (0 or 1).
static __always_inline int translate(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, int hops)
{
	__s64 changed = p->ipv6 ? difference(&p->tuple, to) : ipv4_difference(&p->tuple, to);
	int sctp = unlikely(serves_sctp && p->tuple.protocol == IPPROTO_SCTP);
	int adjacent = 0; // ports to write stand behind the addresses
	int unbalanced = p->fragment == LATER_FRAGMENT || p->unchecked || sctp;
	if (sctp) {
		if (translate_sctp(skb, p, to))
			return -1;
	} else if (unlikely(p->unchecked)) {
		__be32 new = ports_of(to);
		if (bpf_skb_store_bytes(skb, p->transport, &new, sizeof(new), BPF_F_RECOMPUTE_CSUM))
			return -1;
	} else if (p->fragment != LATER_FRAGMENT) {
		__be32 old = ports_of(&p->tuple), new = ports_of(to);
		int udp = p->tuple.protocol == IPPROTO_UDP;
		__u32 at = p->transport + (udp ? offsetof(struct udphdr, check) : offsetof(struct tcphdr, check));
		__u64 flags = udp ? BPF_F_MARK_MANGLED_0 : 0;
		if (replace_pseudo(skb, at, changed, flags, p->ipv6))
			return -1;
		if (old != new) {
			if (bpf_l4_csum_replace(skb, at, old, new, flags | sizeof(new)))
				return -1;
			adjacent = !p->ipv6 && p->transport == link_header + sizeof(struct iphdr);
			if (!adjacent && bpf_skb_store_bytes(skb, p->transport, &new, sizeof(new), 0))
				return -1;
		}
	}
	if (!p->ipv6)
		return store_ipv4(skb, p, to, changed, hops, adjacent);
	if (hops && store_hop_limit(skb, p->ttl - hops))
		return -1;
	return store_addresses(skb, link_header, to, p->ipv6, unbalanced);
}

static __always_inline void swap(struct tuple *to, const struct tuple *from)
{
	*to = *from;
	to->src = from->dst;
	to->dst = from->src;
	to->sport = from->dport;
	to->dport = from->sport;
}

static __always_inline void set_ends(struct tuple *t, const struct address *src, __be16 sport, const struct address *dst, __be16 dport)
{
	t->src = *src;
	t->sport = sport;
	t->dst = *dst;
	t->dport = dport;
}

// set_target sets the tuple that a role's packets get.
static __always_inline void set_target(struct tuple *to, const struct flow *f, enum role role)
{
	__builtin_memset(to, 0, sizeof(*to));
	to->protocol = f->protocol;
	switch (role) {
	case TO_ENDPOINT:
		if (unlikely(f->options & OPTION_NODE))
			return set_ends(to, &f->node, f->node_port, &f->endpoint, f->endpoint_port);
		return set_ends(to, &f->client, f->middle_port, &f->endpoint, f->endpoint_port);
	case MASQUERADE:
		return set_ends(to, &f->node, f->node_port, &f->endpoint, f->endpoint_port);
	case UNMASQUERADE:
		return set_ends(to, &f->endpoint, f->endpoint_port, &f->client, f->middle_port);
	default: // TO_CLIENT
		return set_ends(to, &f->vip, f->vip_port, &f->client, f->client_port);
	}
}

// opposite is the role of the packets that answer a role's.
static __always_inline enum role opposite(enum role role)
{
	return TO_ENDPOINT + TO_CLIENT - role;
}

// set_tuple sets the tuple that a role's packets come with.
static __always_inline void set_tuple(struct tuple *t, const struct flow *f, enum role role)
{
	__builtin_memset(t, 0, sizeof(*t));
	t->protocol = f->protocol;
	switch (role) {
	case TO_ENDPOINT:
		return set_ends(t, &f->client, f->client_port, &f->vip, f->vip_port);
	case MASQUERADE:
		return set_ends(t, &f->client, f->middle_port, &f->endpoint, f->endpoint_port);
	case UNMASQUERADE:
		return set_ends(t, &f->endpoint, f->endpoint_port, &f->node, f->node_port);
	default: // TO_CLIENT, STALE
		if (unlikely(f->options & OPTION_NODE))
			return set_ends(t, &f->endpoint, f->endpoint_port, &f->node, f->node_port);
		return set_ends(t, &f->endpoint, f->endpoint_port, &f->client, f->middle_port);
	}
}

#endif
