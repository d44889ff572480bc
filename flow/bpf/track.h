// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Follows the state of a flow, by packets that belong to it.
#ifndef TRACK_H
#define TRACK_H

#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"
#include "maps.h"
#include "packet.h"
#include "upcall.h"

enum verdict {
	GO,      // translate the packet
	ABSORB,  // drop it: userspace goes on with it
	LEAVE,   // it does not belong to the flow
	RESTART, // it begins a new connection with the tuple of an old one
};

static __always_inline void mark(struct flow *f, __u32 bits)
{
	if ((f->seen & bits) != bits)
		__sync_fetch_and_or(&f->seen, bits);
}

// notice tells userspace that a flow's state has changed, if userspace follows the flow.
// Userspace sets KNOWN before it reads the state for the first time, and this reads KNOWN
// after the state was changed. Both use atomic operations, so no change is missed.
static __always_inline void notice(struct __sk_buff *skb, struct flow *f, __u32 index, enum event_kind kind)
{
	__u32 seen = *(volatile __u32 *)&f->seen;
	if (seen & KNOWN)
		tell(&notices, skb, f, index, kind, kind == EVENT_CLOSED ? (enum reason)seen : 0);
}

// close_flow tells userspace once that a flow has ended.
static __always_inline void close_flow(struct __sk_buff *skb, struct flow *f, __u32 index)
{
	if (__sync_fetch_and_or(&f->seen, CLOSING_TOLD) & CLOSING_TOLD)
		return;
	f->closed = bpf_ktime_get_ns();
	__sync_lock_test_and_set(&f->state, CLOSED);
	notice(skb, f, index, EVENT_CLOSED);
}

// is_behind says whether a sequence number a equals b or follows it.
static __always_inline int is_behind(__u32 a, __u32 b)
{
	return (__s32)(a - b) >= 0;
}

#define LARGEST_WINDOW (1U << 30) // RFC 7323

// mark_end sets a mark of those that end a connection, and keeps which came first.
static __always_inline void mark_end(struct flow *f, __u32 bit)
{
	if (!f->first_end)
		f->first_end = bit;
	mark(f, bit);
}

// count_again counts the segments of a packet if their sender has sent them again: they have come by
// before, or their receiver has reported that it misses them. Few packets come here.
GLOBAL int count_again(struct __sk_buff *skb, const struct packet *p, struct flow *f, int from)
{
	if (!p || !f)
		return 0;
	from &= 1;
	__u32 size = skb->gso_size, n = size && p->payload ? (p->payload + size - 1) / size : 1;
	__u32 end = f->way[from].end, fin = f->seen & (from ? ENDPOINT_FIN : CLIENT_FIN);
	if (end - (p->sequence + p->payload) < LARGEST_WINDOW)
		f->again[from] += p->payload || (fin && (p->flags & FIN)) ? n : 0;
	else if ((f->seen & (from ? ENDPOINT_MISSED : CLIENT_MISSED)) && p->sequence == end && !fin)
		f->missed[from] += n;
	return 0;
}

// reach counts what is new up to a sequence number.
static __always_inline void reach(struct flow *f, int from, __u32 end)
{
	struct direction *d = &f->way[from];
	__u32 ahead = from ? ENDPOINT_AHEAD : CLIENT_AHEAD;
	d->bytes += end - d->end;
	d->end = end;
	if (unlikely(f->seen & ahead) && is_behind(end, f->ahead[from]))
		__sync_fetch_and_and(&f->seen, ~(ahead | (from ? ENDPOINT_MISSED : CLIENT_MISSED)));
}

// advance counts a segment. Behind a gap, it counts once the receiver acknowledges it: anybody
// can send one that no window lets pass. It returns 1 if the segment lies behind a gap.
static __always_inline int advance(struct flow *f, int from, __u32 sequence, __u32 end)
{
	__u32 old = f->way[from].end, bit = from ? ENDPOINT_AHEAD : CLIENT_AHEAD;
	// Where nothing is new, nothing is written: another CPU may count the next segment meanwhile.
	if (end - old - 1 >= LARGEST_WINDOW)
		return 0;
	if (is_behind(old, sequence)) {
		reach(f, from, end);
		return 0;
	}
	if (!(f->seen & bit) || is_behind(end, f->ahead[from]))
		f->ahead[from] = end;
	mark(f, bit);
	return 1;
}

