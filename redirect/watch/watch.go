// Package watch notices by the kernel's notifications when another program removes
// or changes what steering made, so that it can be repaired at once.
//
//	w, err := watch.Open(watch.Options{Tables: []string{"sluice"}})
//	for range w.Changed() { redirector.Verify() }
//	w.Close()
//
// It looks at nftables tables by name, at routes and policy routing rules with
// our protocol number, and at the node's addresses, which routes name as their
// source. Changes of other programs' objects are ignored. Our own changes are
// reported too, as a check after one of them costs next to nothing. The check that
// runs every few seconds finds what the kernel does not report (iptables-legacy,
// routes that go with an interface).
package watch

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect/route"
)

// Options say what to watch. The zero value is routes and rules alone.
type Options struct {
	// Tables are the names of nftables tables, of whatever family. Without any,
	// nftables are not watched, and the kernel need not have them.
	Tables []string
	// Links makes it report new interfaces.
	Links bool
	// Gone, if not nil, is called at once after a source address may have been
	// removed. Calls do not overlap.
	Gone func()
	// NetNS is a descriptor of the network namespace to watch; 0 is the one
	// that Open is called in.
	NetNS int
}

// Watcher reports changes. Its methods are safe for concurrent use.
type Watcher struct {
	tables  []string
	conns   []*netlink.Conn
	noticed chan time.Duration // the pause after this report
	gone    chan struct{}      // call Options.Gone
	changed chan struct{}
	closed  chan struct{}
	running sync.WaitGroup
	close   sync.Once
}

const (
	// settle is how long to wait for further changes: a flush of many routes is many
	// changes.
	settle = 20 * time.Millisecond
	// pause is the average time between reports at least, which bounds the cost of a
	// program that changes our tables all the time; burst is how many reports come
	// without a pause.
	pause = 250 * time.Millisecond
	burst = 4
	// pauseAfterLoss is the same after notifications were lost, as happens where other
	// programs change a lot of their own.
	pauseAfterLoss = 5 * time.Second

	// atOnce is for changes that must not wait: until the routes have another source,
	// this node's own connections fail.
	atOnce = time.Duration(0)

	receiveBuffer = 1 << 20
)

// Open begins to watch.
func Open(o Options) (*Watcher, error) {
	w := &Watcher{
		tables:  o.Tables,
		noticed: make(chan time.Duration, 1),
		gone:    make(chan struct{}, 1),
		changed: make(chan struct{}, 1),
		closed:  make(chan struct{}),
	}
	groups := routeGroups
	if o.Links {
		groups = append(slices.Clone(groups), groupLink)
	}
	err := w.listen(o.NetNS, syscall.NETLINK_ROUTE, groups, routeChanged)
	if err == nil && len(o.Tables) > 0 {
		err = w.listen(o.NetNS, syscall.NETLINK_NETFILTER, []uint32{groupNFTables}, w.tableChanged)
	}
	if err != nil {
		w.Close()
		return nil, err
	}
	w.running.Add(1)
	go w.pace()
	if o.Gone != nil {
		w.running.Add(1)
		go w.follow(o.Gone)
	}
	return w, nil
}

// Changed gives a value when something of ours may not be as it was. It never
// blocks whoever made the change, and is never closed.
func (w *Watcher) Changed() <-chan struct{} { return w.changed }

// Close ends watching. Closing twice is the same as once.
func (w *Watcher) Close() {
	w.close.Do(func() {
		close(w.closed)
		for _, c := range w.conns {
			_ = c.Close()
		}
	})
	w.running.Wait()
}

// listen reads the notifications of some groups.
func (w *Watcher) listen(netNS, family int, groups []uint32, ours func(netlink.Message) bool) error {
	conn, err := netlink.Dial(family, &netlink.Config{NetNS: netNS})
	if err != nil {
		return fmt.Errorf("watch netlink: %w", err)
	}
	w.conns = append(w.conns, conn)
	_ = conn.SetReadBuffer(receiveBuffer) // with less, more is lost, which shows
	for _, g := range groups {
		if err := conn.JoinGroup(g); err != nil {
			return fmt.Errorf("watch netlink: group %d: %w", g, err)
		}
	}
	w.running.Add(1)
	go w.receive(conn, ours)
	return nil
}

