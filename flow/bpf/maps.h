// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
#ifndef MAPS_H
#define MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"

// GLOBAL functions are verified by themselves, once, and not again for each path that leads to a
// call. Their result is unknown to the verifier, and so is what their pointers point to; before
// Linux 6.1, that may be no key of a map. The stacks of a chain of calls, each rounded up to 32
// bytes, must not exceed 512: clang's -fstack-usage shows them.
#define GLOBAL __attribute__((noinline))

// Userspace sets the sizes of flows, buckets and spares when it loads the maps.

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bucket);
} buckets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 18);
	__type(key, struct destination);
	__type(value, struct served);
} destinations SEC(".maps");

// places are the endpoints that the table chooses among.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 20);
	__type(key, struct slot);
	__type(value, struct place);
} places SEC(".maps");

// members are the numbers of endpoints in the lists of service ports with session affinity.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 20);
	__type(key, struct member);
	__type(value, __u32);
} members SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct origin_key);
	__type(value, struct origin);
} origins SEC(".maps");

// clients are those that session affinity remembers. Userspace adds them; connections that the table
// decides about renew them. The oldest ones are forgotten, whosever they are.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 16);
	__type(key, struct client);
	__type(value, struct pin);
} clients SEC(".maps");

// ranges are the source ranges of destinations.
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 17);
	__type(key, struct range);
	__type(value, __u32);
} ranges SEC(".maps");

// refused counts first packets that source ranges do not admit, by client, without its port, and
// destination. Userspace takes the counts; the oldest ones are forgotten.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, struct tuple);
	__type(value, __u64);
} refused SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct spare);
} spares SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << 16);
	__type(key, __u32);
	__type(value, struct load);
} loads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct control);
} controls SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct powers);
} powers SEC(".maps");

// fragments are the ports of fragmented packets, by their identification.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct tuple);
	__type(value, __be32);
} fragments SEC(".maps");

// sessions are tuples of the relay's UDP sessions. Userspace keeps them as long as these last.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 18);
	__type(key, struct tuple);
	__type(value, __u64);
} sessions SEC(".maps");

// relayed are tuples that the relay is about to serve, and until when at least. The oldest ones are
// forgotten, whosever they are.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct tuple);
	__type(value, __u64);
} relayed SEC(".maps");

// occupied are the ways back of connections that flows have met at an endpoint, clients' own and those in
// TIME-WAIT, and until when others avoid them.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct tuple);
	__type(value, __u64);
} occupied SEC(".maps");

// upcalls wake userspace. notices (and EVENT_OPEN) do not: it reads them by a timer, and
// before each upcall.
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
	__type(value, struct event);
} upcalls SEC(".maps");

#define NOTICES (1 << 22) // bytes

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, NOTICES);
	__type(value, struct event);
} notices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, enum counter);
	__type(value, __u64);
} counters SEC(".maps");

// ways are those of interfaces, by their index.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, __u32);
	__type(value, enum way);
} ways SEC(".maps");

// hops are known ones. A CPU has its own: nobody reads one while it is written.
#define HOPS 512

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, HOPS);
	__type(key, __u32);
	__type(value, struct hop);
} hops SEC(".maps");

static __always_inline void count(enum counter which)
{
	__u64 *n = bpf_map_lookup_elem(&counters, &which);
	if (n)
		*n += 1;
}

static __always_inline struct control *control(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&controls, &zero);
}

static __always_inline struct flow *flow_of(__u32 index)
{
	return bpf_map_lookup_elem(&flows, &index);
}

static __always_inline struct load *load_of(__u32 service)
{
	return bpf_map_lookup_elem(&loads, &service);
}

#endif
