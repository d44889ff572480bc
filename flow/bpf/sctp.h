// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Rewrites SCTP packets. SCTP's checksum, a CRC-32C, covers no addresses, but ports and
// chunks. It is linear: the CRC of a changed packet differs by the change, multiplied by a
// power of x that depends on how much follows the change. A CRC of 0 belongs to a sender
// whose device, or whose kernel, computes it later, and stays 0.
#ifndef SCTP_H
#define SCTP_H

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "chunks.h"
#include "layout.h"
#include "maps.h"

// CRCs begin with the lowest bit of the first byte. Bit 31 is x^0.
#define POLYNOMIAL 0x82f63b78ULL

#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define little_endian(x) __builtin_bswap32(x)
#else
#define little_endian(x) (x)
#endif

// IF_BIT is y if bit is 1, and 0 if it is 0. A branch, or a mask, would make the verifier
// follow 2^32 paths.
#define IF_BIT(bit, y)                                            \
	({                                                        \
		__u64 product = (bit);                            \
		asm volatile("%0 *= %1" : "+r"(product) : "r"(y)); \
		product;                                          \
	})

// multiply multiplies polynomials. If only the first of two ports changes, the lower half of
// a is 0.
static __always_inline __u32 multiply(__u32 a, __u64 b)
{
	__u64 product = 0;
	int bits = a & 0xffff ? 32 : 16;
#pragma clang loop unroll(disable)
	for (int i = 0; i < bits; i++) {
		product ^= IF_BIT(a >> 31, b);
		b = b >> 1 ^ IF_BIT(b & 1, POLYNOMIAL);
		a <<= 1;
	}
	return product;
}

// add_to_crc corrects the CRC by a change of the remainder. A CRC of 0 stays.
static __always_inline int add_to_crc(struct __sk_buff *skb, __u32 transport, __u32 change)
{
	__u32 crc = 0;
	if (bpf_skb_load_bytes(skb, transport + CRC_OFFSET, &crc, sizeof(crc)))
		return -1;
	if (!crc)
		return 0;
	crc ^= little_endian(change);
	return bpf_skb_store_bytes(skb, transport + CRC_OFFSET, &crc, sizeof(crc), BPF_F_RECOMPUTE_CSUM);
}

// powers_for returns the powers, if they reach for so much of a packet.
static __always_inline struct powers *powers_for(__u32 left)
{
	__u32 zero = 0;
	return left / 4 < POWERS ? bpf_map_lookup_elem(&powers, &zero) : 0;
}

// replace_ports writes the ports, a packet's first word.
GLOBAL int replace_ports(struct __sk_buff *skb, __u32 transport, __u32 left, __u32 old, __u32 new)
{
	struct powers *p = powers_for(left);
	__u32 at = left / 4;
	if (!p || at >= POWERS || bpf_skb_store_bytes(skb, transport, &new, sizeof(new), BPF_F_RECOMPUTE_CSUM))
		return -1;
	return add_to_crc(skb, transport, multiply(little_endian(old ^ new), p->of[at]));
}

// Parameters of INIT and INIT ACK.
enum {
	PARAMETER_IPV4 = 5,
	PARAMETER_IPV6 = 6,
	PARAMETER_PADDING = 0x8000, // of an address, or of 5: RFC 4820. Receivers skip both in silence.
};

// MOST_PARAMETERS bounds the parameters that are read.
#define MOST_PARAMETERS 32

// hide_parameter hides the parameter at an offset if it is an address, and adds to what the CRC
// changes by. It returns by how many bytes the next parameter follows, 0 if there is none, or -1.
GLOBAL int hide_parameter(struct __sk_buff *skb, __u32 at, __u32 end, __u32 *change)
{
	struct {
		__be16 type, length;
	} head;
	if (!change || at + CHUNK_HEADER > end || bpf_skb_load_bytes(skb, at, &head, sizeof(head)))
		return 0;
	__u32 type = bpf_ntohs(head.type), length = bpf_ntohs(head.length), left = (end - at) / 4;
	if (length < CHUNK_HEADER || length > end - at)
		return 0;
	if (type == PARAMETER_IPV4 || type == PARAMETER_IPV6) {
		struct powers *p = powers_for(end - at);
		head.type |= bpf_htons(PARAMETER_PADDING);
		if (!p || left >= POWERS || bpf_skb_store_bytes(skb, at, &head, sizeof(head), BPF_F_RECOMPUTE_CSUM))
			return -1;
		*change ^= p->hidden[left];
	}
	return (length + 3) & ~3U;
}

// hide_addresses turns the addresses that a host lists in INIT and INIT ACK into parameters
// that receivers skip, in place, by one bit of each. Its peer must not use them: packets to
// them would come from an address that the host does not know. So the peer knows one
// address, that of the packet.
GLOBAL int hide_addresses(struct __sk_buff *skb, __u32 transport, __u32 end)
{
	__u32 at = transport + COMMON_HEADER + INIT_HEADER, change = 0;
	for (int i = 0; i < MOST_PARAMETERS; i++) {
		int next = hide_parameter(skb, at, end, &change);
		if (next < 0)
			return -1;
		if (!next)
			break;
		at += next;
	}
	return change ? add_to_crc(skb, transport, change) : 0;
}

#endif
