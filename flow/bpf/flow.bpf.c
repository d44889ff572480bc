//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Kernel flows: package flow describes them.
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "association.h"
#include "direct.h"
#include "icmp.h"
#include "index.h"
#include "inject.h"
#include "layout.h"
#include "maps.h"
#include "node.h"
#include "packet.h"
#include "shortcut.h"
#include "table.h"
#include "track.h"
#include "translate.h"
#include "upcall.h"

// join_fragments gives a later fragment the ports of the first one, which it notes. It
// returns -1 if the first one has not come yet.
GLOBAL int join_fragments(struct packet *p)
{
	if (!p)
		return -1;
	struct tuple key = p->tuple;
	__be32 *ports = (__be32 *)&key.sport;
	__be32 own = ports_of(&p->tuple);
	*ports = p->identification;
	key.fragment = 1;
	count(COUNT_FRAGMENTS);
	if (p->fragment == FIRST_FRAGMENT) {
		bpf_map_update_elem(&fragments, &key, &own, BPF_ANY);
		return 0;
	}
	ports = bpf_map_lookup_elem(&fragments, &key);
	if (!ports)
		return -1;
	*(__be32 *)&p->tuple.sport = *ports;
	return 0;
}

static __always_inline int is_icmp(const struct packet *p)
{
	return p->tuple.protocol == IPPROTO_ICMP || p->tuple.protocol == IPPROTO_ICMPV6;
}

// rewrite changes a packet's addresses and ports as its role in the flow requires.
static __always_inline int rewrite(struct __sk_buff *skb, const struct packet *p, const struct flow *f, enum role role)
{
	struct tuple to;
	set_target(&to, f, role);
	if (unlikely(serves_sctp && p->chunks) && (p->chunks & (CHUNK_INIT | CHUNK_INIT_ACK)) && (role == TO_ENDPOINT || role == TO_CLIENT) &&
	    hide_addresses(skb, p->transport, p->end))
		return TCX_DROP;
	if (unlikely(translate(skb, p, &to, 0)))
		return TCX_DROP;
	count(COUNT_TRANSLATED);
	if (role == UNMASQUERADE || (role == TO_ENDPOINT && (f->options & OPTION_MASQUERADE)))
		skb->tc_index = HALFWAY;
	else if (role == TO_ENDPOINT && unlikely(p->flags & LATER))
		skb->tc_index = JUDGED;
	else if (role == TO_ENDPOINT)
		skb->tc_index = (f->seen & PASSED) || p->fragment == LATER_FRAGMENT ? TRANSLATED : NOTED;
	return TCX_NEXT;
}

// rewrite_apart is rewrite with a stack of its own: those of ingress and all that it calls, each
// rounded up to 32 bytes by kernels before 6.8, have 512 bytes together.
static __noinline int rewrite_apart(struct __sk_buff *skb, const struct packet *p, const struct flow *f, enum role role)
{
	return is_from_another_version(skb, role, f) ? TCX_NEXT : rewrite(skb, p, f, role);
}

// to_endpoint handles a packet that has begun a flow.
static __always_inline int to_endpoint(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	return follow_client(skb, p, f, index, 1) == GO ? rewrite(skb, p, f, TO_ENDPOINT) : TCX_DROP;
}

// may_begin says whether a packet may be the first of a flow.
static __always_inline int may_begin(struct __sk_buff *skb, const struct packet *p)
{
	if (p->tuple.protocol == IPPROTO_UDP)
		return p->fragment != LATER_FRAGMENT;
	return !p->fragment && !is_segmented(skb) && is_opening(p);
}

// begin_direct handles a packet that may be for the endpoint of a flow, from the flow's port.
// What ingress has translated already shows itself again at a bridge, and to the programs of another version.
static __always_inline int begin_direct(struct __sk_buff *skb, struct packet *p)
{
	if (p->fragment || is_translated(skb) || (p->tuple.protocol != IPPROTO_UDP && !is_opening(p)))
		return TCX_NEXT;
	if (!is_taken(skb, p))
		return TCX_NEXT;
	__u32 index = redirect(skb, p, TO_ENDPOINT);
	if (!index) { // another CPU may have begun the flow meanwhile
		__u32 found = find(&p->tuple);
		if (role_in(found) == TO_ENDPOINT)
			index = flow_in(found);
	}
	struct flow *f = index ? flow_of(index) : NULL;
	return f ? to_endpoint(skb, p, f, index) : TCX_NEXT;
}

