// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Decides about new flows where the Service alone does, so that no client waits for
// userspace, and goes on while that is away. Userspace is asked about all others.
#ifndef TABLE_H
#define TABLE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "index.h"
#include "inject.h"
#include "layout.h"
#include "maps.h"
#include "packet.h"
#include "shortcut.h"
#include "translate.h"
#include "upcall.h"

#define LOOPBACK 1 // the interface

#define TAKE_TRIES 8

// Ports that translated packets get (ports.go).
#define FIRST_PORT 1024
#define LAST_PORT 9999

// is_node_port says whether a port may be one that hidden clients have towards their endpoints.
static __always_inline int is_node_port(__be16 port)
{
	return (__u32)bpf_ntohs(port) - FIRST_PORT <= LAST_PORT - FIRST_PORT;
}

// take returns the index of a free flow, or 0.
static __always_inline __u32 take(struct control *c)
{
	for (int i = 0; i < TAKE_TRIES; i++) {
		__u64 at = c->taken;
		// Adding nothing is a barrier: the slot is read after this.
		if (at == __sync_fetch_and_add(&c->given, 0))
			return 0;
		__u32 slot = at & c->spare_mask;
		struct spare *s = bpf_map_lookup_elem(&spares, &slot);
		if (!s)
			return 0;
		__u32 index = *(volatile __u64 *)&s->flow;
		if (__sync_val_compare_and_swap(&c->taken, at, at + 1) == at)
			return index;
	}
	return 0;
}

static __always_inline struct origin *origin_of(const struct address *a)
{
	struct origin_key key = {.bits = 8 * sizeof(*a), .addr = *a};
	return bpf_map_lookup_elem(&origins, &key);
}

// is_admitted says whether a destination's source ranges admit a client (A3.10).
static __always_inline int is_admitted(const struct packet *p, const struct served *s)
{
	if (!s->sources.half[0] && !s->sources.half[1])
		return 1;
	struct range key = {.bits = 8 * (sizeof(key) - sizeof(key.bits)), .set = s->sources, .addr = p->tuple.src};
	return bpf_map_lookup_elem(&ranges, &key) != NULL;
}

// same_link says whether a client's hosts reach an address without this node.
static __always_inline int same_link(const struct origin *client, const struct address *a)
{
	if (!client || !client->link)
		return 0;
	struct origin *o = origin_of(a);
	return o && o->link == client->link;
}

// remembered returns the number of the endpoint that session affinity gives a client, or -1: userspace has
// to choose one. A client that is not remembered gets the same endpoint each time, until it is, and
// perhaps another one after each time that it was forgotten.
GLOBAL int remembered(const struct packet *p, const struct served *s, __u32 list, __u32 count)
{
	struct control *c = control();
	if (!p || !s || !c)
		return -1;
	__u64 now = bpf_ktime_get_ns();
	struct client client = {.group = s->group, .addr = p->tuple.src};
	struct pin *pin = bpf_map_lookup_elem(&clients, &client);
	if (pin && (__s64)(now - pin->used) < (__s64)s->window) { // A5.2
		struct member member = {.list = list, .port = pin->port, .addr = pin->addr};
		__u32 *number = bpf_map_lookup_elem(&members, &member); // A5.3
		if (number) {
			pin->used = now;
			return *number;
		}
	}
	if ((s->options & ASK_NEW) && is_alive(c, now))
		return -1;
	struct tuple t = {.src = p->tuple.src, .dst = {.word = {s->group.half[0], s->group.half[1]}}};
	if (pin)
		t.dst.word[2] = pin->used;
	return (hash_of(&t) >> 32) * count >> 32;
}

// choose returns an endpoint that serves a client without userspace, or NULL. It sets whether the
// endpoint has to see the node's address: also if it is the client, or if its replies would not pass
// this node. own says that the client is on the node itself, so that it sees one of the node's anyway:
// then whether that is the one that routing chooses.
static __always_inline struct place *choose(const struct packet *p, struct served *s, const struct control *c, int own, int *hidden)
{
	struct origin *o = origin_of(&p->tuple.src);
	int pod = o && o->pod;
	__u32 count = pod ? s->pods_count : s->count;
	struct slot slot = {.list = pod ? s->pods_list : s->list};
	int itself = same_address(&p->tuple.src, &p->tuple.dst); // on the node, the kernel chooses the Service's address
	if (!count || (itself && !own))
		return NULL;
	if (s->window)
		slot.number = remembered(p, s, slot.list, count); // -1: nothing has that number
	else
		slot.number = (s->options & DECIDE_RANDOM ? bpf_get_prandom_u32() : __sync_fetch_and_add(&s->turn, 1)) % count;
	struct place *e = bpf_map_lookup_elem(&places, &slot);
	if (!e)
		return NULL;
	int hides = s->options & (pod ? HIDE_PODS : HIDE_OTHERS);
	if (own)
		*hidden = hides || itself || !o || !o->own || (c->hides & HIDES_NODE);
	else
		*hidden = !e->own && (hides || same_address(&e->addr, &p->tuple.src) || same_link(o, &e->addr));
	return e;
}

