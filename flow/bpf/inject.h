// SPDX-License-Identifier: Apache-2.0
// Takes back the packets that userspace has decided about. They come by an AF_PACKET
// socket of the client's interface; their mark names the flow. The entries are made
// here, so that a decision costs userspace one system call, which it shares with others.
#ifndef INJECT_H
#define INJECT_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"
#include "maps.h"
#include "packet.h"
#include "translate.h"
#include "upcall.h"

#define FLOW_BITS 20
#define FLOW_MASK ((1U << FLOW_BITS) - 1) // flow 0 is none: the packet goes to the relay

// claim makes an entry. It returns -1 if another flow has the tuple, unless that is only
// waiting for late answers.
static __always_inline int claim(const struct tuple *t, const struct entry *e)
{
	if (!bpf_map_update_elem(&tuples, t, e, BPF_NOEXIST))
		return 0;
	struct entry *old = bpf_map_lookup_elem(&tuples, t);
	if (!old || (old->flow != e->flow && old->role != STALE))
		return -1;
	*old = *e;
	return 0;
}

// insert makes the entries of a flow. The way back comes first: once packets pass in one
// direction, they pass in both.
static __always_inline int insert(struct __sk_buff *skb, struct flow *f, __u32 index)
{
	struct tuple there, back, t;
	struct entry e = {.flow = index, .role = TO_CLIENT};
	target(&there, f, TO_ENDPOINT);
	swap(&back, &there);
	if (claim(&back, &e))
		return -1;
	if (f->options & OPTION_MASQUERADE) {
		struct tuple hidden;
		target(&hidden, f, MASQUERADE);
		swap(&t, &hidden);
		e.role = UNMASQUERADE;
		int sctp = f->protocol == IPPROTO_SCTP;
		if ((!sctp && has_socket(skb, &t, f->options & OPTION_IPV6)) || claim(&t, &e)) {
			bpf_map_delete_elem(&tuples, &back);
			return -1;
		}
		e.role = MASQUERADE;
		bpf_map_update_elem(&tuples, &there, &e, BPF_ANY);
	} else {
		struct entry *old = bpf_map_lookup_elem(&tuples, &there);
		if (old && old->role == MASQUERADE) // of a session that has ended
			bpf_map_delete_elem(&tuples, &there);
	}
	target(&back, f, TO_CLIENT);
	swap(&t, &back);
	e.role = TO_ENDPOINT;
	return bpf_map_update_elem(&tuples, &t, &e, BPF_ANY);
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
		if (f->state == ASKING && insert(skb, f, index)) {
			count(COUNT_COLLISIONS);
			__sync_fetch_and_or(&f->seen, COLLIDED);
			return TCX_DROP; // the sender gets ENOBUFS
		}
		if (f->protocol == IPPROTO_UDP)
			skb->tc_index = PUT_BACK;
	}
	count(COUNT_INJECTED);
	skb->mark = 0;
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

#endif
