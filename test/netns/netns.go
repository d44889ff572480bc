// Package netns gives tests network namespaces of their own.
//
// Namespaces are anonymous: they live as long as a descriptor or a process
// refers to them, so that a test that fails, panics or is killed leaves
// nothing behind. Nothing is sent outside of them, and no program such as ip
// or nft is needed.
//
//	func TestSomething(t *testing.T) {
//		lab := netns.NewLab(t, 2)
//		lab.Backends[0].EchoTCP(t, 8080)
//		err := lab.Node.Do(func() error { ... })       // runs inside the node
//		conn, err := lab.Client.Dial("tcp", "10.2.1.2:8080")
//	}
//
// A package whose tests need namespaces can call [Main] from its TestMain, so
// that they also run without root where unprivileged user namespaces are
// allowed.
package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
)

// Namespace is one network namespace. Any number of goroutines may call its
// methods until the end of the test that created it.
type Namespace struct {
	name   string
	file   *os.File       // nil if there is none
	handle netns.NsHandle // of the file
	nl     *netlink.Handle
}

// New creates an empty namespace with lo up, no route, and IPv6 without duplicate
// address detection. It is released when the test ends. The name only appears in
// errors.
func New(t testing.TB, name string) *Namespace {
	t.Helper()
	Require(t)
	n := &Namespace{name: name, handle: netns.None()}
	t.Cleanup(n.close)
	var err error
	if n.file, err = sys.NewNetNS(); err == nil {
		n.handle = netns.NsHandle(n.file.Fd())
		n.nl, err = netlink.NewHandleAt(n.handle)
		if errors.Is(err, syscall.EPROTONOSUPPORT) { // for example a kernel without netfilter
			n.nl, err = netlink.NewHandleAt(n.handle, syscall.NETLINK_ROUTE)
		}
	}
	if err == nil {
		err = n.prepare()
	}
	must.OKf(t, err, "network namespace %s", name)
	return n
}

func (n *Namespace) close() {
	if n.nl != nil {
		n.nl.Close()
	}
	if n.file != nil {
		_ = n.file.Close()
	}
}

// prepare makes the namespace independent of the machine's sysctls, some of which
// a new namespace inherits.
func (n *Namespace) prepare() error {
	for _, s := range [][2]string{
		{"net/ipv4/conf/all/rp_filter", "0"},
		{"net/ipv4/conf/default/rp_filter", "0"},
		{"net/ipv4/conf/all/src_valid_mark", "0"},
		{"net/ipv4/icmp_ratemask", "0"},  // each refused datagram gets an ICMP error
		{"net/ipv6/icmp/ratelimit", "0"}, // the same
		{"net/ipv6/conf/all/disable_ipv6", "0"},
		{"net/ipv6/conf/default/disable_ipv6", "0"},
		{"net/ipv6/conf/all/accept_dad", "0"},
		{"net/ipv6/conf/default/accept_dad", "0"},
		{"net/ipv6/conf/default/accept_ra", "0"},
	} {
		if err := n.SetSysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	lo, err := n.nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	return n.nl.LinkSetUp(lo)
}

// Name returns the name passed to New.
func (n *Namespace) Name() string { return n.name }

// FD returns the namespace's descriptor, which stays open until the test ends.
func (n *Namespace) FD() int { return int(n.handle) }

// Netlink returns a route netlink handle whose sockets are inside the namespace.
func (n *Namespace) Netlink() *netlink.Handle { return n.nl }

// Do runs f inside the namespace, on a dedicated thread, and returns its error.
// Sockets that f creates stay in the namespace. Goroutines that f starts are
// outside of it. f must not end its goroutine (no t.Fatal).
func (n *Namespace) Do(f func() error) error {
	return sys.InNetNS(int(n.handle), f)
}

// SetSysctl writes a sysctl of the namespace, for example "net/ipv4/ip_forward",
// "1".
func (n *Namespace) SetSysctl(key, value string) error {
	return n.Do(func() error {
		return os.WriteFile(filepath.Join("/proc/sys", key), []byte(value), 0)
	})
}

// Sysctl reads a sysctl of the namespace.
func (n *Namespace) Sysctl(key string) (string, error) {
	var value string
	err := n.Do(func() error {
		b, err := os.ReadFile(filepath.Join("/proc/sys", key))
		value = strings.TrimSpace(string(b))
		return err
	})
	return value, err
}

// backlog is how many tests need LongBacklog, and what the kernel's was before.
var backlog struct {
	sync.Mutex
	users  int
	before []byte
}

// LongBacklog has the kernel drop no packets that wait for a CPU until the test ends, in all namespaces.
// It reports false if the machine does not allow that: in a container's network namespace, say.
func LongBacklog(t testing.TB) bool {
	t.Helper()
	const file, most = "/proc/sys/net/core/netdev_max_backlog", "1000000"
	b := &backlog
	b.Lock()
	defer b.Unlock()
	if b.users == 0 {
		var err error
		if b.before, err = os.ReadFile(file); err != nil || os.WriteFile(file, []byte(most), 0) != nil {
			return false
		}
	}
	b.users++
	t.Cleanup(func() {
		b.Lock()
		defer b.Unlock()
		if b.users--; b.users == 0 && strings.TrimSpace(string(b.before)) != most { // else another process has raised it
			_ = os.WriteFile(file, b.before, 0)
		}
	})
	return true
}

// Dropped returns how many packets the kernel has dropped, in all namespaces, because too many
// waited for a CPU (net.core.netdev_max_backlog).
func Dropped(t testing.TB) (n uint64) {
	t.Helper()
	stat := must.Read(t, "/proc/net/softnet_stat")
	for line := range strings.Lines(string(stat)) {
		dropped := must.Get(strconv.ParseUint(strings.Fields(line)[1], 16, 32))(t)
		n += dropped
	}
	return n
}