// has_room says whether a service port may have another flow. Beyond its part of all, it has what
// others do not need.
static __always_inline int has_room(const struct control *c, const struct load *l)
{
	return (__s64)(l->opened - l->ended) < c->most_flows || (__s64)(c->given - c->taken) > c->least_spare;
}

// is_open says whether the table may decide about a packet now.
static __always_inline int is_open(struct __sk_buff *skb, struct packet *p, const struct control *c, const struct load *l, __u64 now)
{
	if (now > c->decides_until || (l->ask_until > now && is_alive(c, now)))
		return 0;
	if (!has_room(c, l))
		return 0;
	if (p->tuple.protocol != IPPROTO_TCP)
		return !is_relayed(p, c, now);
	return (__s64)(l->begun - l->confirmed) < c->most_unconfirmed && !has_socket(skb, &p->tuple, p->ipv6);
}

static __always_inline int is_reply_port(const struct control *c, __u16 port)
{
	return c->last_reply && port >= c->first_reply && port <= c->last_reply;
}

// is_met says whether a flow has met a connection of the client's own to an endpoint by its port.
GLOBAL int is_met(const struct packet *p, const struct place *e)
{
	struct tuple back = {};
	if (!p || !e)
		return 0;
	set_ends(&back, &e->addr, e->port, &p->tuple.src, p->tuple.sport);
	back.protocol = p->tuple.protocol;
	return is_occupied(&back);
}

// other_port returns the port that replaces a client's own between the hooks.
static __always_inline __u16 other_port(__u16 port)
{
	return FIRST_PORT + port % (LAST_PORT - FIRST_PORT + 1);
}

// middle_port returns the client's port between the hooks: its own one, or another one if
// steering takes replies to that for the relay's.
static __always_inline __u16 middle_port(const struct packet *p, const struct control *c)
{
	__u16 port = bpf_ntohs(p->tuple.sport);
	return is_reply_port(c, port) ? other_port(port) : port;
}

// enter enters the tuples of a flow whose first packet has a role. It returns -1 if another flow
// has one of them.
static __always_inline int enter(const struct packet *p, const struct flow *f, __u32 index, enum role role)
{
	struct tuple back;
	set_tuple(&back, f, opposite(role));
	if (put(&back, index, opposite(role)))
		return -1;
	if (!put(&p->tuple, index, role))
		return 0;
	exchange(&back, reference(index, opposite(role)), 0);
	return -1;
}

// find_node asks the routing tables by which address the node reaches an endpoint, for a client to be hidden (Linux 6.7).
// It returns -1 if userspace has to find it.
GLOBAL int find_node(struct __sk_buff *skb, const struct packet *p, const struct place *e, __u32 ifindex, struct address *node)
{
	if (!p || !e || !node)
		return -1;
	struct bpf_fib_lookup fib = {
		.family = p->ipv6 ? FAMILY_IPV6 : FAMILY_IPV4,
		.l4_protocol = p->tuple.protocol,
		.sport = p->tuple.sport,
		.dport = e->port,
		.ifindex = ifindex,
	};
	if (p->ipv6) {
		__builtin_memcpy(fib.ipv6_src, &p->tuple.src, sizeof(p->tuple.src));
		__builtin_memcpy(fib.ipv6_dst, &e->addr, sizeof(e->addr));
	} else {
		fib.ipv4_src = p->tuple.src.word[3];
		fib.ipv4_dst = e->addr.word[3];
	}
	if (bpf_fib_lookup(skb, &fib, sizeof(fib), BPF_FIB_LOOKUP_SKIP_NEIGH | BPF_FIB_LOOKUP_SRC))
		return -1;
	*node = e->addr;
	if (p->ipv6)
		__builtin_memcpy(node, fib.ipv6_src, sizeof(*node));
	else
		node->word[3] = fib.ipv4_src;
	return 0;
}

// vacate takes the tuples from a closed connection, whose client uses its tuple for a new
// one. It returns 0 if userspace has to: the connection is not closed.
GLOBAL int vacate(const struct packet *p, __u32 index)
{
	struct tuple t;
	struct flow *f = flow_of(index);
	// The exchange is a barrier: the tuples are those of the closed connection.
	if (!p || !f || __sync_val_compare_and_swap(&f->state, CLOSED, CLOSED) != CLOSED)
		return 0;
	exchange(&p->tuple, reference(index, TO_ENDPOINT), 0);
	set_tuple(&t, f, TO_CLIENT);
	exchange(&t, reference(index, TO_CLIENT), 0);
	if (f->options & OPTION_MASQUERADE) {
		set_tuple(&t, f, UNMASQUERADE);
		exchange(&t, reference(index, UNMASQUERADE), 0);
		set_tuple(&t, f, MASQUERADE);
		exchange(&t, reference(index, MASQUERADE), 0);
	}
	__sync_val_compare_and_swap(&f->state, CLOSED, VACATED);
	return 1;
}

