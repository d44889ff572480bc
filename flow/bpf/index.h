// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The index finds a flow by a packet's tuple. It is a hash table of references: the flow
// itself has the tuple, so that an entry takes eight bytes, and finding it one cache line.
// Both sides change it without locks, userspace by index.go.
//
// A tuple belongs to its home, one of the buckets, or to another one once its home is full.
#ifndef INDEX_H
#define INDEX_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"
#include "maps.h"
#include "translate.h"

// Userspace sets these when it loads the programs.
const volatile __u64 seed;        // of the hash: nobody else shall know where a tuple belongs
const volatile __u32 last_bucket; // a power of two, less 1

// A slot holds the upper half of the tuple's hash, and in the lower half a reference: role
// and flow. 0 is an empty slot.
#define FLOW_BITS 20
#define FLOW_MASK ((1U << FLOW_BITS) - 1) // flow 0 is none

static __always_inline __u32 reference(__u32 flow, enum role role)
{
	return (__u32)role << FLOW_BITS | flow;
}

static __always_inline __u32 flow_in(__u32 reference)
{
	return reference & FLOW_MASK;
}

static __always_inline enum role role_in(__u32 reference)
{
	return reference >> FLOW_BITS;
}

static __always_inline __u64 hash_of(const struct tuple *t)
{
	__u64 word[sizeof(*t) / sizeof(__u64)], h = seed;
	__builtin_memcpy(word, t, sizeof(word));
#pragma unroll
	for (int i = sizeof(*t) / sizeof(__u64) - 1; i >= 0; i--) { // ports first: clients choose them
		h = (h ^ word[i]) * 0x9e3779b97f4a7c15;
		h ^= h >> 32;
	}
	h *= 0xd6e8feb86659fd93;
	return h ^ h >> 32;
}

static __always_inline __u64 slot_for(__u64 hash, __u32 reference)
{
	return (hash & 0xffffffff00000000) | reference;
}

// PLACES is how many buckets a tuple may be in. The first one is its home.
#define PLACES 8

static __always_inline struct bucket *place_of(__u64 hash, __u32 n)
{
	__u32 at = (hash + n * (hash >> 32 | 1)) & last_bucket;
	return bpf_map_lookup_elem(&buckets, &at);
}

// seek returns the reference that a bucket has for a hash, or 0.
static __always_inline __u32 seek(const struct bucket *b, __u64 hash)
{
#pragma unroll
	for (int i = 0; i < SLOTS; i++) {
		__u64 slot = *(volatile __u64 *)&b->slot[i];
		if (slot >> 32 == hash >> 32 && slot)
			return slot;
	}
	return 0;
}

static __always_inline int is_from_to(const struct tuple *t, const struct address *src, __be16 sport, const struct address *dst, __be16 dport)
{
	return t->sport == sport && t->dport == dport && same_address(&t->src, src) && same_address(&t->dst, dst);
}

// belongs says whether a tuple is that of the packets which a reference is for.
static __always_inline int belongs(const struct tuple *t, __u32 reference)
{
	const struct flow *f = flow_of(flow_in(reference));
	if (unlikely(!f || f->protocol != t->protocol))
		return 0;
	switch (role_in(reference)) {
	case TO_ENDPOINT:
		return is_from_to(t, &f->client, f->client_port, &f->vip, f->vip_port);
	case MASQUERADE:
		return is_from_to(t, &f->client, f->middle_port, &f->endpoint, f->endpoint_port);
	case UNMASQUERADE:
		return is_from_to(t, &f->endpoint, f->endpoint_port, &f->node, f->node_port);
	default: // TO_CLIENT, STALE
		if (unlikely(f->options & OPTION_NODE))
			return is_from_to(t, &f->endpoint, f->endpoint_port, &f->node, f->node_port);
		return is_from_to(t, &f->endpoint, f->endpoint_port, &f->client, f->middle_port);
	}
}

