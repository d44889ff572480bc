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
	"github.com/sluice-proxy/sluice/test/wait"
)

// enough is the number of connections after which each of a few endpoints has been
// seen, even with random choice: the probability to miss one of three is 10^-35.
const enough = 200

// inForce bounds the time until all clients see a change. kube-proxy retries a
// failed load only after a while.
const inForce = 30 * time.Second

// meet makes one connection, or sends one datagram, and returns the server's name
// and the client's address that the server sees. The name is "refused" or "silent"
// if no server answers.
func meet(patience time.Duration, from *netns.Host, network, address string) (server string, seen netip.Addr) {
	greeting, err := greet(patience, from, network, address)
	switch {
	// If a node's own packet filter rejects a packet, a UDP client on the node
	// gets EPERM.
	case errors.Is(err, syscall.ECONNREFUSED), network == "udp" && errors.Is(err, syscall.EPERM):
		return "refused", seen
	case isTimeout(err):
		return "silent", seen
	case err != nil:
		return err.Error(), seen
	}
	server, client, _ := strings.Cut(greeting, " ")
	ap, _ := netip.ParseAddrPort(client) // without one, the zero address
	return server, ap.Addr()
}

// greet returns the line that a server sends first.
func greet(patience time.Duration, from *netns.Host, network, address string) (string, error) {
	c, err := from.Dialer(&net.Dialer{Timeout: patience}, network, address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return greeting(patience, c, network)
}

// greeting is greet on an established connection.
func greeting(patience time.Duration, c net.Conn, network string) (string, error) {
	_ = c.SetDeadline(time.Now().Add(patience))
	if network == "udp" {
		if _, err := c.Write([]byte("who\n")); err != nil {
			return "", err
		}
	}
	buffer := make([]byte, 2048)
	n, err := c.Read(buffer)
	line, _, _ := strings.Cut(string(buffer[:n]), "\n")
	return line, err
}

// round asks at least some times, until each wanted server has answered, or an
// unwanted one has. It returns the servers' names, sorted.
func round(want string, ask func() string) string {
	wanted := strings.Split(want, " ")
	least := 8
	switch want {
	case "silent":
		least = 1 // it takes long
	case "refused":
		least = 3
	}
	var got []string
	for i := 0; i < least || len(got) < len(wanted) && i < enough; i++ {
		name := ask()
		if !slices.Contains(got, name) {
			got = append(got, name)
		}
		if !slices.Contains(wanted, name) {
			break
		}
	}
	slices.Sort(got)
	return strings.Join(got, " ")
}

// expectAnswers waits until ask returns the wanted names, in their order, and
// checks that this stays so.
func (w *world) expectAnswers(what, want string, ask func(patience time.Duration) string) {
	w.t.Helper()
	confirm := patience
	if strings.Contains(want, "silent") {
		confirm = silence
	}
	wait.For(w.t, what, inForce, func() error {
		got := round(want, func() string { return ask(silence) })
		if got == want {
			// On a busy machine an answer may be late; only now is it certain that
			// there will be one.
			got = round(want, func() string { return ask(confirm) })
		}
		if got != want {
			return fmt.Errorf("%q, want %q", got, want)
		}
		return nil
	})
}

// expect waits until an address is served as wanted, and checks that this stays
// so.
func (w *world) expect(from *netns.Host, network, address, want string) {
	w.t.Helper()
	w.expectAnswers(network+" from "+from.Name()+" to "+address, want, func(patience time.Duration) string {
		server, _ := meet(patience, from, network, address)
		return server
	})
}

// everybody expects the same for clients outside, in a pod of the node, and on the
// node itself.
func (w *world) everybody(network, address, want string) {
	w.t.Helper()
	for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Pods[0], w.hosts.Node} {
		w.expect(from, network, address, want)
	}
}

// expectSeen waits until the servers of an address see a client address of the
// host of that name, by TCP and by UDP.
func (w *world) expectSeen(from *netns.Host, address, want string) {
	w.t.Helper()
	for _, network := range []string{"tcp", "udp"} {
		w.expectAnswers("who is seen, "+network+" from "+from.Name()+" to "+address, want, func(patience time.Duration) string {
			server, seen := meet(patience, from, network, address)
			if name, ok := w.owners[seen]; ok {
				return name
			}
			return server + " sees " + seen.String()
		})
	}
}
