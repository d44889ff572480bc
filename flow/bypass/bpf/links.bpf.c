//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// An iterator over the BPF links of all network namespaces: package bypass reads it.
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define CORE __attribute__((preserve_access_index))

// What is read of the kernel's own structures. The loader takes the offsets from the kernel's
// description of its types.
struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
} CORE;

struct bpf_link {
	enum bpf_link_type type;
} CORE;

struct bpf_iter__bpf_link {
	struct bpf_iter_meta *meta;
	struct bpf_link *link;
} CORE;

struct ns_common {
	unsigned int inum;
} CORE;

struct net {
	struct ns_common ns;
} CORE;

struct nf_hook_ops {
	__u8 pf;
	unsigned int hooknum;
} CORE;

struct bpf_nf_link {
	struct bpf_link link;
	struct nf_hook_ops hook_ops;
	struct net *net;
	__u32 dead;
} CORE;

// The type of links of netfilter, which older headers lack.
#define NETFILTER_LINK 10

// netfilter_link is what is written for each link of netfilter.
struct netfilter_link {
	__u32 namespace_number, hook, family, dead;
};

const struct netfilter_link *unused __attribute__((unused)); // bpf2go describes its type

SEC("iter/bpf_link")
int read_links(struct bpf_iter__bpf_link *ctx)
{
	struct bpf_link *link = ctx->link;
	if (!link || link->type != NETFILTER_LINK) // no link is behind the last one
		return 0;
	struct bpf_nf_link *nf = (void *)link;
	struct netfilter_link found = {
		.namespace_number = BPF_CORE_READ(nf, net, ns.inum),
		.hook = BPF_CORE_READ(nf, hook_ops.hooknum),
		.family = BPF_CORE_READ(nf, hook_ops.pf),
		.dead = BPF_CORE_READ(nf, dead),
	};
	bpf_seq_write(ctx->meta->seq, &found, sizeof(found));
	return 0;
}

char _license[] SEC("license") = "GPL";
