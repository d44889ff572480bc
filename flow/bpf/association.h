// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Follows the state of SCTP associations. INIT is what SYN is for TCP, INIT ACK what
// SYN-ACK is. The endpoint's COOKIE ACK proves that the client has completed the handshake: only
// a host that received the INIT ACK can make the endpoint send it.
//
// Each side chooses the verification tag of what it receives. So the tag of a direction's
// packets, direction.end, is the initiate tag of the other side's INIT or INIT ACK. fin has
// those of a handshake that is not complete: of the client's INIT, and of its COOKIE ECHO.
#ifndef ASSOCIATION_H
#define ASSOCIATION_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "chunks.h"
#include "layout.h"
#include "maps.h"
#include "packet.h"
#include "track.h"
#include "upcall.h"

// follow_association notes what a packet from the client (0) or the endpoint (1) says
// about the association's begin and end.
static __always_inline void follow_association(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index, int from)
{
	__u32 tag = p->ack;
	if (f->state == ASKING || f->state == MOVING)
		return; // the endpoint has agreed to nothing
	if (!from && (p->chunks & CHUNK_COOKIE_ECHO) && f->fin[0])
		f->fin[1] = tag;
	if (from && (p->chunks & CHUNK_COOKIE_ACK) && f->fin[0] && f->fin[1] && tag == f->fin[0]) {
		f->way[1].end = tag;
		f->way[0].end = f->fin[1];
		f->fin[0] = 0;
		f->fin[1] = 0;
		confirm(f);
	}
	// RFC 9260, 8.5.1: the receiver would believe it.
	if (tag != (p->chunks & REFLECTED ? f->way[!from].end : f->way[from].end))
		return;
	if (p->chunks & CHUNK_ABORT)
		mark_end(f, from ? ENDPOINT_RST : CLIENT_RST);
	else if (p->chunks & CHUNK_SHUTDOWN)
		mark_end(f, from ? ENDPOINT_FIN : CLIENT_FIN);
	if (p->chunks & (CHUNK_ABORT | CHUNK_SHUTDOWN_COMPLETE))
		close_flow(skb, f, index);
}

// follow_association_apart is follow_association for the client's packets.
GLOBAL int follow_association_apart(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	if (p && f)
		follow_association(skb, p, f, index, 0);
	return 0;
}

// follow_ending follows a packet of the client that may end a connection (is_ending), once the node
// has let it pass.
GLOBAL int follow_ending(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	if (!p || !f)
		return 0;
	if (serves_sctp && f->protocol == IPPROTO_SCTP)
		follow_association_apart(skb, p, f, index);
	else if (f->protocol == IPPROTO_TCP)
		follow_tcp_apart(skb, p, f, index);
	return 0;
}

static __always_inline void count_messages(struct flow *f, const struct packet *p, int from)
{
	struct direction *d = &f->way[from];
	if (p->messages)
		__sync_fetch_and_add(&d->packets, p->messages);
	if (p->payload)
		__sync_fetch_and_add(&d->bytes, p->payload);
	note_time(d);
}

// association_from_client follows a packet C -> V.
GLOBAL enum verdict association_from_client(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	if (!p || !f)
		return LEAVE;
	if (is_opening(p)) {
		__u32 state = f->state;
		if (state == OPEN) {
			// The client has not received the INIT ACK, or it begins anew: its endpoint
			// has to know.
			f->fin[0] = p->sequence;
			f->fin[1] = 0;
			if (p->sequence != f->first_sequence)
				challenge(skb, f, index);
		} else if (state >= CLOSED || p->sequence != f->first_sequence) {
			enum verdict v = begin_again(p, f);
			if (v != GO)
				return v;
		} else if (state == MOVING) {
			return ABSORB; // the INIT that userspace has goes to the next endpoint
		}
	} else if (p->fragment != LATER_FRAGMENT && !(p->flags & LATER)) {
		follow_association_apart(skb, p, f, index);
	}
	count_messages(f, p, 0);
	return GO;
}

// association_answer follows what an endpoint sends while it is asked.
static __always_inline enum verdict association_answer(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	int ours = p->ack == f->first_sequence && !(p->chunks & REFLECTED);
	if (ours && (p->chunks & CHUNK_ABORT))
		return handle_refusal(skb, f, index);
	if (ours && (p->chunks & CHUNK_INIT_ACK)) {
		if (__sync_val_compare_and_swap(&f->state, ASKING, OPEN) != ASKING) {
			report_late(skb, f, index);
			return ABSORB;
		}
		// Nobody else sends before this packet has arrived.
		f->way[0].end = f->fin[1] = p->sequence;
		f->way[1].end = f->fin[0] = f->first_sequence;
		f->answered = bpf_ktime_get_ns();
		notice(skb, f, index, EVENT_OPEN);
		return GO;
	}
	if (f->options & OPTION_DIRECT)
		return GO;
	// It belongs to an association that the client has with the endpoint itself.
	return collide(skb, f, index);
}

// association_from_endpoint follows a packet E -> C:m.
GLOBAL enum verdict association_from_endpoint(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	if (!p || !f)
		return LEAVE;
	if (p->fragment != LATER_FRAGMENT) {
		if (f->state == ASKING || f->state == MOVING) {
			enum verdict v = association_answer(skb, p, f, index);
			if (v != GO)
				return v;
		} else {
			follow_association(skb, p, f, index, 1);
		}
		if (p->payload && !f->data)
			f->data = bpf_ktime_get_ns();
	}
	count_messages(f, p, 1);
	return GO;
}

#endif
