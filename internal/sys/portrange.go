package sys

import (
	"fmt"
	"os"
)

// LocalPortRange returns the first and the last port that the kernel gives to
// sockets by itself, in the network namespace of the calling thread's process
// (net.ipv4.ip_local_port_range, which counts for IPv6 too).
func LocalPortRange() (first, last uint16, err error) {
	const path = "/proc/sys/net/ipv4/ip_local_port_range"
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", path, err)
	}
	return first, last, nil
}
