// Package scale measures the effect of a cluster's size on the product: the time
// from its start until everything is in force, the time until a change is, memory
// and CPU. It starts the real binary in a network namespace, with a minimal API
// server of its own or a directory of manifests. Only connections that arrive
// decide that something is in force.
package scale

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/procstat"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

// Mode is a steering mode with a source of objects.
type Mode struct {
	Name  string
	Flags []string
	// Most is the largest number of services with which it is measured.
	Most int
	// MostEndpoints is the largest number of endpoints; zero for any.
	MostEndpoints int
	// Manifests reads the objects from a directory instead of an API server.
	Manifests bool
	// Program is the proxy, if it is not the product.
	Program string
	// Kernel has kernel flows, and starts until they serve.
	Kernel bool
}

// Modes are all modes that are measured.
func Modes() []Mode {
	const noLimit = 1 << 20
	return []Mode{
		{Name: "tproxy/nftables", Flags: []string{"--redirect", "tproxy", "--tproxy-backend", "nftables"}, Most: noLimit},
		{Name: "sklookup", Flags: []string{"--redirect", "sklookup"}, Most: noLimit},
		{Name: "sklookup/nftables", Flags: []string{"--redirect", "sklookup+nftables"}, Most: noLimit},
		{Name: "bind", Flags: []string{"--redirect", "bind"}, Most: 3000},
		{Name: "tproxy/iptables", Flags: []string{"--redirect", "tproxy", "--tproxy-backend", "iptables"}, Most: 10000},
		{Name: "tproxy/nftables, manifests", Flags: []string{"--redirect", "tproxy", "--tproxy-backend", "nftables"}, Most: noLimit, Manifests: true},
	}
}

// Sizes are the default sizes.
var Sizes = []Size{{100, 10}, {1000, 10}, {3000, 10}, {10000, 10}, {30000, 3}}

// Options select what to measure.
type Options struct {
	Binary string // the product's
	Sizes  []Size
	Modes  []Mode
	// Changes is the number of measured changes of each kind.
	Changes int
	// Rate is the number of changed slices a second of a rollout, Length its time; zero
	// for none.
	Rate   int
	Length time.Duration
	Log    io.Writer // progress
}

// Result is the result of one mode and size. Times are the median and the worst.
type Result struct {
	Mode              string
	Services, Each    int
	Endpoints         int
	Start             time.Duration
	Endpoint, Service [2]time.Duration
	// RSS in bytes after the first connection, and after the changes; CPU time of
	// the start, and of all changes together.
	RSS, RSSLater  int64
	Maps           int64 // of the kernel's BPF maps, at the end
	CPU, CPUChange time.Duration
	Changes        int // in total
	Rollout        Rollout
	Error          string // why there are no figures
}

// Run measures all modes with all sizes. A failed mode gives a Result with the
// error.
func Run(o Options) ([]Result, error) {
	var results []Result
	for _, size := range o.Sizes {
		for _, mode := range o.Modes {
			if size.Services > mode.Most || mode.MostEndpoints > 0 && size.Services*size.Each > mode.MostEndpoints {
				continue
			}
			r := Result{Mode: mode.Name, Services: size.Services, Each: size.Each}
			if err := r.measure(&o, mode); err != nil {
				r.Error = err.Error()
			}
			fmt.Fprintf(o.Log, "%+v\n", r)
			results = append(results, r)
		}
	}
	return results, nil
}

// run is one run of the product.
type run struct {
	world   *world.World
	cluster *cluster
	api     *api // nil with manifests
	dir     string
	proxy   *world.Process
	servers []net.Listener
}

const (
	// startPatience is the maximum wait for a start, changePatience that for a
	// change.
	startPatience  = 5 * time.Minute
	changePatience = time.Minute
	// attempt bounds one connection: an address that is not yet served may not
	// answer at all.
	attempt = 2 * time.Millisecond
)

func (r *Result) measure(o *Options, m Mode) error {
	w, err := world.New(world.Options{Clients: 1, Endpoints: 2})
	if err != nil {
		return err
	}
	defer w.Close()
	u := &run{world: w, cluster: &cluster{Size: Size{r.Services, r.Each}, live: w.Endpoints[0], nodeAddr: w.NodeAddr}}
	defer u.close()
	r.Endpoints = u.cluster.endpoints()
	if err := u.prepare(m); err != nil {
		return err
	}
	last := r.Services - 1
	begin := time.Now()
	if err := u.start(o.Binary, m); err != nil {
		return err
	}
	if err := u.await(vip(last), w.Endpoints[0], startPatience); err != nil {
		return err
	}
	if m.Kernel {
		if err := u.awaitKernel(); err != nil {
			return err
		}
	}
	r.Start = time.Since(begin)
	pids := []int{u.proxy.PID()}
	if r.CPU, err = procstat.CPU(pids); err != nil {
		return err
	}
	if r.RSS, err = rss(pids); err != nil {
		return err
	}
	if err := u.settle(); err != nil {
		return err
	}
	before, err := procstat.CPU(pids)
	if err != nil {
		return err
	}
	if r.Endpoint, err = series(o.Changes, u.changeEndpoint); err != nil {
		return fmt.Errorf("a changed endpoint: %w", err)
	}
	if r.Service, err = series(o.Changes, u.addService); err != nil {
		return fmt.Errorf("an added service: %w", err)
	}
	after, err := procstat.CPU(pids)
	if err != nil {
		return err
	}
	r.CPUChange, r.Changes = after-before, 2*o.Changes
	if o.Rate > 0 {
		if r.Rollout, err = u.rollout(o.Rate, o.Length); err != nil {
			return fmt.Errorf("a rollout: %w", err)
		}
	}
	r.Maps = procstat.Maps(pids[0])
	r.RSSLater, err = rss(pids)
	return err
}

