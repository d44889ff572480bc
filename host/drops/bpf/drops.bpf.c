//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// A program where the kernel frees packets that it drops: it notes the endpoints whose TCP
// handshakes netfilter's rules drop, in either direction.
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define CORE __attribute__((preserve_access_index))

// What is read of the kernel's own structures. The loader takes the offsets from the kernel's
// description of its types, and the number of the reason, which kernels count differently.
struct ns_common {
	unsigned int inum;
} CORE;

struct net {
	struct ns_common ns;
} CORE;

typedef struct {
	struct net *net;
} CORE possible_net_t;

struct net_device {
	possible_net_t nd_net;
} CORE;

struct sock_common {
	possible_net_t skc_net;
} CORE;

struct sock {
	struct sock_common __sk_common;
} CORE;

struct sk_buff {
	struct net_device *dev;
	struct sock *sk;
	unsigned char *head;
	__u16 network_header;
} CORE;

enum skb_drop_reason {
	SKB_DROP_REASON_NETFILTER_DROP = 8,
};

// endpoint has an IPv6 address; IPv4 ones are mapped into it. All is in network byte order.
struct endpoint {
	__be32 address[4];
	__be16 port, zero;
};

const struct endpoint *unused __attribute__((unused)); // bpf2go describes its type

// The number of the network namespace that counts.
volatile const __u32 namespace_number;

// When a packet of a handshake with an endpoint was dropped last, ns of CLOCK_MONOTONIC.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct endpoint);
	__type(value, __u64);
} dropped SEC(".maps");

SEC("tp_btf/kfree_skb")
int note_drop(__u64 *ctx)
{
	struct sk_buff *skb = (void *)ctx[0];
	__u32 reason = ctx[2];
	if (reason != bpf_core_enum_value(enum skb_drop_reason, SKB_DROP_REASON_NETFILTER_DROP))
		return 0;

	// A packet of this node's own has no device yet where its rules judge it first.
	struct net_device *dev = BPF_CORE_READ(skb, dev);
	__u32 number = dev ? BPF_CORE_READ(dev, nd_net.net, ns.inum) : BPF_CORE_READ(skb, sk, __sk_common.skc_net.net, ns.inum);
	if (number != namespace_number)
		return 0;

	struct endpoint source = {}, destination = {};
	unsigned char *at = BPF_CORE_READ(skb, head) + BPF_CORE_READ(skb, network_header);
	union {
		__u8 version;
		struct iphdr v4;
		struct ipv6hdr v6;
	} ip = {};
	if (bpf_probe_read_kernel(&ip, sizeof(ip.v4), at))
		return 0;
	if (ip.version >> 4 == 4) {
		if (ip.v4.protocol != IPPROTO_TCP || ip.v4.frag_off & bpf_htons(0x1fff))
			return 0;
		source.address[2] = destination.address[2] = bpf_htonl(0xffff);
		source.address[3] = ip.v4.saddr;
		destination.address[3] = ip.v4.daddr;
		at += ip.v4.ihl * 4;
	} else {
		if (bpf_probe_read_kernel(&ip, sizeof(ip.v6), at) || ip.v6.nexthdr != IPPROTO_TCP)
			return 0;
		__builtin_memcpy(source.address, &ip.v6.saddr, sizeof(source.address));
		__builtin_memcpy(destination.address, &ip.v6.daddr, sizeof(destination.address));
		at += sizeof(ip.v6);
	}
	struct tcphdr tcp = {};
	if (bpf_probe_read_kernel(&tcp, sizeof(tcp), at) || !tcp.syn)
		return 0;
	source.port = tcp.source;
	destination.port = tcp.dest;
	__u64 now = bpf_ktime_get_ns();
	bpf_map_update_elem(&dropped, tcp.ack ? &source : &destination, &now, BPF_ANY);
	return 0;
}

char _license[] SEC("license") = "GPL";