// catch_up counts what the receiver has acknowledged of the segments behind a gap. f->fin has
// the number after a FIN among them, also when another segment has closed the gap.
static __always_inline void catch_up(struct flow *f, int from, __u32 ack)
{
	__u32 fin = from ? ENDPOINT_FIN : CLIENT_FIN;
	if ((f->seen & (from ? ENDPOINT_AHEAD : CLIENT_AHEAD)) && ack == f->way[from].end)
		mark(f, from ? ENDPOINT_MISSED : CLIENT_MISSED);
	if ((f->seen & fin) || is_behind(f->way[from].end, ack))
		return;
	int ends = ack == f->fin[from];
	reach(f, from, ends || ack == f->ahead[from] + 1 ? ack - 1 : ack);
	if (ends)
		mark_end(f, fin);
}

// is_believed says whether the receiver would believe an RST (RFC 5961, 3): its sequence number is
// what the receiver has acknowledged, or follows what has been sent, or a FIN.
static __always_inline int is_believed(const struct flow *f, const struct packet *p, int from)
{
	return p->sequence == f->way[!from].acked || p->sequence - f->way[from].end <= 1;
}

// confirm notes that the client has completed the handshake.
static __always_inline void confirm(struct flow *f)
{
	if (__sync_fetch_and_or(&f->seen, CONFIRMED) & CONFIRMED)
		return;
	f->confirmed = bpf_ktime_get_ns();
	struct load *l = load_of(f->service);
	if (l)
		__sync_fetch_and_add(&l->confirmed, 1);
}

// challenge reports another SYN, or INIT, with the tuple of an open connection, or an RST that its
// receiver may believe, to userspace. It returns 0 if it does not. As with first packets (ask), a service
// port may not fill the ring: beyond its share, the client has to send the SYN again.
GLOBAL int challenge(struct __sk_buff *skb, struct flow *f, __u32 index)
{
	struct control *c = control();
	if (!f || !c || (f->options & OPTION_DIRECT) || !is_alive(c, bpf_ktime_get_ns()))
		return 0;
	struct load *l = load_of(f->service);
	if (!l || (__s64)(l->asked - l->decided) >= c->most_undecided)
		return 1;
	if (__sync_fetch_and_or(&f->seen, CHALLENGED) & CHALLENGED)
		return 1;
	__sync_fetch_and_add(&l->asked, 1);
	if (tell(&upcalls, skb, f, index, EVENT_CHALLENGE, 0)) {
		__sync_fetch_and_and(&f->seen, ~CHALLENGED);
		__sync_fetch_and_add(&l->decided, 1);
	}
	return 1;
}

// acknowledges_syn says whether a segment acknowledges the SYN, or also the SYN's data.
static __always_inline int acknowledges_syn(const struct packet *p, const struct flow *f)
{
	return (p->flags & ACK) && is_behind(p->ack, f->first_sequence + 1) && is_behind(f->way[0].end, p->ack);
}

// is_syn_ack says whether a segment is the SYN-ACK to the SYN.
static __always_inline int is_syn_ack(const struct packet *p, const struct flow *f)
{
	return (p->flags & (SYN | ACK | FIN | RST)) == (SYN | ACK) && acknowledges_syn(p, f);
}

