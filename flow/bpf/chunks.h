// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Reads the chunks of SCTP packets (RFC 9260).
#ifndef CHUNKS_H
#define CHUNKS_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "maps.h"

enum {
	COMMON_HEADER = 12, // ports, verification tag, CRC
	CRC_OFFSET = 8,
	CHUNK_HEADER = 4,
	DATA_HEADER = 16,
	IDATA_HEADER = 20, // RFC 8260
	INIT_HEADER = 20,
};

// Types of chunks.
enum {
	TYPE_DATA = 0,
	TYPE_INIT = 1,
	TYPE_INIT_ACK = 2,
	TYPE_ABORT = 6,
	TYPE_SHUTDOWN_COMPLETE = 14,
	TYPE_IDATA = 64,
};

// Kinds of chunks that a packet has, as bits. Each is 1 << its type.
enum chunk {
	CHUNK_INIT = 1 << TYPE_INIT,
	CHUNK_INIT_ACK = 1 << TYPE_INIT_ACK,
	CHUNK_ABORT = 1 << TYPE_ABORT,
	CHUNK_SHUTDOWN = 1 << 7,
	CHUNK_COOKIE_ECHO = 1 << 10,
	CHUNK_COOKIE_ACK = 1 << 11,
	CHUNK_SHUTDOWN_COMPLETE = 1 << TYPE_SHUTDOWN_COMPLETE,
	REFLECTED = 1 << 15, // the T bit: the verification tag is the sender's own
};

struct chunk_header {
	__u8 type, flags;
	__be16 length; // with this header, without padding
};

// chunks sums up the chunks of a packet.
struct chunks {
	__u32 kinds;    // enum chunk
	__u32 tag;      // of INIT and INIT ACK: the initiate tag
	__u32 bytes;    // user data
	__u32 messages; // that end in this packet
};

// MOST_CHUNKS bounds the chunks that are read. Of more, not all messages are counted; an ABORT
// comes behind few.
#define MOST_CHUNKS 32

// read_chunk reads the chunk at an offset, the first one of its packet or another one. It returns
// by how many bytes the next one follows, or 0 if there is none to read.
GLOBAL __u32 read_chunk(struct __sk_buff *skb, __u32 at, __u32 end, int first, struct chunks *c)
{
	struct chunk_header h;
	if (!c || at + CHUNK_HEADER > end || bpf_skb_load_bytes(skb, at, &h, sizeof(h)))
		return 0;
	__u32 length = bpf_ntohs(h.length), last = h.flags & 1;
	if (length < CHUNK_HEADER || length > end - at)
		return 0;
	__u32 padded = (length + 3) & ~3U;
	if (h.type == TYPE_DATA || h.type == TYPE_IDATA) {
		__u32 header = h.type ? IDATA_HEADER : DATA_HEADER;
		if (length >= header) {
			c->bytes += length - header;
			c->messages += last;
		}
	} else if (h.type == TYPE_INIT || h.type == TYPE_INIT_ACK) {
		__be32 tag = 0;
		if (!first || at + padded < end || length < INIT_HEADER || bpf_skb_load_bytes(skb, at + CHUNK_HEADER, &tag, sizeof(tag)) || !tag)
			return 0;
		c->kinds = 1 << h.type;
		c->tag = bpf_ntohl(tag);
		return 0;
	} else if (h.type <= TYPE_SHUTDOWN_COMPLETE) {
		c->kinds |= 1 << h.type;
		if (last && (h.type == TYPE_ABORT || h.type == TYPE_SHUTDOWN_COMPLETE))
			c->kinds |= REFLECTED;
	}
	return padded;
}

// read_chunks reads the chunks between two offsets, until one does not fit. INIT and INIT
// ACK count only if they are alone, as they have to be. It returns how many it has read.
GLOBAL int read_chunks(struct __sk_buff *skb, __u32 at, __u32 end, struct chunks *c)
{
	int i;
	for (i = 0; i < MOST_CHUNKS; i++) {
		__u32 next = read_chunk(skb, at, end, !i, c);
		if (!next)
			break;
		at += next;
	}
	return i;
}

#endif
