//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Steering by sk_lookup: package sklookup describes it, makes the maps and fills them.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define AF_INET6 10
#define TCX_NEXT -1 // the programs after this one decide

// The slot of what is refused. No socket is in it.
#define REFUSED 0
// The last slot of sockets that drop everything.
#define LAST_SILENT 4

// Destinations and ranges of addresses lead to slots of sockets. Ports and protocols are in
// the host's byte order.
struct destination4 {
	__be32 addr;
	__u16 port, protocol;
};

struct destination6 {
	__be32 addr[4];
	__u16 port, protocol;
};

struct range4 {
	__u32 bits;
	__be32 addr;
};

struct range6 {
	__u32 bits;
	__be32 addr[4];
};

#define MAP(name, kind, key_type, flags)          \
	struct {                                  \
		__uint(type, kind);               \
		__uint(max_entries, 1);           \
		__uint(map_flags, flags);         \
		__type(key, key_type);            \
		__type(value, __u32);             \
	} name SEC(".maps")

MAP(destinations4, BPF_MAP_TYPE_HASH, struct destination4, BPF_F_NO_PREALLOC);
MAP(destinations6, BPF_MAP_TYPE_HASH, struct destination6, BPF_F_NO_PREALLOC);
MAP(ranges4, BPF_MAP_TYPE_LPM_TRIE, struct range4, BPF_F_NO_PREALLOC);
MAP(ranges6, BPF_MAP_TYPE_LPM_TRIE, struct range6, BPF_F_NO_PREALLOC);

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

// Why a packet is refused or dropped: redirect.Reason.
enum reason {
	NO_ENDPOINTS,       // the destination is refused
	NO_LOCAL_ENDPOINTS, // it is silent
	UNKNOWN_PORT,       // the range of one cluster IP is refused
	UNKNOWN_ADDRESS,    // a range is silent
	REASONS,
};

// refusal is who sent to what, and why in vain. IPv4 addresses are mapped into IPv6.
struct refusal {
	__be32 client[4], addr[4];
	__u16 port;
	__u8 protocol, reason;
};

// The packets of each refusal until the process reads them. It forgets the oldest one if there
// are too many.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct refusal);
	__type(value, __u64);
} refusals SEC(".maps");

// All packets, by reason.
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASONS);
	__type(key, __u32);
	__type(value, __u64);
} refused SEC(".maps");

// LOAD loads a word of ctx at a constant offset, as the verifier wants it. The compiler would
// share one load for IPv4 and IPv6, at a computed address.
#define LOAD(ctx, field)                                                              \
	({                                                                            \
		__u32 word;                                                           \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                 \
			     : "=r"(word)                                             \
			     : "r"(ctx), "i"(offsetof(struct bpf_sk_lookup, field))); \
		word;                                                                 \
	})

// count counts a packet that is refused or dropped.
static __always_inline void count(struct bpf_sk_lookup *ctx, __u32 reason)
{
	__u64 one = 1, *packets = bpf_map_lookup_elem(&refused, &reason);

	if (packets)
		(*packets)++;
	struct refusal key = {.port = ctx->local_port, .protocol = ctx->protocol, .reason = reason};
	if (ctx->family == AF_INET) {
		key.client[2] = key.addr[2] = bpf_htonl(0xffff);
		key.client[3] = LOAD(ctx, remote_ip4);
		key.addr[3] = LOAD(ctx, local_ip4);
	} else {
		key.client[0] = LOAD(ctx, remote_ip6[0]);
		key.client[1] = LOAD(ctx, remote_ip6[1]);
		key.client[2] = LOAD(ctx, remote_ip6[2]);
		key.client[3] = LOAD(ctx, remote_ip6[3]);
		key.addr[0] = LOAD(ctx, local_ip6[0]);
		key.addr[1] = LOAD(ctx, local_ip6[1]);
		key.addr[2] = LOAD(ctx, local_ip6[2]);
		key.addr[3] = LOAD(ctx, local_ip6[3]);
	}
	packets = bpf_map_lookup_elem(&refusals, &key);
	if (packets)
		__sync_fetch_and_add(packets, 1);
	else
		bpf_map_update_elem(&refusals, &key, &one, BPF_ANY);
}

#define CHANGED -1