func (w *Watcher) receive(conn *netlink.Conn, ours func(netlink.Message) bool) {
	defer w.running.Done()
	for {
		messages, err := conn.Receive()
		switch {
		case errors.Is(err, syscall.ENOBUFS):
			w.notice(pauseAfterLoss)
		case err != nil:
			return // closed
		case slices.ContainsFunc(messages, addressGone):
			select {
			case w.gone <- struct{}{}:
			default: // a call is pending
			}
			w.notice(atOnce)
		case slices.ContainsFunc(messages, ours):
			w.notice(pause)
		}
	}
}

// notice remembers that there is something to report.
func (w *Watcher) notice(then time.Duration) {
	select {
	case w.noticed <- then:
	default: // there is already
	}
}

// follow calls Options.Gone. It has its own goroutine: the call changes routes, which
// the kernel reports to receive.
func (w *Watcher) follow(call func()) {
	defer w.running.Done()
	for {
		select {
		case <-w.gone:
			call()
		case <-w.closed:
			return
		}
	}
}

// pace reports changes, at a bounded rate.
func (w *Watcher) pace() {
	defer w.running.Done()
	credit, last := time.Duration(burst)*pause, time.Now()
	for {
		var then time.Duration
		select {
		case then = <-w.noticed:
		case <-w.closed:
			return
		}
		if then == atOnce {
			then = pause
		} else if !w.wait(settle) {
			return
		}
		select {
		case w.changed <- struct{}{}:
		default:
		}
		now := time.Now()
		credit = min(credit+now.Sub(last), burst*pause) - then
		last = now
		if credit < 0 && !w.wait(-credit) {
			return
		}
	}
}

// wait waits for a time, and reports whether to go on.
func (w *Watcher) wait(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-w.closed:
		return false
	}
}

// Numbers of netlink, from linux/rtnetlink.h, fib_rules.h, nfnetlink.h and
// nf_tables.h.
const (
	newLink  = 16
	newAddr  = 20
	delAddr  = 21
	newRoute = 24
	delRoute = 25
	delRule  = 33

	replaced = 0x100 // NLM_F_REPLACE: of a route, that it took another's place

	scopeAt    = 3  // in ifaddrmsg
	protocolAt = 5  // in rtmsg
	ruleHeader = 12 // size of fib_rule_hdr

	attrRuleProtocol = 21 // FRA_PROTOCOL
	attrTable        = 1  // NFTA_*_TABLE, the same in each message but one

	groupNFTables  = 7 // NFNLGRP_NFTABLES
	subsysNFTables = 10
	newGeneration  = 15 // NFT_MSG_NEWGEN
)

// routeGroups are RTNLGRP_IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR,
// IPV6_ROUTE and IPV6_RULE.
var routeGroups = []uint32{5, 7, 8, 9, 11, 19}

// groupLink is RTNLGRP_LINK.
const groupLink = 1

// routeChanged reports whether a route or a rule of ours went, or an address came
// or went that can be a source.
func routeChanged(m netlink.Message) bool {
	switch m.Header.Type {
	case newLink:
		return true
	case delRoute:
		return len(m.Data) > protocolAt && m.Data[protocolAt] == route.Protocol
	case newRoute:
		return m.Header.Flags&replaced != 0
	case delRule:
		if len(m.Data) < ruleHeader {
			return false
		}
		protocol := kernel.Attribute(m.Data[ruleHeader:], attrRuleProtocol)
		return len(protocol) > 0 && protocol[0] == route.Protocol
	case newAddr, delAddr:
		return len(m.Data) > scopeAt && m.Data[scopeAt] == syscall.RT_SCOPE_UNIVERSE
	}
	return false
}

// addressGone reports whether an address that a route of ours may have as its
// source is gone.
func addressGone(m netlink.Message) bool {
	return m.Header.Type == delAddr && len(m.Data) > scopeAt && m.Data[scopeAt] == syscall.RT_SCOPE_UNIVERSE
}

// tableChanged reports whether anything was done to a table that is watched.
func (w *Watcher) tableChanged(m netlink.Message) bool {
	if m.Header.Type>>8 != subsysNFTables || m.Header.Type&0xff == newGeneration || len(m.Data) < 4 {
		return false
	}
	name := kernel.Attribute(m.Data[4:], attrTable)
	return len(name) > 0 && slices.Contains(w.tables, string(name[:len(name)-1]))
}
