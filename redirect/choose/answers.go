package choose

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
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

// Unwrap returns the reason.
func (e *RepliesError) Unwrap() error { return e.Err }

// clientAddresses are documentation addresses (RFC 5737, RFC 3849) that stand for a client
// behind the endpoint's interface.
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
func newEndpoint(node *scratch.Namespace) (*scratch.Namespace, error) {
	away, err := scratch.New("endpoint")
	if err != nil {
		return nil, err
	}
	if err := connect(node, away); err != nil {
		away.Close()
		return nil, err
	}
	return away, nil
}

// cable is the name of the interfaces at both of its ends.
const cable = "endpoint"

func connect(node, away *scratch.Namespace) error {
	if err := node.WireQuietly(cable, away, cable); err != nil {
		return err
	}
	for i, a := range endpointAddresses {
		err := cmp.Or(
			away.AddAddresses(cable, single(a)),
			away.AddLinkRoute(netip.PrefixFrom(a, 0).Masked(), cable),
			node.AddLinkRoute(single(a), cable))
		if err != nil && i == 0 { // there may be no IPv6
			return err
		}
	}
	return nil
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// answerPatience is how long each answer may be later than one that was sent after it: on one
// cable none overtakes another but by chance. All have to be missed, one after the other: a
// busy machine is to get the same choice as an idle one.
var answerPatience = []time.Duration{10 * time.Millisecond, 50 * time.Millisecond, 250 * time.Millisecond}

// claimsAnswers returns why a mode would not bring answers back, by its own account.
func claimsAnswers(r redirect.Replies) error {
	if r.Diverted {
		return nil
	}
	return &RepliesError{errors.New(cmp.Or(r.Why, "this mode never does it"))}
}

// bringsAnswers returns why sockets of the node's namespace, which is also the
// calling thread's, that are bound to a client's address do not get endpoints'
// answers (F7, F11): a connection to a port where nobody listens has to be refused.
// A control connection from the node's own address, which goes the same way,
// distinguishes lost answers from slow ones. And this node must let answers to
// other nodes' clients pass, as it is their endpoints' node too. Where the kernel
// has nothing to try it with, the mode is believed.
func bringsAnswers(steering redirect.Redirector, node *scratch.Namespace) error {
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
		if client.Is6() && TryIPv6() != nil {
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
	for _, patience := range answerPatience {
		fd, e := sys.ConnectTCP(endpoint, netip.AddrPortFrom(client, firstPort), sys.ConnectOptions{Transparent: true})
		if e == 0 || e == syscall.EINPROGRESS {
			overtaken := asNode()
			e = result(fd, patience)
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

// result waits for how a connect comes out.
func result(fd int, patience time.Duration) sys.Errno {
	e := sys.ConnectResult(fd)
	for late := time.Now().Add(patience); e == sys.EAGAIN && time.Now().Before(late); e = sys.ConnectResult(fd) {
		time.Sleep(time.Millisecond)
	}
	return e
}
