// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Reports events to userspace: by the ring upcalls what it must answer at once, by notices the rest.
#ifndef UPCALL_H
#define UPCALL_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"
#include "maps.h"
#include "packet.h"

#define DEAD_AFTER 2000000000ULL // ns without a heartbeat
#define SMALL 192                // a SYN with all options
#define LARGE 1600               // a datagram of an Ethernet frame

struct small_event {
	struct event event;
	__u8 packet[SMALL];
};

struct large_event {
	struct event event;
	__u8 packet[LARGE];
};

enum tcp_state { TIME_WAIT = 6, LISTEN = 10 };

static __always_inline void describe(struct event *e, struct __sk_buff *skb, enum event_kind kind, __u32 flow, __u32 service, __u32 generation, enum reason reason)
{
	e->time = bpf_ktime_get_ns();
	e->kind = kind;
	e->flow = flow;
	e->service = service;
	e->generation = generation;
	e->ifindex = skb->ifindex;
	e->reason = reason;
	e->length = 0;
	e->header = link_header;
	e->attempt = e->zero = 0;
}

// wake_up returns how a notice is put into its ring: userspace sleeps until the first one, and reads those
// that follow by a timer.
GLOBAL int wake_up(void)
{
	struct control *c = control();
	if (!c || !*(volatile __u32 *)&c->sleeps)
		return BPF_RB_NO_WAKEUP;
	c->sleeps = 0;
	return BPF_RB_FORCE_WAKEUP;
}

// submit puts an event into its ring. An upcall always wakes userspace.
static __always_inline void submit(void *ring, void *event)
{
	bpf_ringbuf_submit(event, ring == &notices ? wake_up() : 0);
}

// tell reports an event of a flow, without a packet. It returns -1 if the ring is full.
static __always_inline int tell(void *ring, struct __sk_buff *skb, struct flow *f, __u32 index, enum event_kind kind, enum reason reason)
{
	struct event *e = bpf_ringbuf_reserve(ring, sizeof(*e), 0);
	if (!e) {
		count(PASSED_RING_FULL);
		return -1;
	}
	describe(e, skb, kind, index, kind == EVENT_CHALLENGE ? f->service : 0, f->generation, reason);
	e->attempt = f->attempts;
	submit(ring, e);
	return 0;
}

// ENCLOSE hands up a packet in an event of a type. It returns 0 if the packet is up.
#define ENCLOSE(type, size)                                                                  \
	({                                                                                   \
		int status = -1;                                                             \
		struct type *e = bpf_ringbuf_reserve(ring, sizeof(*e), 0);                   \
		if (e) {                                                                     \
			describe(&e->event, skb, kind, index, service, generation, 0);       \
			e->event.length = length;                                            \
			/* The verifier before 6.2 learns no lower bound from length > 0. */  \
			__u64 last = length - 1;                                             \
			asm volatile("" : "+r"(last));                                       \
			if (last < (size) && !bpf_skb_load_bytes(skb, 0, e->packet, last + 1)) { \
				submit(ring, e);                                             \
				status = 0;                                                  \
			} else {                                                             \
				bpf_ringbuf_discard(e, 0);                                   \
			}                                                                    \
		} else {                                                                     \
			count(PASSED_RING_FULL);                                             \
		}                                                                            \
		status;                                                                      \
	})

// hand_up reports an event with the packet.
static __always_inline int hand_up(void *ring, struct __sk_buff *skb, __u32 index, __u32 service, __u32 generation, enum event_kind kind)
{
	__u32 length = skb->len;
	if (length <= SMALL)
		return ENCLOSE(small_event, SMALL);
	if (length <= LARGE)
		return ENCLOSE(large_event, LARGE);
	count(PASSED_SHAPE);
	return -1;
}