// follow_tcp notes what a segment from the client (0) or the endpoint (1) says about the
// connection's end.
static __always_inline void follow_tcp(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index, int from)
{
	__u32 fin = from ? ENDPOINT_FIN : CLIENT_FIN, rst = from ? ENDPOINT_RST : CLIENT_RST;
	__u32 other_fin = from ? CLIENT_FIN : ENDPOINT_FIN, acked = from ? CLIENT_FIN_ACKED : ENDPOINT_FIN_ACKED;
	struct direction *d = &f->way[from];
	if (unlikely(p->flags & SYN)) {
		if (from && is_syn_ack(p, f))
			f->again[1]++;
		return; // an old one, or of another connection
	}
	if (unlikely(p->flags & RST)) {
		if (is_believed(f, p, from)) {
			mark_end(f, rst);
			close_flow(skb, f, index);
		} else if (f->state == OPEN && p->sequence - f->way[!from].acked < LARGEST_WINDOW) {
			// Its receiver may have got other segments before it than have come by here, if it is behind a
			// gap, or another CPU handles those: then it believes the RST, and says nothing more.
			mark(f, from ? ENDPOINT_RST_DOUBTED : CLIENT_RST_DOUBTED);
			challenge(skb, f, index);
		}
		return;
	}
	if (unlikely(f->state == ASKING || f->state == MOVING))
		return; // the endpoint has agreed to nothing
	__u32 end = p->sequence + p->payload;
	int gap = 0;
	if (unlikely(p->sequence != d->end || (p->flags & FIN) || (f->seen & (from ? ENDPOINT_MISSED : CLIENT_MISSED))))
		count_again(skb, p, f, from);
	if (!(f->seen & fin)) // a FIN has a sequence number, which is no byte
		gap = advance(f, from, p->sequence, end);
	int ends = unlikely(p->flags & FIN) && !gap && end == d->end;
	if (ends || unlikely((p->flags & FIN) && gap))
		f->fin[from] = end + 1;
	// Nobody acknowledges what was not sent.
	__u32 gone_ahead = f->seen & (from ? CLIENT_AHEAD : ENDPOINT_AHEAD);
	if ((p->flags & ACK) && is_behind((gone_ahead ? f->ahead[!from] : f->way[!from].end) + 1, p->ack)) {
		if (unlikely(gone_ahead || p->ack == f->fin[!from]))
			catch_up(f, !from, p->ack);
		if (!is_behind(d->acked, p->ack)) {
			d->acked = p->ack;
			if (!from && f->state == OPEN)
				confirm(f);
		}
		if (unlikely(f->seen & other_fin) && is_behind(p->ack, f->fin[!from]))
			mark(f, acked);
	}
	if (unlikely(ends)) // after an end that it acknowledges
		mark_end(f, fin);
	if (unlikely((f->seen & (CLIENT_FIN_ACKED | ENDPOINT_FIN_ACKED)) == (CLIENT_FIN_ACKED | ENDPOINT_FIN_ACKED)))
		close_flow(skb, f, index);
}

// follow_tcp_apart is follow_tcp for the client's segments where few packets come by.
GLOBAL int follow_tcp_apart(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	if (p && f)
		follow_tcp(skb, p, f, index, 0);
	return 0;
}

// is_new_client says whether an RST answers a challenge: a client that begins anew resets what
// it does not know, and nobody else has seen the number that userspace has acknowledged.
static __always_inline int is_new_client(const struct packet *p, const struct flow *f)
{
	return (p->flags & RST) && f->challenge && p->sequence == f->challenge;
}

// is_ending says whether a packet of the client may end an open connection whose packets have left
// the node. Where none has, the endpoint may be the node itself.
static __always_inline int is_ending(const struct packet *p, const struct flow *f)
{
	__u32 seen = f->seen;
	if (!(seen & PASSED) || f->state != OPEN || p->fragment == LATER_FRAGMENT)
		return 0;
	if (serves_sctp && p->chunks & (CHUNK_ABORT | CHUNK_SHUTDOWN | CHUNK_SHUTDOWN_COMPLETE))
		return 1;
	return (p->flags & (FIN | RST) || (seen & (ENDPOINT_FIN | ENDPOINT_FIN_ACKED)) == ENDPOINT_FIN) && f->protocol == IPPROTO_TCP && !is_new_client(p, f);
}

// note_time notes that a packet has come. A clock of ticks is cheap, and most packets find
// their tick there: no cache line of the other CPU's has to be written.
static __always_inline void note_time(struct direction *d)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	if (d->last < now)
		d->last = now;
}

// count_packet counts a packet in its direction.
static __always_inline void count_packet(struct flow *f, const struct packet *p, int from)
{
	struct direction *d = &f->way[from];
	if (f->protocol != IPPROTO_TCP) {
		__sync_fetch_and_add(&d->packets, p->messages);
		__sync_fetch_and_add(&d->bytes, p->payload);
	}
	note_time(d);
}

// is_opening says whether a segment asks for a connection.
static __always_inline int is_opening(const struct packet *p)
{
	if (p->tuple.protocol == IPPROTO_SCTP)
		return p->chunks == CHUNK_INIT && !p->ack;
	return (p->flags & (SYN | ACK | RST | FIN)) == SYN;
}

// MOST_UNANSWERED is how many datagrams userspace keeps of a session (unanswered.go).
#define MOST_UNANSWERED 8

