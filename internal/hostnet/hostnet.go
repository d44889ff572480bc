// Package hostnet tells what this node's network stack says about addresses:
// which are the node's own, which lead to its pods, and which reach each other
// without it.
//
// kube-proxy can tell local pods by the interface that their packets come in by
// (A4.6). A proxy in user space sees a client's address and no interface, so it
// asks the other way round: a client is a local pod if the node routes its
// address out of an interface of pods. [Watcher] reads that from the main
// routing table of both families.
//
//	w, err := hostnet.Open(hostnet.Options{Pods: hostnet.Prefixed("cali")})
//	state, err := w.Read()
//	err = w.Run(ctx, func(s hostnet.State) { ... })  // whenever it differs
//
// A node without such interfaces has no pod ranges, which is not an error: they
// come with the first pod.
package hostnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	mdnetlink "github.com/mdlayher/netlink"
	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"
)

// State is what was true at one moment. It is read-only.
type State struct {
	// Addresses are those of all interfaces, sorted, each once.
	Addresses []netip.Addr
	// Broadcasts are the broadcast addresses of all links but 255.255.255.255,
	// likewise.
	Broadcasts []netip.Addr
	// PodRanges are the ranges of addresses whose route leads out of a pod
	// interface, sorted and apart from each other. The node's own addresses are
	// never in them.
	PodRanges []netip.Prefix

	links *links
}

// Equal reports whether two States say the same.
func (s State) Equal(o State) bool {
	return slices.Equal(s.Addresses, o.Addresses) && slices.Equal(s.Broadcasts, o.Broadcasts) && slices.Equal(s.PodRanges, o.PodRanges) && s.links.equal(o.links)
}

// Options say what to look for. The zero value looks for addresses only.
type Options struct {
	// Pods tells by its name whether local pods are behind an interface; with
	// nil there are no pod ranges.
	Pods   func(name string) bool
	Logger zerolog.Logger
}

// Named is for the interface of one name, as of a bridge that pods are
// connected to.
func Named(name string) func(string) bool {
	return func(s string) bool { return s == name }
}

// Prefixed is for all interfaces whose names begin with prefix, where each pod
// has one.
func Prefixed(prefix string) func(string) bool {
	return func(s string) bool { return strings.HasPrefix(s, prefix) }
}

// A pod that comes or goes changes an interface, addresses and routes one after
// the other: they are waited for until it has been quiet for as long, but not
// longer than patience.
const (
	quiet    = 50 * time.Millisecond
	patience = 500 * time.Millisecond
	// retry is the time until what could not be read is read again.
	retry = time.Second
)

// Watcher follows one network namespace: that of the thread that opened it. Read
// is for before Run, which is for once.
type Watcher struct {
	opts   Options
	nl     *netlink.Handle
	events *mdnetlink.Conn
	dirty  chan struct{}
	last   State // what Read last gave
}

// Open makes a Watcher. Whatever changes from then on, Run will see.
func Open(opts Options) (*Watcher, error) {
	groups := []uint32{
		syscall.RTNLGRP_LINK, syscall.RTNLGRP_IPV4_IFADDR, syscall.RTNLGRP_IPV6_IFADDR,
		syscall.RTNLGRP_IPV4_ROUTE, syscall.RTNLGRP_IPV6_ROUTE,
	}
	var mask uint32
	for _, g := range groups {
		mask |= 1 << (g - 1)
	}
	events, err := mdnetlink.Dial(syscall.NETLINK_ROUTE, &mdnetlink.Config{Groups: mask})
	if err != nil {
		return nil, fmt.Errorf("changes of addresses and routes: %w", err)
	}
	nl, err := netlink.NewHandle(syscall.NETLINK_ROUTE)
	if err != nil {
		_ = events.Close() // the error to tell is another
		return nil, fmt.Errorf("addresses and routes: %w", err)
	}
	// The kernel then sends the routes of the table that is asked for. Kernels
	// before 4.20 send all.
	_ = nl.SetStrictCheck(true)
	return &Watcher{opts: opts, nl: nl, events: events, dirty: make(chan struct{}, 1)}, nil
}

// Close releases what Open made and ends Run. It may be called again.
func (w *Watcher) Close() {
	_ = w.events.Close() // nothing was written
	w.nl.Close()
}

// Run calls deliver with each State that differs from what Read gave before Run
// began, or from the one delivered before, until ctx ends. It then closes the
// Watcher. What cannot be read is logged and read again; the error is that of
// following changes.
func (w *Watcher) Run(ctx context.Context, deliver func(State)) error {
	var lost error
	deaf := make(chan struct{})
	go func() {
		defer close(deaf)
		lost = w.listen()
	}()
	again := time.NewTimer(0) // Read may not have been called
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			w.Close()
			<-deaf
			return nil
		case <-deaf:
			w.Close()
			return fmt.Errorf("changes of addresses and routes: %w", lost)
		case <-w.dirty:
			w.settle(ctx)
		case <-again.C:
		}
		prev := w.last
		next, err := w.Read()
		if err != nil {
			w.opts.Logger.Warn().Err(err).Msg("what is known of addresses and routes may be old; trying again")
			again.Reset(retry)
			continue
		}
		if !next.Equal(prev) {
			deliver(next)
		}
	}
}

// listen takes note of every change. When there are more of them than the
// socket holds, the kernel says so, and that some were lost does not matter: all
// is read anew.
func (w *Watcher) listen() error {
	for {
		if _, err := w.events.Receive(); err != nil && !errors.Is(err, syscall.ENOBUFS) {
			return err
		}
		select {
		case w.dirty <- struct{}{}:
		default:
		}
	}
}

// settle waits until changes pause.
func (w *Watcher) settle(ctx context.Context) {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	pause := time.NewTimer(quiet)
	defer pause.Stop()
	for {
		select {
		case <-w.dirty:
			pause.Reset(quiet)
		case <-pause.C:
			return
		case <-limit.C:
			return
		case <-ctx.Done():
			return
		}
	}
}