// has_socket says whether a socket of this node is connected with a tuple of TCP, or receives
// datagrams with a tuple of UDP. No program can ask for SCTP's.
static __always_inline int has_socket(struct __sk_buff *skb, const struct tuple *t, __u32 ipv6)
{
	struct bpf_sock_tuple k = {};
	struct bpf_sock *s;
	__u32 size = sizeof(k.ipv4);
	if (ipv6) {
		size = sizeof(k.ipv6);
		__builtin_memcpy(k.ipv6.saddr, &t->src, sizeof(k.ipv6.saddr));
		__builtin_memcpy(k.ipv6.daddr, &t->dst, sizeof(k.ipv6.daddr));
		k.ipv6.sport = t->sport;
		k.ipv6.dport = t->dport;
	} else {
		k.ipv4.saddr = t->src.word[3];
		k.ipv4.daddr = t->dst.word[3];
		k.ipv4.sport = t->sport;
		k.ipv4.dport = t->dport;
	}
	// Both are of different types for the verifier: the compiler must not share the load.
	if (t->protocol == IPPROTO_TCP) {
		s = bpf_skc_lookup_tcp(skb, &k, size, BPF_F_CURRENT_NETNS, 0);
		if (!s)
			return 0;
		__u32 state = s->state;
		asm volatile("" : "+r"(state));
		bpf_sk_release(s);
		return state != LISTEN && state != TIME_WAIT;
	}
	s = bpf_sk_lookup_udp(skb, &k, size, BPF_F_CURRENT_NETNS, 0);
	if (!s)
		return 0;
	bpf_sk_release(s);
	return 1;
}

// is_alive says whether userspace is alive. Its last report may be later than now.
static __always_inline int is_alive(const struct control *c, __u64 now)
{
	return (__s64)(now - c->beat) < (__s64)DEAD_AFTER;
}

#define SESSION 180000000000ULL // ns: until the relay has a session, or if sessions has no room for it
#define REFUSAL 10000000LL      // ns: longer than that, the relay has a session

// note_relayed remembers that the relay serves a client's UDP session, so that its other
// datagrams go to the same endpoint.
static __always_inline void note_relayed(const struct packet *p)
{
	if (p->tuple.protocol != IPPROTO_UDP)
		return;
	struct tuple t = p->tuple;
	__u64 until = bpf_ktime_get_ns() + SESSION;
	bpf_map_update_elem(&relayed, &t, &until, BPF_ANY);
}

// is_relayed says whether the relay serves the tuple: it has a session, while userspace is alive, or
// is about to have one. Each datagram, not of what the relay refuses, prolongs the latter.
static __always_inline int is_relayed(const struct packet *p, const struct control *c, __u64 now)
{
	struct tuple t = p->tuple;
	if (t.protocol == IPPROTO_UDP && is_alive(c, now) && bpf_map_lookup_elem(&sessions, &t))
		return 1;
	__u64 *until = bpf_map_lookup_elem(&relayed, &t);
	if (!until || (__s64)(*until - now) <= 0)
		return 0;
	if (p->tuple.protocol == IPPROTO_UDP && (__s64)(*until - now) > REFUSAL)
		*until = now + SESSION;
	return 1;
}

// ask hands the first packet of a flow to userspace. It returns -1 if the packet is the
// relay's, 1 if the relay serves its client already.
static __always_inline int ask(struct __sk_buff *skb, struct packet *p, __u32 service, __u32 before)
{
	struct control *c = control();
	struct load *l = load_of(service);
	if (!c || !l)
		return -1;
	__u64 now = bpf_ktime_get_ns();
	if (!is_alive(c, now)) {
		count(PASSED_NO_HEARTBEAT);
		return -1;
	}
	if ((__s64)(l->asked - l->decided) >= c->most_undecided) {
		count(PASSED_UNDECIDED);
		return -1;
	}
	if (is_relayed(p, c, now)) {
		count(PASSED_RELAYED);
		return 1;
	}
	if (p->tuple.protocol != IPPROTO_UDP) {
		if ((__s64)(l->begun - l->confirmed) >= c->most_unconfirmed) {
			count(PASSED_UNCONFIRMED);
			return -1;
		}
		if (has_socket(skb, &p->tuple, p->ipv6)) {
			count(PASSED_SOCKET);
			return -1;
		}
	}
	// Count first: userspace may answer before this program ends.
	__sync_fetch_and_add(&l->asked, 1);
	if (hand_up(&upcalls, skb, before, service, 0, EVENT_ASK)) {
		__sync_fetch_and_add(&l->decided, 1);
		return -1;
	}
	count(COUNT_ASKED);
	return 0;
}

#endif
