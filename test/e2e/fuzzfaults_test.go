package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// fuzzFaults injects faults, one at a time.
type fuzzFaults struct {
	f     *fuzz
	r     *rand.Rand
	names []string

	mu     sync.Mutex
	past   []fuzzFault                 // guarded by mu
	probes map[netip.AddrPort]struct{} // clients of connections that only probed; guarded by mu
}

// fuzzFault is a time during which connections may fail to be established.
// Established ones have to continue, except those to a killed endpoint.
type fuzzFault struct {
	name         string
	began, ended time.Time
}

func newFuzzFaults(f *fuzz) *fuzzFaults {
	return &fuzzFaults{
		f: f, r: rand.New(rand.NewPCG(f.seed, 11)), probes: map[netip.AddrPort]struct{}{},
		names: []string{"kill", "kill", "kill", "endpoints", "endpoints", "endpoints", "pause", "log", "services", "flush", "descriptors"},
	}
}

// run injects faults until the context ends.
func (x *fuzzFaults) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(100+x.r.IntN(500)) * time.Millisecond):
		}
		fault := fuzzFault{name: x.names[x.r.IntN(len(x.names))], began: time.Now()}
		x.make(fault.name)
		fault.ended = time.Now()
		x.mu.Lock()
		x.past = append(x.past, fault)
		x.mu.Unlock()
		x.f.total.faults.Add(1)
	}
}

// some waits for a random time of up to so many milliseconds.
func (x *fuzzFaults) some(most int) { time.Sleep(time.Duration(x.r.IntN(most)) * time.Millisecond) }

func (x *fuzzFaults) make(name string) {
	f := x.f
	switch name {
	case "kill":
		i := x.r.IntN(len(f.hosts))
		f.silence(i)
		x.some(600)
		if err := f.listen(i); err != nil {
			f.differs("%v", err)
		}
	case "endpoints": // leave out one at most, so that one stays when another is killed
		if i := x.r.IntN(len(f.hosts) + 1); i < len(f.hosts) {
			f.list(slices.Delete(slices.Clone(f.hosts), i, i+1))
		} else {
			f.list(f.hosts)
		}
		x.some(200)
	case "flush":
		x.flush()
	case "descriptors":
		x.descriptors()
	case "pause":
		f.p.signal(syscall.SIGSTOP)
		x.some(400)
		f.p.signal(syscall.SIGCONT)
	case "log":
		f.p.signal(syscall.SIGHUP)
	case "services":
		o := &object{name: "other", vips: []string{"10.96.0.99", "fd00:96::99"}, port: 80, nodePort: 30099, target: 8080,
			endpoints: []endpoint{{host: f.hosts[0], node: "backend"}}}
		f.p.put(o)
		x.some(200)
		f.p.remove(o.name)
	}
}

// stray makes a client drop the packets that an endpoint sends directly to it: its
// kernel would reset the connection.
const stray = "add table inet stray; add chain inet stray in { type filter hook input priority 0; };" +
	"add rule inet stray in ip saddr { 10.2.0.0/16, 10.3.2.0/24 } drop; add rule inet stray in ip6 saddr { fd00:2::/32, fd00:3:2::/64 } drop"

// firewall runs nft on the clients outside of the node.
func (x *fuzzFaults) firewall(command string) {
	for _, c := range []*netns.Host{x.f.clients[nearClient], x.f.clients[farClient]} {
		if out, err := c.Command(x.f.t, administration(x.f.t, "nft"), command).CombinedOutput(); err != nil {
			x.f.differs("nft %s: %v\n%s", command, err, out)
		}
	}
}

// flush removes the steering and waits until all clients are served again.
func (x *fuzzFaults) flush() {
	x.firewall(stray)
	defer x.firewall("delete table inet stray")
	commands := x.f.m.flush
	if x.r.IntN(2) == 0 { // only one of them
		i := x.r.IntN(len(commands))
		commands = commands[i : i+1]
	}
	for _, command := range commands {
		out, err := x.f.lab.Node.Command(x.f.t, administration(x.f.t, command[0]), command[1:]...).CombinedOutput()
		if err != nil && !strings.Contains(string(out), "FIB table does not exist") {
			x.f.differs("%s: %v\n%s", strings.Join(command, " "), err, out)
		}
	}
	for client := range x.f.clients {
		x.untilServed(client)
	}
}

// untilServed probes until a client has reached every destination.
func (x *fuzzFaults) untilServed(client int) {
	for _, to := range x.f.targets {
		if client == nodeClient && slices.Contains(externalIPs, to.Addr().String()) {
			continue // the client has no route there
		}
		err := wait.Poll(fuzzPatience, func() error {
			own, c, err := x.f.dial(&net.Dialer{Timeout: time.Second}, client, "tcp", to)
			x.mu.Lock()
			x.probes[own] = struct{}{}
			x.mu.Unlock()
			if err == nil {
				_ = c.Close()
			}
			return err
		})
		if err != nil {
			x.f.differs("%s: %s to %v: not served again: %v", x.f.m.name, x.f.clients[client].Name(), to, err)
		}
	}
}

// descriptors takes away the proxy's descriptors for a moment.
func (x *fuzzFaults) descriptors() {
	pid := x.f.p.cmd.Process.Pid
	var was unix.Rlimit
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err == nil {
		err = unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &was)
	}
	if err == nil {
		few := was
		few.Cur = uint64(len(list) + x.r.IntN(20))
		err = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &few, nil)
	}
	if err == nil {
		x.some(800)
		err = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &was, nil)
	}
	if err != nil {
		x.f.differs("descriptors: %v", err)
	}
}

// afterEffect is how long after a fault a connection may still suffer: a lost SYN
// is repeated after a second, and a loop without descriptors retries after one.
const afterEffect = 1500 * time.Millisecond

// excuses tells whether a fault explains that a connection was not established.
// Faults of a single endpoint and changes of the configuration explain none,
// except the reset of an endpoint that was killed right after it had accepted.
func (x *fuzzFaults) excuses(result fuzzResult) bool {
	if result.connected && result.talk.down.end != endFIN {
		return true // the endpoint's reset overtook its greeting
	}
	return x.during(result.began, result.ended, afterEffect, "flush", "descriptors") ||
		result.connected && x.during(result.began, result.ended, 0, "kill")
}

// during tells whether one of these faults occurred between two moments, or up to
// delay before.
func (x *fuzzFaults) during(began, ended time.Time, late time.Duration, names ...string) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.ContainsFunc(x.past, func(fault fuzzFault) bool {
		return slices.Contains(names, fault.name) && fault.began.Before(ended) && fault.ended.Add(late).After(began)
	})
}

// probed tells whether a client only probed.
func (x *fuzzFaults) probed(client netip.AddrPort) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, ok := x.probes[client]
	return ok
}

// around lists the faults between two moments, or shortly before.
func (x *fuzzFaults) around(began, ended time.Time) string {
	x.mu.Lock()
	defer x.mu.Unlock()
	var b strings.Builder
	for _, fault := range x.past {
		if fault.began.Before(ended) && fault.ended.Add(2*afterEffect).After(began) {
			fmt.Fprintf(&b, "%s %s+%v ", fault.name, fault.began.Format(clock), fault.ended.Sub(fault.began).Round(time.Millisecond))
		}
	}
	return b.String()
}