// find returns the reference for a tuple, or 0.
GLOBAL __u32 find(const struct tuple *t)
{
	if (!t)
		return 0;
	__u64 hash = hash_of(t);
	struct bucket *b = place_of(hash, 0);
	if (!b)
		return 0;
	__u32 found = seek(b, hash);
	if (unlikely(!found && b->moved)) {
		for (int n = 1; n < PLACES && !found && (b = place_of(hash, n)); n++)
			found = seek(b, hash);
	}
	return found && belongs(t, found) ? found : 0;
}

// replace_in puts a slot of a bucket in the place of another one. It returns -1 if that is not
// there.
GLOBAL int replace_in(struct bucket *b, __u64 from, __u64 to)
{
	if (!b)
		return -1;
	for (int i = 0; i < SLOTS; i++) {
		if (*(volatile __u64 *)&b->slot[i] == from && __sync_val_compare_and_swap(&b->slot[i], from, to) == from)
			return 0;
	}
	return -1;
}

// exchange puts a reference, or 0 for none, in the place of another one. It returns -1 if
// the tuple has that no more.
GLOBAL int exchange(const struct tuple *t, __u32 from, __u32 to)
{
	if (!t)
		return -1;
	__u64 hash = hash_of(t), old = slot_for(hash, from), new = to ? slot_for(hash, to) : 0;
	struct bucket *home = place_of(hash, 0), *b;
	if (!home)
		return -1;
	if (!replace_in(home, old, new))
		return 0;
	if (!home->moved)
		return -1;
	for (int n = 1; n < PLACES && (b = place_of(hash, n)); n++) {
		if (replace_in(b, old, new))
			continue;
		if (!new)
			__sync_fetch_and_add(&home->moved, -1);
		return 0;
	}
	return -1;
}

// other_in says whether a bucket has a hash for another reference than this slot's.
static __always_inline int other_in(const struct bucket *b, __u64 hash, __u64 than)
{
	for (int i = 0; i < SLOTS; i++) {
		__u64 slot = *(volatile __u64 *)&b->slot[i];
		if (slot && slot >> 32 == hash >> 32 && slot != than)
			return 1;
	}
	return 0;
}

// has_other says whether a place of a hash has it for another reference than this slot's.
GLOBAL int has_other(__u64 hash, __u64 than)
{
	struct bucket *home = place_of(hash, 0), *b = home;
	if (!home)
		return 0;
	for (int n = 0; n < PLACES; n++) {
		if (n && (!home->moved || !(b = place_of(hash, n))))
			return 0;
		if (other_in(b, hash, than))
			return 1;
	}
	return 0;
}

// move puts a slot into another place than its home, which is full.
static __always_inline int move(struct bucket *home, __u64 hash, __u64 slot)
{
	struct bucket *b;
	__sync_fetch_and_add(&home->moved, 1); // first: whoever finds the slot knows that
	for (int n = 1; n < PLACES && (b = place_of(hash, n)); n++) {
		if (!replace_in(b, 0, slot))
			return 0;
	}
	__sync_fetch_and_add(&home->moved, -1);
	return -1;
}

// PUT_TRIES is how often a CPU tries to enter a tuple that another one enters too.
#define PUT_TRIES 16

// put enters a tuple for a flow. It returns -1 if the tuple is there, or there is no room.
GLOBAL int put(const struct tuple *t, __u32 flow, enum role role)
{
	if (!t)
		return -1;
	__u64 hash = hash_of(t), slot = slot_for(hash, reference(flow, role));
	struct bucket *home = place_of(hash, 0);
	if (!home || has_other(hash, 0))
		return -1;
	for (int i = 0; i < PUT_TRIES; i++) {
		if (i && has_other(hash, 0))
			continue; // the other CPU may be about to take it out
		if (replace_in(home, 0, slot) && move(home, hash, slot))
			return -1;
		// Of CPUs that enter a tuple at the same time, the later ones see that here. If each
		// sees the other one, none has it: then they try again.
		if (!has_other(hash, slot))
			return 0;
		exchange(t, reference(flow, role), 0);
	}
	return -1;
}

#endif