// copy_unanswered hands up a copy of a datagram whose endpoint may turn out to be closed.
// Userspace has the first one, and those that it has put back.
static __always_inline void copy_unanswered(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 index)
{
	if (skb->tc_index == PUT_BACK) {
		skb->tc_index = 0;
		return;
	}
	__u64 n = f->way[0].packets;
	if (f->state > MOVING || (f->options & OPTION_DIRECT) || !n || n >= MOST_UNANSWERED || p->fragment || is_segmented(skb) || skb->len > LARGE)
		return;
	struct control *c = control();
	// Copies leave half of the ring to the notices of flows.
	if (c && is_alive(c, bpf_ktime_get_ns()) && bpf_ringbuf_query(&notices, BPF_RB_AVAIL_DATA) < NOTICES / 2)
		hand_up(&notices, skb, index, 0, f->generation, EVENT_UNANSWERED);
}

// adjust_reset gives such an RST the number that the endpoint expects, so that the endpoint ends the
// old connection too.
GLOBAL int adjust_reset(struct __sk_buff *skb, struct packet *p, const struct flow *f)
{
	if (!p || !f)
		return -1;
	__be32 old = bpf_htonl(p->sequence), new = bpf_htonl(f->way[1].acked);
	p->sequence = f->way[1].acked;
	return bpf_l4_csum_replace(skb, p->transport + offsetof(struct tcphdr, check), old, new, sizeof(new)) ||
	       bpf_skb_store_bytes(skb, p->transport + offsetof(struct tcphdr, seq), &new, sizeof(new), 0);
}

// begin_again uses the flow of a client's own connection for the next one. Other flows RESTART.
GLOBAL enum verdict begin_again(const struct packet *p, struct flow *f)
{
	if (!p || !f)
		return ABSORB;
	if (!(f->options & OPTION_DIRECT))
		return RESTART;
	__u32 state = f->state;
	if (state == FREE)
		return ABSORB; // userspace has just freed it
	f->first_sequence = p->sequence;
	f->way[0].end = f->way[1].acked = p->sequence + 1;
	f->first_end = 0;
	__sync_fetch_and_and(&f->seen, PASSED);
	return __sync_val_compare_and_swap(&f->state, state, ASKING) == state ? GO : ABSORB;
}

// absorb_first handles a repeated SYN: the copy that userspace has goes to the next endpoint.
GLOBAL enum verdict absorb_first(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 index)
{
	if (p && f && (f->seen & FIRST_WANTED) && is_single(skb, p))
		hand_up(&upcalls, skb, index, f->service, f->generation, EVENT_BEGUN);
	return ABSORB;
}

// count_syn counts a SYN that the client repeats, unlike the one that userspace puts back.
GLOBAL int count_syn(struct __sk_buff *skb, const struct packet *p, struct flow *f)
{
	if (p && f && is_opening(p) && p->sequence == f->first_sequence && f->state < CLOSED && !(f->options & OPTION_DIRECT) &&
	    (f->state != ASKING || ((f->seen & PASSED) && skb->tc_index != PUT_BACK)))
		f->again[0]++;
	return 0;
}

// follow_client follows a packet C -> V. apart is 1 where few packets come by.
static __always_inline enum verdict follow_client(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index, const int apart)
{
	if (unlikely(p->flags & SYN))
		count_syn(skb, p, f);
	if (f->protocol == IPPROTO_TCP && p->fragment != LATER_FRAGMENT) {
		__u32 state = f->state;
		if (!unlikely(is_opening(p))) {
			if (unlikely(is_new_client(p, f)))
				adjust_reset(skb, p, f);
			if (apart)
				follow_tcp_apart(skb, p, f, index);
			else if (!unlikely(p->flags & LATER))
				follow_tcp(skb, p, f, index, 0);
		} else if (state == OPEN) {
			if (p->sequence != f->first_sequence && challenge(skb, f, index))
				return ABSORB;
		} else {
			if (state >= CLOSED || p->sequence != f->first_sequence) {
				enum verdict v = begin_again(p, f);
				if (v != GO)
					return v;
			} else if (state == MOVING) {
				return absorb_first(skb, p, f, index);
			}
			advance(f, 0, p->sequence + 1, p->sequence + 1 + p->payload); // TCP Fast Open
		}
	}
	if (f->protocol == IPPROTO_UDP) {
		if (p->fragment != LATER_FRAGMENT && f->way[0].end != p->sequence)
			f->way[0].end = p->sequence;
		copy_unanswered(skb, p, f, index);
	}
	count_packet(f, p, 0);
	return GO;
}