// follow_from follows a packet from the client.
static __always_inline enum verdict follow_from(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index, const int apart)
{
	int sctp = serves_sctp && p->tuple.protocol == IPPROTO_SCTP;
	return sctp ? association_from_client(skb, p, f, index) : follow_client(skb, p, f, index, apart);
}

// follow_to follows a packet from the endpoint.
static __always_inline enum verdict follow_to(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	int sctp = serves_sctp && p->tuple.protocol == IPPROTO_SCTP;
	return sctp ? association_from_endpoint(skb, p, f, index) : follow_endpoint(skb, p, f, index);
}

// from_node handles a packet of the node's own flow at egress.
GLOBAL int from_node(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	if (!p || !f)
		return TCX_DROP;
	mark(f, PASSED);
	return follow_from(skb, p, f, index, 1) == GO ? rewrite(skb, p, f, MASQUERADE) : TCX_DROP;
}

// begin_node handles a packet of no flow at egress: the node may ask an endpoint by a port that
// a hidden client's flow has there.
GLOBAL int begin_node(struct __sk_buff *skb, struct packet *p)
{
	if (!p || p->fragment == LATER_FRAGMENT || (p->tuple.protocol != IPPROTO_UDP && !is_opening(p)) || !is_taken_here(skb, p))
		return TCX_NEXT;
	__u32 index = redirect(skb, p, MASQUERADE);
	struct flow *f = index ? flow_of(index) : NULL;
	return f ? from_node(skb, p, f, index) : TCX_NEXT;
}

// to_node handles an answer to the node's own packets.
GLOBAL int to_node(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	if (!p || !f || follow_to(skb, p, f, index) != GO)
		return TCX_DROP;
	return rewrite(skb, p, f, UNMASQUERADE);
}

// leave_to_relay leaves a packet to the relay. Later ones are not those of the flow that had the
// tuple before.
static __always_inline int leave_to_relay(const struct packet *p, __u32 before)
{
	if (before)
		exchange(&p->tuple, reference(before, TO_ENDPOINT), 0);
	return TCX_NEXT;
}

// refuse handles a packet of a client that source ranges do not admit. A session that the relay has
// goes on (A8.3).
GLOBAL int refuse(const struct packet *p, __u32 before)
{
	struct control *c = control();
	if (!p)
		return TCX_DROP;
	if (c && is_relayed(p, c, bpf_ktime_get_ns())) {
		count(PASSED_RELAYED);
		return leave_to_relay(p, before);
	}
	count(COUNT_NOT_ADMITTED);
	struct tuple t = p->tuple;
	t.sport = 0;
	__u64 one = 1, *packets = bpf_map_lookup_elem(&refused, &t);
	if (packets)
		__sync_fetch_and_add(packets, 1);
	else
		bpf_map_update_elem(&refused, &t, &one, BPF_ANY);
	return TCX_DROP;
}

// send_node sends a packet of the node's own client, which has been followed, to the endpoint.
GLOBAL int send_node(struct __sk_buff *skb, const struct packet *p, struct flow *f, __u32 index)
{
	if (!p || !f || rewrite_apart(skb, p, f, TO_ENDPOINT) != TCX_NEXT)
		return TCX_DROP;
	mark(f, PASSED);
	return send(skb, p, f, index);
}

// go_on_node follows a packet of the node's own client, and sends it.
static __always_inline int go_on_node(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 index)
{
	return follow_client(skb, p, f, index, 1) == GO ? send_node(skb, p, f, index) : TCX_DROP;
}

// No verdicts of tcx.
#define HIDE 100
#define SEND 101

// consider is begin without hide: for a flow whose client is hidden, or on the node itself, it returns
// HIDE, and p->begun names the flow. asks means that the table has refused: userspace decides.
GLOBAL int consider(struct __sk_buff *skb, struct packet *p, __u32 before, int asks)
{
	if (!p)
		return TCX_NEXT;
	struct destination d = {.addr = p->tuple.dst, .port = p->tuple.dport, .protocol = p->tuple.protocol};
	struct served *s = bpf_map_lookup_elem(&destinations, &d);
	if (!s) {
		leave_to_relay(p, before);
		return begin_direct(skb, p);
	}
	int first = may_begin(skb, p);
	int own = is_from_node(skb);
	if (first && !own && !is_admitted(p, s))
		return refuse(p, before);
	if (first && !asks && (s->list || s->pods_list) && (!own || decides_node(p, s))) {
		__u32 index = decide(skb, p, s, before, own);
		if (!index) {
			// Another CPU may have handled a copy of the packet meanwhile.
			__u32 found = find(&p->tuple);
			if (role_in(found) == TO_ENDPOINT && flow_in(found) != before)
				index = flow_in(found);
		}
		struct flow *f = index ? flow_of(index) : NULL;
		if (f && (f->options & (OPTION_MASQUERADE | OPTION_NODE)) && !f->node_port) {
			p->begun = index;
			return HIDE;
		}
		if (f && own)
			return deliver(skb, 0); // it has a flow now
		if (f)
			return to_endpoint(skb, p, f, index);
	}
	if (!first || !is_single(skb, p)) {
		count(PASSED_SHAPE);
		note_relayed(p);
		return leave_to_relay(p, before);
	}
	int relay = ask(skb, p, s->service, before);
	if (!relay)
		return TCX_DROP;
	if (relay < 0)
		note_relayed(p);
	return leave_to_relay(p, before);
}

