// Package bpf holds the programs of steering by sk_lookup, in C (steer.bpf.c), and what
// clang made of them. Build tools need no compiler for BPF; make bpf compiles them again.
package bpf

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel,bpfeb -cflags "-O2 -g -Wall -Werror -mcpu=v2" Steer steer.bpf.c -- -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu
