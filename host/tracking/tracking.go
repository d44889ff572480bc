// Package tracking makes the settings of the kernel's connection tracking that
// kube-proxy makes: packets that Sluice does not carry, such as those of hostPorts and
// of masqueraded pods, still depend on them.
//
//	for _, problem := range tracking.Settings{CloseWait: time.Hour}.Apply(tracking.Host()) { ... }
//
// The rules are those of pkg/proxy/conntrack of k8s.io/kubernetes: each value is
// written unless it is there already, and 0 leaves one as it is.
package tracking

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/utils/cpuset"
)

// Settings are the values to set; a zero field leaves the kernel's value.
type Settings struct {
	Max         int // connections that may be tracked
	Established time.Duration
	CloseWait   time.Duration
	BeLiberal   bool
	UDP         time.Duration
	UDPStream   time.Duration
	// Raise keeps a greater maximum of the kernel: this one is a default that nobody
	// asked for.
	Raise bool
}

// ErrNotLoaded is what Apply returns as long as the kernel has no connection tracking.
var ErrNotLoaded = errors.New("connection tracking is not loaded (nf_conntrack): nothing to set yet")

// maxLimit is kube-proxy's limit of the maximum that follows from the CPUs.
const maxLimit = 1 << 20

// MaxFor returns Settings.Max for kube-proxy's maxPerCore and min; 0 without a
// maximum for each CPU.
func MaxFor(perCore, least int) int {
	if perCore <= 0 {
		return 0
	}
	n, err := cpuset.NumCPU() // of the node, not only those that this process may use
	if err != nil {
		n = 1
	}
	if scaled := perCore * n; scaled > least {
		return min(scaled, maxLimit)
	}
	return least
}

// Kernel is where settings are made. Host returns the real one.
type Kernel struct {
	Read  func(path string) (string, error)
	Write func(path, value string) error
	// Timeouts sets timeouts by netlink, in seconds by their attribute: a container
	// that is not privileged may not write to /proc/sys.
	Timeouts func(protocol uint8, seconds map[uint16]uint32) error
}

// Host returns the kernel of the calling thread's network namespace.
func Host() Kernel {
	return Kernel{
		Read: func(path string) (string, error) {
			text, err := os.ReadFile(path) //nolint:gosec // a constant
			return strings.TrimSpace(string(text)), err
		},
		Write:    func(path, value string) error { return os.WriteFile(path, []byte(value), 0) }, //nolint:gosec // the file exists
		Timeouts: setTimeouts,
	}
}

const (
	sysctls  = "/proc/sys/net/netfilter"
	hashSize = "/sys/module/nf_conntrack/parameters/hashsize"
)

// Apply makes the settings in the namespace, and returns what it could not set. A
// kernel without connection tracking has nothing to set.
func (s Settings) Apply(k Kernel) (set []string, problems []error) {
	if s == (Settings{}) {
		return nil, nil
	}
	if _, err := k.Read(filepath.Join(sysctls, "nf_conntrack_max")); errors.Is(err, fs.ErrNotExist) {
		return nil, []error{ErrNotLoaded}
	}
	seconds := func(d time.Duration) int { return int(d / time.Second) }
	liberal := 0
	if s.BeLiberal {
		liberal = 1
	}
	for _, one := range []struct {
		name     string
		value    int
		protocol uint8
		timeout  uint16 // attribute of the timeout; 0 for other settings
	}{
		{"nf_conntrack_max", s.Max, 0, 0},
		{"nf_conntrack_tcp_timeout_established", seconds(s.Established), protocolTCP, timeoutEstablished},
		{"nf_conntrack_tcp_timeout_close_wait", seconds(s.CloseWait), protocolTCP, timeoutCloseWait},
		{"nf_conntrack_tcp_be_liberal", liberal, 0, 0},
		{"nf_conntrack_udp_timeout", seconds(s.UDP), protocolUDP, timeoutUnreplied},
		{"nf_conntrack_udp_timeout_stream", seconds(s.UDPStream), protocolUDP, timeoutReplied},
	} {
		if one.value <= 0 {
			continue
		}
		path := filepath.Join(sysctls, one.name)
		if now, _ := k.Read(path); s.Raise && one.name == "nf_conntrack_max" && atLeast(now, one.value) {
			continue
		}
		done, err := k.number(path, one.value)
		if err != nil && one.timeout != 0 && k.Timeouts(one.protocol, map[uint16]uint32{one.timeout: uint32(one.value)}) == nil {
			done, err = true, nil
		}
		switch now, _ := k.Read(path); {
		case err == nil && done:
			set = append(set, fmt.Sprintf("%s=%d", one.name, one.value))
		case err != nil && one.name == "nf_conntrack_max" && atLeast(now, one.value):
			// There is room for more than is asked for.
		case err != nil:
			problems = append(problems, fmt.Errorf("net.netfilter.%s stays %s, %d is wanted: %w", one.name, now, one.value, err))
		}
	}
	if s.Max > 0 {
		if now, err := k.Read(hashSize); err == nil && !atLeast(now, s.Max/4) {
			if err := k.Write(hashSize, strconv.Itoa(s.Max/4)); err != nil {
				problems = append(problems, fmt.Errorf("%s stays %s, %d is wanted: %w", hashSize, now, s.Max/4, err))
			}
		}
	}
	return set, problems
}

// number writes a number unless it is there already.
func (k Kernel) number(path string, value int) (written bool, err error) {
	text := strconv.Itoa(value)
	if now, err := k.Read(path); err == nil && now == text {
		return false, nil
	}
	if err := k.Write(path, text); err != nil {
		var named *fs.PathError
		if errors.As(err, &named) {
			err = named.Err
		}
		return false, err
	}
	return true, nil
}

func atLeast(text string, value int) bool {
	n, err := strconv.Atoi(text)
	return err == nil && n >= value
}
