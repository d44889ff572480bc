// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Translates ICMP errors: their addresses, and those of the packet that they quote.
#ifndef ICMP_H
#define ICMP_H

#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "direct.h"
#include "index.h"
#include "layout.h"
#include "maps.h"
#include "node.h"
#include "packet.h"
#include "shortcut.h"
#include "translate.h"
#include "upcall.h"

enum { ICMP_HEADER = 8, ICMP_CHECKSUM = 2, QUOTED = 8 };
enum { UNREACHABLE = 3, EXCEEDED = 11, PROBLEM = 12, CODE_PORT = 3, CODE_TOO_BIG = 4 };
enum { UNREACHABLE6 = 1, TOO_BIG6 = 2, PROBLEM6 = 4, CODE_PORT6 = 4 };

struct icmp {
	__u8 type, code;
	__u32 quoted;       // offset of the quoted IP header
	__u32 ports;        // offset of its ports
	__u32 sequence;     // as in struct packet: TCP: its sequence number; SCTP: the initiate tag, if it is an INIT
	struct tuple tuple; // of the answer to the quoted packet
};

// quoted_init returns the initiate tag of a quoted INIT, or 0. INIT has no verification
// tag.
static __always_inline __u32 quoted_init(struct __sk_buff *skb, const struct packet *p, const struct icmp *i)
{
	struct {
		struct chunk_header head;
		__be32 tag;
	} init;
	__u32 at = i->ports + COMMON_HEADER;
	if (at + sizeof(init) > p->transport + p->payload || bpf_skb_load_bytes(skb, at, &init, sizeof(init)))
		return 0;
	return init.head.type == TYPE_INIT ? bpf_ntohl(init.tag) : 0;
}

