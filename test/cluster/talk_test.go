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

func fmtPods(numbers ...int) string {
	var names []string
	for _, n := range numbers {
		names = append(names, fmt.Sprintf("pod-%d:8080", n))
	}
	return strings.Join(names, " ")
}
