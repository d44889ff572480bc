// Package hostnet reads this node's addresses and routes: the node's own addresses,
// the ranges that lead to its pods, and which hosts share a link.
//
// kube-proxy can recognize local pods by the interface of their packets (A4.6). A
// proxy in user space sees only the client's address. So it checks the route back:
// a client is a local pod if the node routes its address to a pod interface.
// [Watcher] reads the main routing tables of both families.
//
//	w, err := hostnet.Open(hostnet.Options{Pods: hostnet.Prefixed("cali")})
//	state, err := w.Read()
//	err = w.Run(ctx, func(s hostnet.State) { ... })  // after each change
//
// A node without pod interfaces has no pod ranges. That is not an error: the first
// pod may come later.
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

// State is a snapshot of addresses and routes. It is read-only.
type State struct {
	// Addresses are the addresses of all interfaces, sorted and without duplicates.
	Addresses []netip.Addr
	// Broadcasts are the broadcast addresses of all links except 255.255.255.255,
	// sorted and without duplicates.
	Broadcasts []netip.Addr
	// PodRanges are the ranges that are routed to pod interfaces, sorted and
	// disjoint. They do not contain the node's own addresses.
	PodRanges []netip.Prefix

	links *links
}

// Equal reports whether two States are equal.
func (s State) Equal(o State) bool {
	return slices.Equal(s.Addresses, o.Addresses) && slices.Equal(s.Broadcasts, o.Broadcasts) && slices.Equal(s.PodRanges, o.PodRanges) && s.links.equal(o.links)
}

// Options configure a Watcher. The zero value reads addresses only.
type Options struct {
	// Pods reports by name whether an interface leads to local pods. If it is nil,
	// there are no pod ranges.
	Pods   func(name string) bool
	Logger zerolog.Logger
}

// Named matches one interface name, such as a bridge of pods.
func Named(name string) func(string) bool {
	return func(s string) bool { return s == name }
}

// Prefixed matches all interface names with a prefix, for networks with one
// interface for each pod.
func Prefixed(prefix string) func(string) bool {
	return func(s string) bool { return strings.HasPrefix(s, prefix) }
}

// Starting or stopping a pod changes an interface, addresses and routes one after
// another. Run waits until there was no change for the time quiet, but at most
// patience.
const (
	quiet    = 50 * time.Millisecond
	patience = 500 * time.Millisecond
	// retry is the time until the next attempt after a failed read.
	retry = time.Second
)

// Watcher follows the network namespace of the thread that opened it. Call Read
// only before Run, and Run once.
type Watcher struct {
	opts   Options
	nl     *netlink.Handle
	events *mdnetlink.Conn
	dirty  chan struct{}
	last   State // the last result of Read
}

// Open creates a Watcher. Run sees all changes from then on.
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
		_ = events.Close() // return the first error
		return nil, fmt.Errorf("addresses and routes: %w", err)
	}
	// With strict checks, the kernel sends only the routes of the requested table.
	// Kernels before 4.20 send all.
	_ = nl.SetStrictCheck(true)
	return &Watcher{opts: opts, nl: nl, events: events, dirty: make(chan struct{}, 1)}, nil
}

// Close releases the Watcher and ends Run. It may be called more than once.
func (w *Watcher) Close() {
	_ = w.events.Close() // nothing was written
	w.nl.Close()
}

// Run calls deliver with each new State until ctx ends. The first one is compared
// with the last Read. Run then closes the Watcher. It logs and retries failed
// reads; it returns an error if it cannot follow changes.
func (w *Watcher) Run(ctx context.Context, deliver func(State)) error {
	var lost error
	deaf := make(chan struct{})
	go func() {
		defer close(deaf)
		lost = w.listen()
	}()
	again := time.NewTimer(0) // the caller may not have called Read
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
			w.opts.Logger.Warn().Err(err).Msg("cannot read addresses and routes; the known ones may be outdated; trying again")
			again.Reset(retry)
			continue
		}
		if !next.Equal(prev) {
			deliver(next)
		}
	}
}

// listen records every change. If the socket overflows, the kernel reports that;
// the lost messages do not matter, because Run reads everything again.
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

// settle waits for a pause between changes.
func (w *Watcher) settle(ctx context.Context) {
	limit := time.After(patience)
	for {
		select {
		case <-w.dirty:
		case <-time.After(quiet):
			return
		case <-limit:
			return
		case <-ctx.Done():
			return
		}
	}
}