// read_quote reads the packet that an error quotes.
GLOBAL int read_quote(struct __sk_buff *skb, const struct packet *p, struct icmp *i)
{
	__u8 head[2];
	if (!p || !i || bpf_skb_load_bytes(skb, p->transport, head, sizeof(head)))
		return -1;
	i->type = head[0];
	i->code = head[1];
	i->quoted = p->transport + ICMP_HEADER;
	if (p->ipv6) {
		if (i->type < UNREACHABLE6 || i->type > PROBLEM6)
			return -1;
		struct ipv6hdr ip;
		if (bpf_skb_load_bytes(skb, i->quoted, &ip, sizeof(ip)) || ip.version != 6)
			return -1;
		copy_address(&i->tuple.dst, &ip.saddr);
		copy_address(&i->tuple.src, &ip.daddr);
		i->tuple.protocol = ip.nexthdr;
		i->ports = i->quoted + sizeof(ip);
	} else {
		if (i->type != UNREACHABLE && i->type != EXCEEDED && i->type != PROBLEM)
			return -1;
		struct iphdr ip;
		if (bpf_skb_load_bytes(skb, i->quoted, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
			return -1;
		if (ip.frag_off & bpf_htons(0x1fff))
			return -1;
		map_ipv4(&i->tuple.dst, ip.saddr);
		map_ipv4(&i->tuple.src, ip.daddr);
		i->tuple.protocol = ip.protocol;
		i->ports = i->quoted + ip.ihl * 4;
	}
	int sctp = serves_sctp && i->tuple.protocol == IPPROTO_SCTP;
	if (i->tuple.protocol != IPPROTO_TCP && i->tuple.protocol != IPPROTO_UDP && !sctp)
		return -1;
	// Each error quotes eight bytes behind the IP header (RFC 792).
	if (i->ports + QUOTED > p->transport + p->payload)
		return -1;
	struct {
		__be16 source, destination;
		__be32 sequence;
	} quoted;
	if (bpf_skb_load_bytes(skb, i->ports, &quoted, sizeof(quoted)))
		return -1;
	i->tuple.dport = quoted.source;
	i->tuple.sport = quoted.destination;
	i->sequence = bpf_ntohl(quoted.sequence);
	if (sctp)
		i->sequence = i->sequence ? 0 : quoted_init(skb, p, i);
	return 0;
}

// is_unreachable says why an error refuses a flow: a reason, or -1.
static __always_inline int is_unreachable(const struct packet *p, const struct icmp *i)
{
	if (p->ipv6)
		return i->type != UNREACHABLE6 ? -1 : i->code == CODE_PORT6 ? REASON_PORT : REASON_HOST;
	if (i->type != UNREACHABLE || i->code == CODE_TOO_BIG)
		return -1;
	return i->code == CODE_PORT ? REASON_PORT : REASON_HOST;
}

// replace_quoted updates the checksum of the quoted segment, which lies in the error if
// that quotes enough. Senders may recognize their packet by it. It returns 1 if there is
// a checksum, 0 if not, -1 on an error. SCTP's CRC stays: senders go by the verification tag.
static __always_inline int replace_quoted(struct __sk_buff *skb, const struct packet *p, const struct icmp *i, __be32 old, __be32 new, __s64 addresses)
{
	if (i->tuple.protocol == IPPROTO_SCTP)
		return 0;
	int udp = i->tuple.protocol == IPPROTO_UDP;
	__u32 at = i->ports + (udp ? offsetof(struct udphdr, check) : offsetof(struct tcphdr, check));
	__u64 flags = udp ? BPF_F_MARK_MANGLED_0 : 0;
	__be16 check;
	if (at + sizeof(check) > p->transport + p->payload)
		return 0;
	if (bpf_skb_load_bytes(skb, at, &check, sizeof(check)))
		return -1;
	if (udp && !check)
		return 0;
	if (bpf_l4_csum_replace(skb, at, 0, addresses, flags) || bpf_l4_csum_replace(skb, at, old, new, flags | sizeof(new)))
		return -1;
	return 1;
}

// turned are ports in the opposite order.
static __always_inline __be32 turned(__be32 ports)
{
	return ports << 16 | ports >> 16;
}

// rewrite_quoted gives the quoted packet the addresses that a role's packets get, and keeps the
// error's checksum right.
GLOBAL int rewrite_quoted(struct __sk_buff *skb, const struct packet *p, const struct icmp *i, const struct flow *f, enum role role)
{
	if (!p || !i || !f)
		return -1;
	struct tuple is;
	set_tuple(&is, f, opposite(role)); // what the quoted packet was before
	__u32 check = p->transport + ICMP_CHECKSUM;
	__be32 old = turned(ports_of(&i->tuple)), new = ports_of(&is);
	__s64 changed = difference(&i->tuple, &is); // of sums, whose order does not count
	int balanced = replace_quoted(skb, p, i, old, new, changed);
	if (balanced < 0 || bpf_skb_store_bytes(skb, i->ports, &new, sizeof(new), 0))
		return -1;
	// A checksum in the quoted segment balances its ports and the quoted addresses.
	if (!balanced && bpf_l4_csum_replace(skb, check, old, new, sizeof(new)))
		return -1;
	if (p->ipv6) {
		if (!balanced && bpf_l4_csum_replace(skb, check, 0, changed, 0))
			return -1;
	} else {
		// The quoted IP header's checksum balances the quoted addresses too. If both
		// do, the difference is that of the opposite change.
		if (balanced && bpf_l4_csum_replace(skb, check, 0, difference(&is, &i->tuple), 0))
			return -1;
		if (bpf_l3_csum_replace(skb, i->quoted + offsetof(struct iphdr, check), 0, changed, 0))
			return -1;
	}
	return store_addresses(skb, i->quoted, &is, p->ipv6, 0);
}

// rewrite_error gives the error itself the same addresses, as far as it has those of the quoted
// packet.
GLOBAL int rewrite_error(struct __sk_buff *skb, const struct packet *p, const struct icmp *i, const struct flow *f, enum role role)
{
	if (!p || !i || !f)
		return -1;
	struct tuple to;
	set_target(&to, f, role);
	if (!same_address(&p->tuple.src, &i->tuple.src))
		to.src = p->tuple.src;
	if (!same_address(&p->tuple.dst, &i->tuple.dst))
		to.dst = p->tuple.dst;
	__s64 changed = difference(&p->tuple, &to);
	if (p->ipv6 ? replace_pseudo(skb, p->transport + ICMP_CHECKSUM, changed, 0, 1)
		    : bpf_l3_csum_replace(skb, link_header + offsetof(struct iphdr, check), 0, changed, 0))
		return -1;
	return store_addresses(skb, link_header, &to, p->ipv6, 0);
}

// is_quote says whether an error quotes a datagram that the client has sent: its length, and its
// checksum as it is behind this node. Where a device was to complete the checksum, it was the sum of
// the pseudo header alone, and nobody knows what the device made of it.
static __always_inline int is_quote(const struct icmp *i, const struct flow *f, __u32 sent)
{
	if (!sent)
		return 1; // segments: their lengths are others
	if ((sent ^ i->sequence) >> 16)
		return 0;
	struct tuple is; // of the answer, as i->tuple: sums know no order
	set_target(&is, f, TO_CLIENT);
	__u64 sum = (__u32)bpf_csum_diff(NULL, 0, (__be32 *)&is.src, BOTH, 0);
	sum += bpf_htons(sent >> 16) + bpf_htons(IPPROTO_UDP);
	__u16 check = bpf_htons(sent), quoted = bpf_htons(i->sequence);
	if (!check || check % 0xffff == sum % 0xffff)
		return 1;
	__s64 changed = difference(&i->tuple, &is);
	sum = (__u16)~quoted + (__u64)(__u32)changed + (__u32)~ports_of(&i->tuple) + ports_of(&is);
	return (__u16)~check % 0xffff == sum % 0xffff;
}

#define SILENT 1000000000ULL // ns

// is_from_endpoint says whether an error at egress comes from a session's endpoint. IPv6 may answer
// from another address of its own: then the error has come in where packets to the endpoint leave.
// An endpoint that answers is not closed.
GLOBAL int is_from_endpoint(struct __sk_buff *skb, const struct packet *p, const struct flow *f)
{
	if (!p || !f)
		return 0;
	if (same_address(&p->tuple.src, &f->endpoint))
		return 1;
	if (!p->ipv6 || bpf_ktime_get_coarse_ns() - f->way[1].last < SILENT)
		return 0;
	struct bpf_fib_lookup fib = {.family = FAMILY_IPV6, .l4_protocol = IPPROTO_UDP, .sport = f->middle_port, .dport = f->endpoint_port, .ifindex = skb->ifindex};
	__builtin_memcpy(fib.ipv6_src, &f->client, sizeof(f->client));
	__builtin_memcpy(fib.ipv6_dst, &f->endpoint, sizeof(f->endpoint));
	long found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	return (!found || found == NO_NEIGHBOUR) && fib.ifindex == skb->ingress_ifindex;
}

// refuses_session says whether a session's endpoint says that it is closed. Only the endpoint knows
// its ports, and what was sent to it.
GLOBAL int refuses_session(struct __sk_buff *skb, const struct packet *p, const struct icmp *i, const struct flow *f, int reason)
{
	if (!p || !i || !f)
		return 0;
	if (reason != REASON_PORT || !is_from_endpoint(skb, p, f))
		return 0;
	return is_quote(i, f, f->way[0].end) || (f->state != OPEN && is_quote(i, f, f->first_sequence));
}

// translate_error handles an ICMP error at a hook. It returns TCX's verdict.
GLOBAL int translate_error(struct __sk_buff *skb, const struct packet *p, int egress)
{
	struct icmp i = {};
	if (!p || p->fragment || read_quote(skb, p, &i))
		return TCX_NEXT;
	__u32 found = find(&i.tuple);
	if (!found)
		return TCX_NEXT;
	enum role role = role_in(found);
	__u32 index = flow_in(found);
	struct flow *f = flow_of(index);
	if (!f)
		return TCX_NEXT;
	if (!egress && is_clients_own(skb, role, f)) {
		skb->tc_index = TRANSLATED;
		return TCX_NEXT;
	}
	int own = f->options & OPTION_NODE; // its answers are translated where they come in
	if (own ? role == TO_ENDPOINT || (egress && skb->ifindex != LOOPBACK) : egress != (role == MASQUERADE || role == TO_CLIENT || role == STALE))
		return TCX_NEXT;
	count(COUNT_ICMP);
	if (role == STALE)
		return TCX_DROP;
	if (role == TO_CLIENT && !(f->options & OPTION_DIRECT)) {
		struct control *c = control();
		int heard = c && is_alive(c, bpf_ktime_get_ns()); // else the client has to know
		int reason = is_unreachable(p, &i);
		if (f->protocol == IPPROTO_UDP && heard && (reason == REASON_PORT || f->state == ASKING) && reason >= 0 && !refuses_session(skb, p, &i, f, reason))
			return TCX_DROP; // of nobody who would know
		enum state state = f->state;
		if (reason >= 0 && (state == ASKING || state == MOVING)) {
			// Another one is about the client's own connection to the endpoint.
			if (f->protocol != IPPROTO_UDP && i.sequence != f->first_sequence)
				return TCX_NEXT;
			if (state == MOVING)
				return TCX_DROP; // userspace knows already
			if (heard) {
				count(COUNT_REFUSED);
				tell(&upcalls, skb, f, index, EVENT_REFUSED, reason);
				return TCX_DROP;
			}
		} else if (reason == REASON_PORT && heard && f->protocol == IPPROTO_UDP) {
			tell(&upcalls, skb, f, index, EVENT_UNREACHABLE, reason);
			return TCX_DROP;
		}
	}
	if (role == UNMASQUERADE)
		skb->tc_index = HALFWAY;
	if (rewrite_quoted(skb, p, &i, f, role) || rewrite_error(skb, p, &i, f, role))
		return TCX_DROP;
	return own && !egress ? deliver(skb, TRANSLATED) : TCX_NEXT;
}

#endif
