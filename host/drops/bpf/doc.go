// Package bpf holds the program that sees what netfilter drops, in C (drops.bpf.c), and what
// clang made of it. Build tools need no compiler for BPF; make bpf compiles it again.
package bpf

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel,bpfeb -cflags "-O2 -g -Wall -Werror -mcpu=v2" -type endpoint Drops drops.bpf.c -- -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu
