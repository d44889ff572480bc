package choose

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/kernel"
)

// RepliesError says that a mode works, but brings no answers back to
// clients' addresses: endpoints can only be shown the node's.
type RepliesError struct {
	Err error
}

// Error says what was tried.
func (e *RepliesError) Error() string {
	return "no answers come back to clients' addresses: " + e.Err.Error()
}

// Unwrap gives the reason.
func (e *RepliesError) Unwrap() error { return e.Err }

// clientAddresses are of nobody; an endpoint's answers to them come by the same
// interface as it. They are for documentation like the others.
var (
	clientAddresses   = []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:2::1")}
	endpointAddresses = []netip.Addr{netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8:2::2")}
	// strangerAddresses are of clients of other nodes' proxies.
	strangerAddresses = []netip.Addr{netip.MustParseAddr("203.0.113.3"), netip.MustParseAddr("2001:db8:2::3")}
)

// endpointPort is one that no endpoint of a trial listens on: it refuses.
const endpointPort = 80

// newEndpoint makes a namespace that has the addresses of endpoints, at the other
// end of a cable from the node's.
func newEndpoint(node *os.File) (*os.File, error) {
	away, err := sys.NewNetNS()
	if err != nil {
		return nil, err
	}
	if err := layCable(away, node); err != nil {
		_ = away.Close()
		return nil, err
	}
	return away, nil
}

// cableName is that of both ends.
const cableName = "endpoint"

// layCable lays a cable between two namespaces. Both of its ends have the same
// hardware address and ask nobody for others', so that no packet waits for that.
func layCable(away, node *os.File) error {
	here, err := kernel.Open(int(node.Fd()), syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer here.Close()
	there, err := kernel.Open(int(away.Fd()), syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer there.Close()
	const name = cableName
	hardware := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	cable := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: name, HardwareAddr: hardware},
		PeerName:  name, PeerHardwareAddr: hardware, PeerNamespace: netlink.NsFd(away.Fd()),
	}
	if err := here.LinkAdd(cable); err != nil {
		return fmt.Errorf("make a veth: %w", err)
	}
	// The end that is up first sends once the kernel has noticed the other.
	var ends [2]netlink.Link
	for i, handle := range []*netlink.Handle{there, here} {
		if ends[i], err = handle.LinkByName(name); err == nil {
			if err = handle.LinkSetARPOff(ends[i]); err == nil {
				err = handle.LinkSetUp(ends[i])
			}
		}
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
	}
	for i, a := range endpointAddresses {
		err := there.AddrAdd(ends[0], address(a))
		if err == nil {
			err = there.RouteAdd(&netlink.Route{LinkIndex: ends[0].Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: everything(a)})
		}
		if err == nil {
			err = here.RouteAdd(&netlink.Route{LinkIndex: ends[1].Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: address(a).IPNet})
		}
		if err != nil && i == 0 { // there may be no IPv6
			return fmt.Errorf("routes to %s and back: %w", a, err)
		}
	}
	return nil
}

// everything is the range of all addresses of a's family.
func everything(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: make(net.IP, a.BitLen()/8), Mask: net.CIDRMask(0, a.BitLen())}
}

// answersTried is how many answers have to be missed, one after the other, and
// answerPatience how long each may be later than one that was sent after it: on
// one cable none overtakes another but by chance.
const (
	answersTried   = 3
	answerPatience = 10 * time.Millisecond
)

// claimsAnswers tells whether a mode would bring answers back, as it
// says itself.
func claimsAnswers(r redirect.Replies) error {
	if r.Diverted {
		return nil
	}
	return &RepliesError{errors.New(cmp.Or(r.Why, "this mode never does it"))}
}

// bringsAnswers tells whether sockets of the node's namespace, which is also the
// calling thread's, that are bound to a client's address get endpoints' answers
// (F7, F11): a connection to a port where nobody listens has to be refused. What
// does not come back is told from what takes its time by a connection from the
// node's own address, which goes the same way. And this node must let answers to
// other nodes' clients pass, as it is their endpoints' node too. Where the kernel
// has nothing to try it with, the mode is believed.
func bringsAnswers(steering redirect.Redirector, node *os.File) error {
	r := steering.Traits().Replies
	if err := claimsAnswers(r); err != nil {
		return err
	}
	away, err := newEndpoint(node)
	if err != nil {
		return nil // Scratch tells why
	}
	defer away.Close()
	if _, err := steering.Verify(); err != nil { // there is a new interface
		return err
	}
	for i, client := range clientAddresses {
		if client.Is6() && !hasIPv6() {
			continue
		}
		firstPort := r.FirstPort
		if r.Clients != nil {
			ports, err := r.Clients.Hold(client)
			if err != nil {
				return &RepliesError{err}
			}
			defer r.Clients.Release(client)
			firstPort = ports[0]
		}
		if err := isAnswered(client, netip.AddrPortFrom(endpointAddresses[i], endpointPort), firstPort); err != nil {
			return err
		}
		if err := passes(strangerAddresses[i], netip.AddrPortFrom(endpointAddresses[i], endpointPort), r); err != nil {
			return err
		}
	}
	return nil
}

func isAnswered(client netip.Addr, endpoint netip.AddrPort, firstPort uint16) error {
	asNode := func() bool {
		c, err := dial(endpoint)
		if err == nil {
			_ = c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	}
	if !asNode() {
		return nil // it cannot be tried
	}
	for range answersTried {
		fd, e := sys.ConnectTCP(endpoint, netip.AddrPortFrom(client, firstPort), sys.ConnectOptions{Transparent: true})
		if e == 0 || e == syscall.EINPROGRESS {
			overtaken := asNode()
			e = result(fd)
			sys.Close(fd)
			if e == sys.EAGAIN && !overtaken {
				return nil
			}
		}
		if e == syscall.ECONNREFUSED {
			return nil
		}
		if e != sys.EAGAIN {
			return &RepliesError{fmt.Errorf("a connection from %s to an endpoint: %w", client, e)}
		}
		if firstPort != 0 {
			firstPort++
		}
	}
	return &RepliesError{fmt.Errorf("an endpoint's answers to %s were lost, and those to the node's address were not", client)}
}

// result waits for a moment for how a connect comes out.
func result(fd int) sys.Errno {
	e := sys.ConnectResult(fd)
	for late := time.Now().Add(answerPatience); e == sys.EAGAIN && time.Now().Before(late); e = sys.ConnectResult(fd) {
		time.Sleep(time.Millisecond)
	}
	return e
}
