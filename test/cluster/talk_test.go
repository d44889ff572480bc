//go:build cluster

package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
)

const (
	// tries is how many connections tell who serves an address: with endpoints
	// chosen at random, one of three is missed by them once in 10^5.
	tries = 30
	// silence is how long nothing must come before an address counts as silent.
	silence = 400 * time.Millisecond
)

// at gives an address and port.
func at(ip string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(port)).String()
}

// outcome gives who answers at an address: their names, sorted, or "refused" or
// "silent".
func outcome(from *netns.Host, network, address string, n int) string {
	var names []string
	for range n {
		name, err := ask(from, network, address)
		switch {
		case errors.Is(err, syscall.ECONNREFUSED):
			name = "refused"
		case isTimeout(err):
			name = "silent"
		case err != nil:
			name = err.Error()
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
		if name == "silent" || name == "refused" {
			break // it is not said twice
		}
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// ask gives the name of who serves an address to one connection or datagram.
func ask(from *netns.Host, network, address string) (string, error) {
	return askWithin(silence, from, network, address)
}

// askWithin is ask with patience of its own, for the connection and again for
// the answer.
func askWithin(patience time.Duration, from *netns.Host, network, address string) (string, error) {
	c, err := from.Dialer(&net.Dialer{Timeout: patience}, network, address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if network == "udp" {
		if _, err := c.Write([]byte("who\n")); err != nil {
			return "", err
		}
	}
	buffer := make([]byte, 2048)
	n, err := c.Read(buffer)
	if err != nil {
		return "", err
	}
	name, _, _ := strings.Cut(string(buffer[:n]), "\n")
	name, _, _ = strings.Cut(name, " ")
	return name, nil
}

// expect waits until an address is served as wanted, and stays so.
func (w *world) expect(from *netns.Host, network, address, want string) {
	w.t.Helper()
	n := tries
	if !strings.Contains(want, " ") {
		n = 6
	}
	deadline := time.Now().Add(15 * time.Second)
	for {
		got := outcome(from, network, address, n)
		if got == want {
			break
		}
		if time.Now().After(deadline) {
			w.t.Errorf("%s from %s to %s: %q, want %q", network, from.Name(), address, got, want)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	if got := outcome(from, network, address, n); got != want {
		w.t.Errorf("%s from %s to %s: %q at last, want %q", network, from.Name(), address, got, want)
	}
}

// everybody expects the same for clients of each place: outside, a pod of the
// node, the node itself.
func (w *world) everybody(network, address, want string) {
	w.t.Helper()
	for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Pods[0], w.hosts.Node} {
		w.expect(from, network, address, want)
	}
}

func fmtPods(numbers ...int) string {
	var names []string
	for _, n := range numbers {
		names = append(names, fmt.Sprintf("pod-%d:8080", n))
	}
	return strings.Join(names, " ")
}