// go_on handles a packet that has begun such a flow, or returns SEND: there is no stack for that here.
GLOBAL int go_on(struct __sk_buff *skb, struct packet *p)
{
	struct flow *f = p ? flow_of(p->begun) : NULL;
	if (!f)
		return TCX_DROP;
	begun(skb, p, f, p->begun);
	if (f->options & OPTION_NODE)
		return SEND;
	return to_endpoint(skb, p, f, p->begun);
}

// begin handles a packet of no flow, or one that begins a new connection with the
// tuple of a flow. hide enters tuples here as there is more stack.
static __always_inline int begin(struct __sk_buff *skb, struct packet *p, __u32 before)
{
	int verdict = consider(skb, p, before, 0);
	if (verdict != HIDE)
		return verdict;
	if (hide(skb, p->begun))
		return consider(skb, p, before, 1);
	verdict = go_on(skb, p);
	struct flow *f = verdict == SEND ? flow_of(p->begun) : NULL;
	return f ? go_on_node(skb, p, f, p->begun) : verdict;
}

// forward does the rewrites of both hooks, and sends the packet by the shortcut.
static __noinline int forward(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 found, const struct hop *h)
{
	struct tuple to;
	int from = role_in(found) != TO_ENDPOINT;
	if (from && follow_endpoint(skb, p, f, flow_in(found)) != GO)
		return TCX_DROP; // the endpoint was given up
	set_target(&to, f, from ? TO_CLIENT : f->options & OPTION_MASQUERADE ? MASQUERADE : TO_ENDPOINT);
	if (unlikely(translate(skb, p, &to, 1)))
		return TCX_DROP;
	count(COUNT_TRANSLATED);
	return hand_over(skb, p, h);
}

// leave_node handles a packet of a client's flow at lo's egress. Those of flows that are not open take
// the way of first packets.
GLOBAL int leave_node(struct __sk_buff *skb, struct packet *p, __u32 index)
{
	struct flow *f = flow_of(index);
	if (!p || !f || !(f->options & OPTION_NODE))
		return TCX_NEXT;
	if (f->state != OPEN || is_opening(p))
		return deliver(skb, 0);
	return go_on_node(skb, p, f, index);
}

// to_node_client handles what an endpoint sends to a client on the node.
GLOBAL int to_node_client(struct __sk_buff *skb, struct packet *p, struct flow *f, __u32 found)
{
	if (!p || !f)
		return TCX_DROP;
	if (role_in(found) == STALE) {
		if ((p->flags & (SYN | ACK)) == (SYN | ACK))
			report_late(skb, f, flow_in(found));
		return TCX_DROP;
	}
	switch (follow_endpoint(skb, p, f, flow_in(found))) {
	case ABSORB:
		return TCX_DROP;
	case LEAVE:
		return TCX_NEXT;
	default:
		return rewrite_apart(skb, p, f, TO_CLIENT) == TCX_NEXT ? deliver(skb, TRANSLATED) : TCX_DROP;
	}
}

// leave_to_egress leaves following a packet to egress. A connection whose endpoint is gone may
// never end there, so that it counts as half closed from now on.
static __always_inline void leave_to_egress(struct packet *p, struct flow *f)
{
	if ((p->flags & (FIN | RST)) && is_believed(f, p, 0))
		mark(f, CLIENT_LEAVING);
	p->flags |= LATER;
}

