// Package bpf is the part of kernel flows that runs in the kernel, and its memory that both sides
// share: the BPF programs in C, the maps, and what finds flows in them.
//
// layout.h defines what the maps hold; bpf2go derives kernel_bpfel.go from it. packet.h and
// chunks.h parse, index.h finds flows, translate.h, sctp.h and icmp.h rewrite, shortcut.h sends
// packets past the IP stack, track.h and association.h follow a flow's state, table.h decides
// about new ones, upcall.h sends events to userspace, inject.h receives its packets, flow.bpf.c
// joins them. "make bpf" builds them with Debian's clang; a test proves that the committed objects are
// what the sources give. Package flow describes what happens to a packet.
package bpf

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel,bpfeb -cflags "-O2 -g -Wall -Werror -mcpu=v3" -type address -type direction -type tuple -type bucket -type flow -type destination -type deciding -type hiding -type served -type slot -type place -type set -type client -type pin -type member -type range -type origin_key -type origin -type spare -type load -type control -type event -type counter -type role -type state -type option -type seen -type way -type event_kind -type reason Kernel flow.bpf.c -- -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu
