// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// A client may ask an endpoint itself by a port that it also has towards a Service. The
// endpoint would take both for one connection, and nobody could tell its answers apart.
//
// If the endpoint sees the client's address in both, the direct connection gets another port
// on its way, as netfilter gives it one: it is a flow with OPTION_DIRECT, without a Service or
// a record. If the Service's flow hides the client, the endpoint can tell them apart. Then
// packets between the hooks look the same, and tc_index differs: those of the Service's flow
// have HALFWAY.
//
// The node itself, or a client that rules of others masquerade, may ask an endpoint by a port that a
// hidden client's flow has there. At egress it gets another port likewise, as a flow with MASQUERADE and UNMASQUERADE alone.
#ifndef DIRECT_H
#define DIRECT_H

#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <bpf/bpf_helpers.h>

#include "association.h"
#include "index.h"
#include "layout.h"
#include "maps.h"
#include "packet.h"
#include "table.h"
#include "track.h"
#include "translate.h"
#include "upcall.h"

// is_clients_own says whether a packet at ingress that looks like one of a hidden client's
// flow is of the client's own connection to the endpoint.
static __always_inline int is_clients_own(const struct __sk_buff *skb, enum role role, const struct flow *f)
{
	return (role == MASQUERADE || role == TO_CLIENT) && (f->options & OPTION_MASQUERADE) && skb->tc_index != HALFWAY;
}

// is_seen_again says whether a packet at ingress is the flow's own, which has left the node's IP stack: it comes
// in at the lower interface of a macvlan, or at the other end of a veth pair within the node.
static __always_inline int is_seen_again(const struct __sk_buff *skb, const struct packet *p, const struct flow *f)
{
	if (p->tuple.protocol != IPPROTO_UDP)
		return p->sequence == f->first_sequence;
	return skb->pkt_type == PACKET_OTHERHOST && skb->ifindex != f->ifindex;
}

// is_taken says whether the endpoint that a packet is for knows the client's port by a flow. A
// flow whose first packet the node has dropped takes nothing.
GLOBAL int is_taken(struct __sk_buff *skb, const struct packet *p)
{
	struct tuple back;
	if (!p)
		return 0;
	swap(&back, &p->tuple);
	__u32 found = find(&back);
	enum role role = role_in(found);
	struct flow *f = flow_of(flow_in(found));
	if ((role != TO_CLIENT && role != STALE) || !f || is_seen_again(skb, p, f))
		return 0;
	return role == STALE || (!(f->options & OPTION_MASQUERADE) && (f->state >= OPEN || (f->seen & PASSED)));
}

// note_passed notes that a packet which ingress has translated leaves the node, and follows one that
// may end a connection. It returns -1 if the flow is not here: another version's programs have it.
GLOBAL int note_passed(struct __sk_buff *skb, struct packet *p, int ending)
{
	struct tuple back;
	if (!p)
		return 0;
	swap(&back, &p->tuple);
	__u32 found = find(&back);
	struct flow *f = role_in(found) == TO_CLIENT ? flow_of(flow_in(found)) : NULL;
	if (!f)
		return -1;
	mark(f, PASSED);
	return ending && p->fragment != LATER_FRAGMENT ? follow_ending(skb, p, f, flow_in(found)) : 0;
}

// is_from_another_version says whether a packet belongs to a Service's flow, and not to the direct connection
// that has the flow's port. Programs of another version run first. They have taken over that flow alone, and
// have translated the packet.
static __always_inline int is_from_another_version(const struct __sk_buff *skb, enum role role, const struct flow *f)
{
	if (!(f->options & OPTION_DIRECT))
		return 0;
	return role == MASQUERADE ? !f->ifindex && skb->ingress_ifindex : role == TO_ENDPOINT && is_translated(skb);
}

#define DIRECT_TRIES 4
#define SPARE_SHARE 4 // direct connections leave one index in so many to Services

// next_port is another port for a client's, or 0.
static __always_inline __be16 next_port(const struct tuple *t, const struct control *c, int try)
{
	__u32 port = FIRST_PORT + (bpf_ntohs(t->sport) + try * 977) % (LAST_PORT - FIRST_PORT + 1);
	return is_reply_port(c, port) ? 0 : bpf_htons(port);
}

// is_on_node says whether a flow is a connection of the node's own.
static __always_inline int is_on_node(const struct flow *f)
{
	return (f->options & (OPTION_DIRECT | OPTION_MASQUERADE)) == (OPTION_DIRECT | OPTION_MASQUERADE);
}

// may_be_taken says whether a packet of no flow at egress may have the port of such a flow: it begins a
// connection of the node's own, or one that rules of others masquerade. Of TCP, the flow may have any port.
static __always_inline int may_be_taken(const struct __sk_buff *skb, const struct packet *p)
{
	return (p->tuple.protocol == IPPROTO_TCP && is_opening(p)) || (!skb->ingress_ifindex && is_node_port(p->tuple.sport));
}

// is_taken_here says whether a flow of a hidden client, or of one on the node, has the port by which
// the node asks its endpoint. A packet that a flow has translated shows itself again at a VLAN's lower interface.
GLOBAL int is_taken_here(struct __sk_buff *skb, const struct packet *p)
{
	struct tuple back;
	if (!p)
		return 0;
	swap(&back, &p->tuple);
	__u32 found = find(&back);
	struct flow *f = flow_of(flow_in(found));
	if (!found || !f || (p->tuple.protocol == IPPROTO_TCP && p->sequence == f->first_sequence))
		return 0;
	if (role_in(found) == UNMASQUERADE)
		return !is_on_node(f);
	return (f->options & OPTION_NODE) && (skb->ingress_ifindex || has_socket(skb, &back, p->ipv6));
}

// redirect begins the flow of a client's own connection, or of the node's, whose first packet has a
// role. It returns the flow's index, or 0.
static __always_inline __u32 redirect(struct __sk_buff *skb, const struct packet *p, enum role role)
{
	struct control *c = control();
	if (!c || (c->given - c->taken) * SPARE_SHARE < c->most_flows)
		return 0;
	__u32 index = take(c);
	struct flow *f = flow_of(index);
	if (!index || !f)
		return 0;
	begin_flow(skb, p, f, bpf_ktime_get_ns());
	f->endpoint = f->vip;
	f->endpoint_port = f->vip_port;
	f->options |= role == MASQUERADE ? OPTION_DIRECT | OPTION_MASQUERADE : OPTION_DIRECT;
	f->node = f->client;
	f->middle_port = f->client_port;
	if (role == MASQUERADE && !skb->ingress_ifindex)
		f->ifindex = 0; // the node's own
	for (int i = 0; i < DIRECT_TRIES; i++) {
		__be16 port = next_port(&p->tuple, c, i);
		if (!port)
			continue;
		if (role == MASQUERADE)
			f->node_port = port;
		else
			f->middle_port = port;
		__sync_fetch_and_or(&f->state, ASKING); // a barrier too
		if (enter(p, f, index, role))
			continue;
		if (tell(&notices, skb, f, index, EVENT_DIRECT, 0))
			__sync_fetch_and_add(&c->untold, 1);
		return index;
	}
	f->state = FREE;
	tell(&notices, skb, f, index, EVENT_UNUSED, 0);
	return 0;
}

#endif