func rss(pids []int) (int64, error) {
	m, err := procstat.ReadMemory(pids)
	return m.RSS, err
}

// series makes a change n times, and returns the median and the worst.
func series(n int, change func(i int) (time.Duration, error)) (times [2]time.Duration, err error) {
	all := make([]time.Duration, n)
	for i := range all {
		if all[i], err = change(i); err != nil {
			return times, fmt.Errorf("number %d: %w", i+1, err)
		}
	}
	slices.Sort(all)
	return [2]time.Duration{all[n/2], all[n-1]}, nil
}

// prepare creates the source and the live endpoints' servers.
func (u *run) prepare(m Mode) (err error) {
	if u.dir, err = os.MkdirTemp("", "sluice-scale-"); err != nil {
		return err
	}
	for _, a := range u.world.Endpoints {
		err := u.world.Server.Do(func() error {
			l, err := net.Listen("tcp4", netip.AddrPortFrom(a, serverPort).String())
			if err == nil {
				u.servers = append(u.servers, l)
				go greet(l, a.String())
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	if m.Manifests {
		return u.cluster.write(u.dir)
	}
	return u.world.Node.Do(func() error {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return err
		}
		u.api, err = newAPI(l, u.cluster)
		return err
	})
}

// greet sends each client a name.
func greet(l net.Listener, name string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, name) // the client may have gone
		_ = c.Close()
	}
}

func (u *run) start(binary string, m Mode) (err error) {
	if m.Program != "" {
		u.proxy, err = u.world.Node.Start(world.Command{Path: m.Program, Args: append([]string{"--master", u.api.url(), "--hostname-override", "node"}, m.Flags...)})
		return err
	}
	args := []string{"run", "--hostname-override", "node", "--access-log", "off",
		"--metrics-bind-address", metricsAddress, "--healthz-bind-address", "127.0.0.1:10256"}
	if m.Manifests {
		args = append(args, "--manifests", u.dir)
	} else {
		args = append(args, "--master", u.api.url())
	}
	if help, err := exec.Command(binary, "run", "--help").Output(); err == nil && strings.Contains(string(help), "--datapath") && !m.Kernel {
		args = append(args, "--datapath", "relay") // its table says what steering costs
	}
	u.proxy, err = u.world.Node.Start(world.Command{Path: binary, Args: append(args, m.Flags...)})
	return err
}

func (u *run) close() {
	if u.proxy != nil {
		u.proxy.Stop()
	}
	if u.api != nil {
		u.api.close()
	}
	for _, l := range u.servers {
		_ = l.Close()
	}
	if u.dir != "" {
		_ = os.RemoveAll(u.dir)
	}
}

// settle waits until a change would be noticed, and until the work after the start
// is done, such as returning memory. So a change is measured on its own.
func (u *run) settle() error {
	deadline := time.Now().Add(changePatience)
	for u.api != nil && (!u.api.watched("services") || !u.api.watched("endpointslices")) {
		if time.Now().After(deadline) {
			return errors.New("it does not watch")
		}
		time.Sleep(time.Millisecond)
	}
	for last := time.Duration(-1); time.Now().Before(deadline); time.Sleep(restPeriod) {
		used, err := procstat.CPU([]int{u.proxy.PID()})
		if err != nil {
			return err
		}
		if used == last {
			return nil
		}
		last = used
	}
	return errors.New("it does not come to rest")
}

// restPeriod is how long an idle process uses no CPU tick.
const restPeriod = 200 * time.Millisecond

// await connects to a service repeatedly until an endpoint answers.
func (u *run) await(service, endpoint netip.Addr, patience time.Duration) error {
	return u.world.Client.Do(func() error {
		deadline := time.Now().Add(patience)
		for {
			got, err := ask(service)
			if err == nil && got == endpoint.String() {
				return nil
			}
			select {
			case <-u.proxy.Done():
				return fmt.Errorf("it ended: %s", u.proxy.Log())
			default:
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%s does not lead to %s after %v: %w; its last words: %s", service, endpoint, patience, errors.Join(err, errors.New("got "+got)), u.proxy.Log())
			}
		}
	})
}

// ask connects from the calling thread's namespace.
func ask(service netip.Addr) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), attempt)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "tcp4", netip.AddrPortFrom(service, servicePort).String())
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return "", err
	}
	text, err := io.ReadAll(c)
	return strings.TrimSpace(string(text)), err
}

// changeEndpoint replaces the live endpoint by another one.
func (u *run) changeEndpoint(i int) (time.Duration, error) {
	last := u.cluster.Services - 1
	endpoint := u.world.Endpoints[(i+1)%2]
	slice := u.cluster.sliceOf(last, endpoint)
	begin := time.Now()
	var err error
	if u.api == nil {
		err = writeFile(u.dir, "last-slice.json", slice)
	} else {
		err = u.api.send("endpointslices", "MODIFIED", slice)
	}
	if err != nil {
		return 0, err
	}
	err = u.await(vip(last), endpoint, changePatience)
	return time.Since(begin), err
}

// addService adds a service with its slice.
func (u *run) addService(i int) (time.Duration, error) {
	n := u.cluster.Services + i
	service, slice := u.cluster.service(n), u.cluster.slice(n)
	begin := time.Now()
	var err error
	if u.api == nil {
		err = writeFile(u.dir, fmt.Sprintf("new-%05d.json", n), service, slice)
	} else {
		err = errors.Join(u.api.send("services", "ADDED", service), u.api.send("endpointslices", "ADDED", slice))
	}
	if err != nil {
		return 0, err
	}
	err = u.await(vip(n), u.cluster.live, changePatience)
	return time.Since(begin), err
}