// choose finds the socket for a packet, or refuses the packet. It returns CHANGED instead of a refusal if
// the maps may have changed between its look-ups. Userspace adds destinations before ranges, and deletes
// ranges before destinations, and these before sockets.
static __attribute__((noinline)) int choose(struct bpf_sk_lookup *ctx, int again)
{
	__u32 *found, *range;

	if (ctx->family == AF_INET) {
		struct destination4 key = {ctx->local_ip4, ctx->local_port, ctx->protocol};
		struct range4 prefix = {32, ctx->local_ip4};
		found = bpf_map_lookup_elem(&destinations4, &key);
		range = found ? NULL : bpf_map_lookup_elem(&ranges4, &prefix);
	} else if (ctx->family == AF_INET6) {
		struct destination6 key = {
			{ctx->local_ip6[0], ctx->local_ip6[1], ctx->local_ip6[2], ctx->local_ip6[3]},
			ctx->local_port, ctx->protocol};
		struct range6 prefix = {
			128, {ctx->local_ip6[0], ctx->local_ip6[1], ctx->local_ip6[2], ctx->local_ip6[3]}};
		found = bpf_map_lookup_elem(&destinations6, &key);
		range = found ? NULL : bpf_map_lookup_elem(&ranges6, &prefix);
	} else {
		return SK_PASS;
	}
	if (!found && !range)
		return SK_PASS;
	__u32 slot = found ? *found : *range;
	if (slot == REFUSED) {
		if (!found && !again)
			return CHANGED;
		count(ctx, found ? NO_ENDPOINTS : UNKNOWN_PORT);
		return SK_DROP;
	}
	// A range that is silent names the slot for TCP; the one for UDP is next.
	if (!found && ctx->protocol == IPPROTO_UDP)
		slot++;
	struct bpf_sock *socket = bpf_map_lookup_elem(&sockets, &slot);
	if (!socket)
		return again ? SK_DROP : CHANGED;
	if (slot <= LAST_SILENT)
		count(ctx, found ? NO_LOCAL_ENDPOINTS : UNKNOWN_ADDRESS);
	// It fails if somebody else's program has chosen a socket already: the kernel keeps to
	// that one whatever we say.
	long failed = bpf_sk_assign(ctx, socket, 0);
	bpf_sk_release(socket);
	return failed ? SK_DROP : SK_PASS;
}

// steer runs for each SYN and each UDP datagram that is delivered locally and belongs to no
// connected socket. What is for the host itself costs one miss in a hash and one in a trie.
// SK_DROP refuses with a reset, or ICMP port unreachable (F9); SK_PASS goes on with the
// socket that was assigned, or as without us.
SEC("sk_lookup")
int steer(struct bpf_sk_lookup *ctx)
{
	int verdict = choose(ctx, 0);

	return verdict == CHANGED ? choose(ctx, 1) : verdict;
}

// The mark of answers to sockets with a client's address, and the ports of those sockets.
const volatile __u32 reply_mark;
const volatile __u16 first_port, last_port;

// tcp_is_ours reports whether a packet is for a connection's socket, or one in TIME_WAIT, with
// exactly its addresses and ports. The look-up also finds listening ones, which do not count.
// It and udp_is_ours are functions of their own, as the verifier tells their sockets apart.
static __attribute__((noinline)) int tcp_is_ours(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 size)
{
	struct bpf_sock *socket = bpf_skc_lookup_tcp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return 0;
	__u32 state = socket->state;
	bpf_sk_release(socket);
	return state != BPF_TCP_LISTEN;
}

// udp_is_ours reports the same of UDP. Unconnected sockets, which it finds too, do not count.
static __attribute__((noinline)) int udp_is_ours(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 size)
{
	struct bpf_sock *socket = bpf_sk_lookup_udp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return 0;
	__u32 state = socket->state;
	bpf_sk_release(socket);
	return state == BPF_TCP_ESTABLISHED;
}

// load_ports reads both ports, which begin so far behind the header of IP. It reports whether
// the one of the destination is of our range.
static __always_inline int load_ports(struct __sk_buff *skb, __u32 at, __be16 ports[2])
{
	if (bpf_skb_load_bytes_relative(skb, at, ports, 4, BPF_HDR_START_NET))
		return 0;
	__u16 port = bpf_ntohs(ports[1]);
	return port >= first_port && port <= last_port;
}

// mark_answers marks the answers of endpoints to sockets with a client's address, at ingress:
// unfragmented TCP and UDP to a port of the range. All other packets pass unchanged.
SEC("tcx/ingress")
int mark_answers(struct __sk_buff *skb)
{
	struct bpf_sock_tuple tuple = {};
	__u8 protocol;
	__u32 size;

	if (skb->pkt_type != PACKET_HOST)
		return TCX_NEXT;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;
		if (bpf_skb_load_bytes_relative(skb, 0, &ip, sizeof(ip), BPF_HDR_START_NET) ||
		    ip.frag_off & bpf_htons(0x1fff))
			return TCX_NEXT;
		protocol = ip.protocol;
		if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
			return TCX_NEXT;
		if (!load_ports(skb, ip.ihl * 4, &tuple.ipv4.sport))
			return TCX_NEXT;
		tuple.ipv4.saddr = ip.saddr;
		tuple.ipv4.daddr = ip.daddr;
		size = sizeof(tuple.ipv4);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;
		if (bpf_skb_load_bytes_relative(skb, 0, &ip, sizeof(ip), BPF_HDR_START_NET))
			return TCX_NEXT;
		protocol = ip.nexthdr;
		if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
			return TCX_NEXT;
		if (!load_ports(skb, sizeof(ip), &tuple.ipv6.sport))
			return TCX_NEXT;
		__builtin_memcpy(tuple.ipv6.saddr, &ip.saddr, 16);
		__builtin_memcpy(tuple.ipv6.daddr, &ip.daddr, 16);
		size = sizeof(tuple.ipv6);
	} else {
		return TCX_NEXT;
	}
	if (protocol == IPPROTO_TCP ? tcp_is_ours(skb, &tuple, size) : udp_is_ours(skb, &tuple, size))
		skb->mark |= reply_mark;
	return TCX_NEXT;
}

char _license[] SEC("license") = "Apache-2.0";
