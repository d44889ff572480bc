package netns

import (
	"context"
	"net"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
)

// Listen is net.Listen inside the namespace. The address must be literal. The
// listener uses plain TCP, never MPTCP.
func (n *Namespace) Listen(network, address string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return n.ListenConfig(&lc, network, address)
}

// ListenConfig listens inside the namespace with the caller's options.
func (n *Namespace) ListenConfig(lc *net.ListenConfig, network, address string) (net.Listener, error) {
	var l net.Listener
	err := n.Do(func() (err error) {
		l, err = lc.Listen(context.Background(), network, address)
		return err
	})
	return l, err
}

// ListenPacket is net.ListenPacket inside the namespace.
func (n *Namespace) ListenPacket(network, address string) (net.PacketConn, error) {
	var pc net.PacketConn
	err := n.Do(func() (err error) {
		pc, err = net.ListenPacket(network, address)
		return err
	})
	return pc, err
}

// dialTimeout bounds Dial. Hosts in a lab answer within milliseconds, or later on
// a busy machine.
const dialTimeout = 20 * time.Second

// Dial connects from inside the namespace within twenty seconds. The address
// must be literal.
func (n *Namespace) Dial(network, address string) (net.Conn, error) {
	return n.Dialer(&net.Dialer{Timeout: dialTimeout}, network, address)
}

// Connect is Dial that ends the test at an error. The connection is closed when the test
// ends.
func (n *Namespace) Connect(t testing.TB, network, address string) net.Conn {
	t.Helper()
	c := must.Get(n.Dial(network, address))(t)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Dialer connects from inside the namespace with the caller's options.
func (n *Namespace) Dialer(d *net.Dialer, network, address string) (net.Conn, error) {
	var conn net.Conn
	err := n.Do(func() (err error) {
		conn, err = d.Dial(network, address)
		return err
	})
	return conn, err
}

// Cmd is an exec.Cmd that starts inside a namespace. Only this package's methods
// start it there.
type Cmd struct {
	*exec.Cmd
	ns      *Namespace
	waiting sync.Mutex // a second Wait beside another one never returns
}

// Command prepares a program that will run inside the namespace. When the test
// ends, a running program is killed and waited for.
func (n *Namespace) Command(t testing.TB, name string, args ...string) *Cmd {
	ctx, cancel := context.WithCancel(context.Background())
	c := &Cmd{Cmd: exec.CommandContext(ctx, name, args...), ns: n}
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // a killed test cleans up nothing
	t.Cleanup(func() {
		cancel()
		c.waiting.Lock()
		defer c.waiting.Unlock()
		if c.Process != nil && c.ProcessState == nil {
			_ = c.Cmd.Wait()
		}
	})
	return c
}

// Start is exec.Cmd.Start inside the namespace.
func (c *Cmd) Start() error { return c.ns.Do(c.Cmd.Start) }

// Run is exec.Cmd.Run inside the namespace.
func (c *Cmd) Run() error {
	c.waiting.Lock()
	defer c.waiting.Unlock()
	return c.ns.Do(c.Cmd.Run)
}

// Wait is exec.Cmd.Wait.
func (c *Cmd) Wait() error {
	c.waiting.Lock()
	defer c.waiting.Unlock()
	return c.Cmd.Wait()
}

// Output is exec.Cmd.Output inside the namespace.
func (c *Cmd) Output() (out []byte, err error) {
	c.waiting.Lock()
	defer c.waiting.Unlock()
	err = c.ns.Do(func() error {
		out, err = c.Cmd.Output()
		return err
	})
	return out, err
}

// CombinedOutput is exec.Cmd.CombinedOutput inside the namespace.
func (c *Cmd) CombinedOutput() (out []byte, err error) {
	c.waiting.Lock()
	defer c.waiting.Unlock()
	err = c.ns.Do(func() error {
		out, err = c.Cmd.CombinedOutput()
		return err
	})
	return out, err
}