// begin_flow initializes a flow from its first packet.
static __always_inline void begin_flow(struct __sk_buff *skb, const struct packet *p, struct flow *f, __u64 now)
{
	__u32 generation = f->generation + 1;
	__builtin_memset(f, 0, sizeof(*f));
	f->generation = generation;
	f->ifindex = skb->ifindex;
	f->client = p->tuple.src;
	f->vip = p->tuple.dst;
	f->client_port = p->tuple.sport;
	f->vip_port = p->tuple.dport;
	f->protocol = p->tuple.protocol;
	f->attempts = 1;
	f->options = p->ipv6 ? OPTION_IPV6 : 0;
	f->first_sequence = p->sequence;
	f->started = now;
	f->way[0].last = now;
	f->way[0].end = f->way[1].acked = p->sequence + 1;
}

// unused reports the index of a flow that did not begin, for userspace to free.
static __always_inline void unused(struct __sk_buff *skb, struct flow *f, __u32 index)
{
	f->state = FREE;
	tell(&notices, skb, f, index, EVENT_UNUSED, 0);
}

#define HIDE_TRIES 32

// hide enters the tuples of a flow whose client is hidden, or on the node itself, by a port of the node that is free towards
// the endpoint: of TCP, the client's own one, as the endpoint may have others in TIME-WAIT, where sequence
// numbers of the same client alone are sure to be new. It returns -1 if it finds none: userspace has to be asked.
GLOBAL int hide(struct __sk_buff *skb, __u32 index)
{
	struct control *c = control();
	struct flow *f = flow_of(index);
	if (!f || !c)
		return -1;
	for (int i = 0; i < HIDE_TRIES; i++) {
		__u32 port = bpf_ntohs(f->middle_port);
		if (i || port < FIRST_PORT || f->protocol != IPPROTO_TCP)
			port = FIRST_PORT + bpf_get_prandom_u32() % (LAST_PORT - FIRST_PORT + 1);
		if (is_reply_port(c, port))
			continue;
		f->node_port = bpf_htons(port);
		if (!insert(skb, f, index, 1))
			return 0;
	}
	unused(skb, f, index);
	return -1;
}

// begun counts a flow that the table has decided about, and reports it to userspace.
static __always_inline void begun(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	struct control *c = control();
	struct load *l = load_of(f->service);
	if (!c || !l)
		return;
	__sync_fetch_and_add(&l->opened, 1);
	if (f->protocol == IPPROTO_TCP)
		__sync_fetch_and_add(&l->begun, 1);
	if (is_single(skb, p) && skb->len <= LARGE ? hand_up(&notices, skb, index, f->service, f->generation, EVENT_BEGUN)
						   : tell(&notices, skb, f, index, EVENT_BEGUN, 0))
		__sync_fetch_and_add(&c->untold, 1);
	count(COUNT_DECIDED);
}

// decide begins a flow, which is reported to userspace afterwards. It returns the flow's index, or
// 0 if userspace has to be asked. before is the flow that had the packet's tuple, or 0. The
// tuples of a flow whose client is hidden, or on the node itself (own), are still to be entered (hide).
static __always_inline __u32 decide(struct __sk_buff *skb, struct packet *p, struct served *s, __u32 before, int own)
{
	struct control *c = control();
	struct load *l = load_of(s->service);
	if (!c || !l)
		return 0;
	__u64 now = bpf_ktime_get_ns();
	__u16 middle = middle_port(p, c);
	if (is_reply_port(c, middle) || !is_open(skb, p, c, l, now))
		return 0;
	int hidden = 0;
	struct place *e = choose(p, s, c, own, &hidden);
	if (!e || ((hidden || own) && !(c->hides & HIDES)))
		return 0;
	if (!hidden && !own && is_met(p, e)) {
		middle = other_port(bpf_ntohs(p->tuple.sport));
		if (is_reply_port(c, middle))
			return 0;
	}
	struct address node = {};
	if (hidden && find_node(skb, p, e, own ? LOOPBACK : skb->ifindex, &node))
		return 0;
	if (before && !vacate(p, before))
		return 0;
	__u32 index = take(c);
	struct flow *f = flow_of(index);
	if (!index || !f)
		return 0;
	begin_flow(skb, p, f, now);
	f->service = s->service;
	f->endpoint = e->addr;
	f->endpoint_port = e->port;
	f->middle_port = bpf_htons(middle);
	f->node = own && !hidden ? p->tuple.src : node;
	if (own || hidden)
		f->options |= own ? OPTION_NODE : OPTION_MASQUERADE;
	__sync_fetch_and_or(&f->state, ASKING); // a barrier too
	if (own || hidden)
		return index;
	if (enter(p, f, index, TO_ENDPOINT)) {
		unused(skb, f, index);
		return 0;
	}
	begun(skb, p, f, index);
	return index;
}

#endif