SEC("tc")
int ingress(struct __sk_buff *skb)
{
	if (unlikely(skb->tc_index == TRANSLATED) && is_from_node(skb))
		return TCX_NEXT; // to the client, or too long for its way
	struct packet p = {};
	if (unlikely(parse(skb, &p)))
		return TCX_NEXT;
	if (unlikely(is_icmp(&p)))
		return translate_error(skb, &p, 0);
	if (unlikely(p.fragment && join_fragments(&p)))
		return TCX_NEXT;
	__u32 found = find(&p.tuple);
	if (unlikely(!found)) {
		if (p.tuple.protocol == IPPROTO_TCP && !is_opening(&p))
			return TCX_NEXT; // of a connection that is not ours
		return begin(skb, &p, 0);
	}
	enum role role = role_in(found);
	__u32 index = flow_in(found);
	struct flow *f = flow_of(index);
	if (unlikely(!f))
		return TCX_NEXT;
	if (unlikely((f->options & OPTION_NODE) && role != TO_ENDPOINT))
		return to_node_client(skb, &p, f, found);
	if (role == STALE)
		return TCX_NEXT;
	if (unlikely(is_clients_own(skb, role, f))) {
		skb->tc_index = TRANSLATED;
		return TCX_NEXT;
	}
	if (unlikely(role == MASQUERADE))
		return TCX_NEXT; // egress translates it
	if (unlikely(role == UNMASQUERADE && (f->options & OPTION_DIRECT)))
		return to_node(skb, &p, f, index);
	struct hop *hop = find_shortcut(skb, &p, f, found);
	if (role == TO_CLIENT && !hop)
		return TCX_NEXT; // egress translates it
	if (role == TO_ENDPOINT) {
		if (unlikely(is_ending(&p, f)) && !hop && !(f->options & OPTION_NODE))
			leave_to_egress(&p, f);
		switch (follow_from(skb, &p, f, index, 0)) {
		case ABSORB:
			return TCX_DROP;
		case RESTART:
			return begin(skb, &p, index);
		default:
			break;
		}
	}
	if (unlikely(f->options & OPTION_NODE))
		return send_node(skb, &p, f, index);
	return hop ? forward(skb, &p, f, found, hop) : rewrite_apart(skb, &p, f, role);
}

SEC("tc")
int egress(struct __sk_buff *skb)
{
	__u32 passage = skb->tc_index;
	if (is_translated(skb))
		skb->tc_index = 0;
	if (passage == TRANSLATED)
		return TCX_NEXT;
	if (unlikely(skb->mark)) {
		int verdict = injected(skb);
		if (verdict >= 0)
			return verdict;
	}
	struct packet p = {};
	if (unlikely(parse(skb, &p)))
		return TCX_NEXT;
	if (unlikely(is_icmp(&p)))
		return translate_error(skb, &p, 1);
	if (unlikely(p.fragment && join_fragments(&p)))
		return TCX_NEXT;
	if (unlikely(passage == NOTED || passage == JUDGED)) {
		if (note_passed(skb, &p, passage == JUDGED) < 0)
			skb->tc_index = passage;
		return TCX_NEXT;
	}
	__u32 found = find(&p.tuple);
	if (!found && skb->ifindex == LOOPBACK && serves_node(skb, &p))
		return deliver(skb, 0);
	if (!found)
		return may_be_taken(skb, &p) ? begin_node(skb, &p) : TCX_NEXT;
	enum role role = role_in(found);
	__u32 index = flow_in(found);
	if (unlikely(role == TO_ENDPOINT && skb->ifindex == LOOPBACK))
		return leave_node(skb, &p, index);
	if (role != TO_CLIENT && role != MASQUERADE && role != STALE)
		return TCX_NEXT;
	struct flow *f = flow_of(index);
	if (unlikely(!f))
		return TCX_NEXT;
	if (unlikely(role == STALE)) {
		if ((p.flags & (SYN | ACK)) == (SYN | ACK) || (p.chunks & CHUNK_INIT_ACK))
			report_late(skb, f, index);
		return TCX_DROP;
	}
	if (role == TO_CLIENT) {
		if (unlikely(is_opening(&p) && f->state >= CLOSED)) { // as a client by its own port
			exchange(&p.tuple, found, 0);
			return TCX_NEXT;
		}
		switch (follow_to(skb, &p, f, index)) {
		case ABSORB:
			return TCX_DROP;
		case LEAVE:
			return TCX_NEXT;
		default:
			break;
		}
	}
	if (role == MASQUERADE) {
		if (unlikely(f->options & OPTION_DIRECT))
			return is_from_another_version(skb, role, f) ? TCX_NEXT : from_node(skb, &p, f, index);
		mark(f, PASSED);
		if (unlikely(is_ending(&p, f)))
			follow_ending(skb, &p, f, index);
	}
	return rewrite_apart(skb, &p, f, role);
}

char license_name[] SEC("license") = "GPL";
