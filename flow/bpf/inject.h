// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Takes back the packets that userspace has decided about. They come by an AF_PACKET
// socket of the client's interface; their mark names the flow. Its tuples are entered
// here, so that a decision costs userspace one system call, which it shares with others.
#ifndef INJECT_H
#define INJECT_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "index.h"
#include "layout.h"
#include "maps.h"
#include "packet.h"
#include "translate.h"
#include "upcall.h"

// claim enters a tuple for a flow. It returns -1 if another flow has it, unless that is only
// waiting for late answers.
static __always_inline int claim(const struct tuple *t, __u32 flow, enum role role)
{
	if (!put(t, flow, role))
		return 0;
	__u32 old = find(t);
	if (!old || (flow_in(old) != flow && role_in(old) != STALE))
		return -1;
	return exchange(t, old, reference(flow, role));
}

// take_over enters a tuple for a flow, whoever has it.
static __always_inline int take_over(const struct tuple *t, __u32 flow, enum role role)
{
	__u32 old = find(t);
	return old ? exchange(t, old, reference(flow, role)) : put(t, flow, role);
}

// is_occupied says whether an endpoint has a connection, or one in TIME-WAIT, by a flow's way back. The endpoint answers
// one SYN among that connection's segments, and perhaps no other one within half a second.
static __always_inline int is_occupied(const struct tuple *back)
{
	__u64 *until = back->protocol == IPPROTO_TCP ? bpf_map_lookup_elem(&occupied, back) : NULL;
	return until && (__s64)(*until - bpf_ktime_get_ns()) > 0;
}

// insert enters the tuples of a flow. The way back comes first: once packets pass in one
// direction, they pass in both. new says that no flow may have the client's tuple.
GLOBAL int insert(struct __sk_buff *skb, const struct flow *f, __u32 index, int new)
{
	struct tuple t;
	if (!f)
		return -1;
	set_tuple(&t, f, TO_CLIENT);
	if ((f->options & OPTION_NODE) && has_socket(skb, &t, f->options & OPTION_IPV6))
		return -1; // the node asks the endpoint itself by that port
	if ((!(f->options & OPTION_MASQUERADE) && is_occupied(&t)) || claim(&t, index, TO_CLIENT))
		return -1;
	if (f->options & OPTION_MASQUERADE) {
		int sctp = f->protocol == IPPROTO_SCTP;
		set_tuple(&t, f, UNMASQUERADE);
		if (is_occupied(&t) || (!sctp && has_socket(skb, &t, f->options & OPTION_IPV6)) || claim(&t, index, UNMASQUERADE))
			goto undo;
		set_tuple(&t, f, MASQUERADE);
		__u32 old = find(&t);
		if (old == reference(index, TO_CLIENT))
			goto undo; // a client that is the endpoint, by the endpoint's port: both ways look alike between the hooks
		if (role_in(old) == TO_ENDPOINT || take_over(&t, index, MASQUERADE))
			goto undo; // the client's own connection to the endpoint has another port by this one (direct.h)
	} else if (!(f->options & OPTION_NODE)) {
		set_tuple(&t, f, MASQUERADE);
		__u32 old = find(&t);
		if (role_in(old) == MASQUERADE) // of a session that has ended
			exchange(&t, old, 0);
	}
	set_tuple(&t, f, TO_ENDPOINT);
	if (!(new ? put(&t, index, TO_ENDPOINT) : take_over(&t, index, TO_ENDPOINT)))
		return 0;
undo:
	for (enum role role = MASQUERADE; role <= TO_CLIENT; role++) {
		set_tuple(&t, f, role);
		exchange(&t, reference(index, role), 0);
	}
	return -1;
}

// injected handles a packet of userspace. It returns -1 for all other packets.
static __always_inline int injected(struct __sk_buff *skb)
{
	struct control *c = control();
	if (!c || skb->ingress_ifindex || (skb->mark & ~FLOW_MASK) != c->magic)
		return -1;
	__u32 index = skb->mark & FLOW_MASK;
	if (index) {
		struct flow *f = flow_of(index);
		if (!f || f->ifindex != skb->ifindex || !f->inject)
			return -1;
		__sync_fetch_and_add(&f->inject, -1);
		if (f->state == ASKING && insert(skb, f, index, 0)) {
			count(COUNT_COLLISIONS);
			__sync_fetch_and_or(&f->seen, COLLIDED);
			return TCX_DROP; // the sender gets ENOBUFS
		}
		skb->tc_index = PUT_BACK;
	}
	count(COUNT_INJECTED);
	skb->mark = 0;
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

#endif
