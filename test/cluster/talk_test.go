//go:build cluster

package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
)

const (
	// silence is the time without an answer after which an address counts as
	// silent.
	silence = 400 * time.Millisecond
)

// at returns an address with a port.
func at(ip string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(port)).String()
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// askWithin returns the name of the server that an address gives to one connection
// or datagram, with patience for the connection and again for the answer.
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