// report_late hands up the SYN-ACK of an endpoint that was given up.
static __always_inline void report_late(struct __sk_buff *skb, struct flow *f, __u32 index)
{
	hand_up(&upcalls, skb, index, 0, f->generation, EVENT_LATE);
	count(COUNT_LATE);
}

// handle_refusal handles an RST or an ABORT in answer to the first packet.
GLOBAL enum verdict handle_refusal(struct __sk_buff *skb, struct flow *f, __u32 index)
{
	if (!f)
		return LEAVE;
	if (f->state == MOVING)
		return ABSORB; // userspace knows already
	struct control *c = control();
	if (!(f->options & OPTION_DIRECT) && c && is_alive(c, bpf_ktime_get_ns())) {
		count(COUNT_REFUSED);
		tell(&upcalls, skb, f, index, EVENT_REFUSED, REASON_RST);
		return ABSORB;
	}
	mark_end(f, ENDPOINT_RST); // nobody could choose another endpoint
	close_flow(skb, f, index);
	return GO;
}

// collide asks userspace to move a flow to another port than its client's own.
static __always_inline enum verdict collide(struct __sk_buff *skb, struct flow *f, __u32 index)
{
	count(COUNT_COLLISIONS);
	tell(&upcalls, skb, f, index, EVENT_COLLISION, 0);
	return LEAVE;
}

// handle_answer follows what an endpoint sends while it is asked.
GLOBAL enum verdict handle_answer(struct __sk_buff *skb, const struct packet *p, struct flow *f, __u32 index)
{
	if (!p || !f)
		return LEAVE;
	if ((p->flags & RST) && acknowledges_syn(p, f))
		return handle_refusal(skb, f, index);
	if (is_syn_ack(p, f)) {
		if (__sync_val_compare_and_swap(&f->state, ASKING, OPEN) != ASKING) {
			report_late(skb, f, index);
			return ABSORB;
		}
		// Nobody else sends before this packet has arrived.
		f->way[0].acked = p->sequence;
		f->way[1].acked = p->ack;
		f->way[1].end = p->sequence + 1;
		advance(f, 1, p->sequence + 1, p->sequence + 1 + p->payload);
		f->answered = bpf_ktime_get_ns();
		notice(skb, f, index, EVENT_OPEN);
		return GO;
	}
	if (f->options & OPTION_DIRECT)
		return GO; // of an old connection by the same port
	// Not an answer to this SYN: it belongs to a connection that the client has to the
	// endpoint itself, with the same ports.
	return collide(skb, f, index);
}

// is_unheard says whether an endpoint can answer no datagram of a session: what it sends is
// not for the interface that they came by, and the node has forwarded none. Perhaps somebody
// else sent them in the client's name, and the node's own rules dropped them: then this is for a
// session that the client has with the endpoint itself. Nobody else has a port of userspace's.
static __always_inline int is_unheard(const struct __sk_buff *skb, const struct flow *f)
{
	return !(f->seen & PASSED) && f->ifindex != skb->ifindex && !(f->options & OPTION_MOVED);
}

// follow_endpoint follows a packet E -> C:m.
static __always_inline enum verdict follow_endpoint(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	if (p->fragment != LATER_FRAGMENT) {
		if (f->protocol == IPPROTO_TCP) {
			if (unlikely(f->state == ASKING || f->state == MOVING)) {
				enum verdict v = handle_answer(skb, p, f, index);
				if (v != GO)
					return v;
			} else {
				follow_tcp(skb, p, f, index, 1);
			}
		} else if (unlikely(f->state == ASKING)) {
			if (is_unheard(skb, f)) // the endpoint may be the node, so that nothing is forwarded
				return skb->ingress_ifindex ? LEAVE : collide(skb, f, index);
			if (__sync_val_compare_and_swap(&f->state, ASKING, OPEN) == ASKING)
				f->answered = bpf_ktime_get_ns();
		}
		if (unlikely(p->payload && !f->data))
			f->data = bpf_ktime_get_ns();
	}
	count_packet(f, p, 1);
	return GO;
}

#endif
