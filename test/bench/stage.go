package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/peer"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

// stage is one peer in a world of its own, so that no other peer is affected by
// its rules, tracked connections and ports in TIME_WAIT.
type stage struct {
	b       *bench
	peer    peer.Peer
	world   *world.World
	clients *world.Namespace // where clients are
	server  *world.Process
	iperf3  *world.Process // nil if it is not needed
	relay   *peer.Running
	dir     string
	used    bool // a column has run on it
	spent   bool // a column has used it up: the next one needs another stage
}

// openStage builds the world, starts server and relay, and waits until a client
// gets an answer. The flags are only for sluice.
func (b *bench) openStage(p peer.Peer, flags []string) (_ *stage, err error) {
	s := &stage{b: b, peer: p}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.dir, err = os.MkdirTemp(b.dir, p.Name+"-"); err != nil {
		return nil, err
	}
	s.world, err = world.New(world.Options{
		IPv6: b.opts.ipv6, SCTP: b.opts.sctp, Clients: 4, Endpoints: b.opts.endpoints, Congestion: b.opts.control,
	})
	if err != nil {
		return nil, err
	}
	s.clients = s.world.Client
	if b.opts.neighbours {
		if err := s.world.Neighbours(); err != nil {
			return nil, err
		}
	}
	everywhere := netip.IPv4Unspecified()
	if b.opts.ipv6 {
		everywhere = netip.IPv6Unspecified()
	}
	spec, err := json.Marshal(load.ServerSpec{Address: everywhere, Threads: loadThreads(), SCTP: b.opts.sctp})
	if err != nil {
		return nil, err
	}
	if s.server, err = s.world.Server.Start(b.self(serveRole, spec)); err != nil {
		return nil, err
	}
	if b.iperf3 {
		if s.iperf3, err = s.world.Server.Start(world.Command{Path: "iperf3", Args: []string{"-s", "-p", fmt.Sprint(load.PortIperf)}}); err != nil {
			return nil, err
		}
	}
	s.relay, err = p.Start(&peer.Site{
		World: s.world, Dir: s.dir, Self: b.program,
		Threads: b.opts.threads, MaxFiles: b.maxFiles, Flags: flags,
	})
	if err != nil {
		return nil, err
	}
	if err := s.awaitAnswer(); err != nil {
		return nil, err
	}
	if err := s.awaitKernel(); err != nil {
		return nil, err
	}
	if err := s.relay.Settle(); err != nil {
		return nil, fmt.Errorf("%s: %w", p.Name, err)
	}
	return s, nil
}

// close ends everything on the stage.
func (s *stage) close() {
	if s.relay != nil {
		s.relay.Stop()
	}
	for _, p := range []*world.Process{s.server, s.iperf3} {
		if p != nil {
			p.Stop()
		}
	}
	if s.world != nil {
		s.world.Close()
	}
	if s.dir != "" && !s.b.opts.keepLogs {
		_ = os.RemoveAll(s.dir)
	}
}

// loadThreads leaves half of the CPUs to the other end of the load.
func loadThreads() int { return max(runtime.NumCPU()/2, 1) }

// awaitAnswer waits until the echo port answers through the relay.
func (s *stage) awaitAnswer() error {
	const limit = 15 * time.Second
	deadline := time.Now().Add(limit)
	for {
		err := s.world.Client.Do(s.tryEcho)
		if err == nil {
			return nil
		}
		if failed := s.relay.Failed(); failed != nil {
			return fmt.Errorf("%s: %w", s.peer.Name, failed)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: no answer after %v: %w; its last words: %s", s.peer.Name, limit, err, s.relay.Log())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// awaitKernel waits until kernel flows serve, if they are to: the relay does before.
func (s *stage) awaitKernel() error {
	const limit = time.Minute
	for deadline := time.Now().Add(limit); s.peer.Kernel; time.Sleep(20 * time.Millisecond) {
		all := s.metrics()
		if flows, has := all["sluice_flows_limit"]; all != nil && (!has || flows > 0) {
			return nil // older builds lack the metric, and wait themselves
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: the kernel does not forward after %v: %s", s.peer.Name, limit, s.relay.Log())
		}
	}
	return nil
}

// awaitNode waits until kernel flows serve clients on the node itself, if they are to.
func (s *stage) awaitNode() error {
	const limit = 10 * time.Second
	for deadline := time.Now().Add(limit); s.peer.Kernel; time.Sleep(20 * time.Millisecond) {
		if strings.Contains(s.metricsText(), `sluice_node_clients_data_path{path="kernel"`) {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: the kernel does not forward the node's own clients after %v: %s", s.peer.Name, limit, s.relay.Log())
		}
	}
	return nil
}

func (s *stage) tryEcho() error {
	if s.b.opts.sctp {
		return load.AskSCTP(s.relay.Targets[0])
	}
	target := netip.AddrPortFrom(s.relay.Targets[0], load.PortEcho)
	conn, err := net.DialTimeout("tcp", target.String(), time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("ready?")); err != nil {
		return err
	}
	answer := make([]byte, 16)
	n, err := conn.Read(answer)
	if err != nil {
		return err
	}
	if !bytes.Equal(answer[:n], []byte("ready?")) {
		return errors.New("wrong answer")
	}
	return nil
}

// load runs one measurement. Failed connections become a note.
func (s *stage) load(spec load.Spec) (*load.Result, error) {
	spec.Targets = s.relay.Targets
	spec.RelayPIDs, spec.ServerPIDs = s.relay.PIDs, []int{s.server.PID()}
	if s.b.opts.inside {
		spec.Mark = s.b.window
	}
	if spec.Threads == 0 {
		spec.Threads = loadThreads()
	}
	if spec.Warmup == 0 {
		spec.Warmup = s.b.opts.warmup
	}
	if spec.Measure == 0 {
		spec.Measure = s.b.opts.measure
	}
	var result load.Result
	if err := s.role(loadRole, spec, &result, spec.Warmup+spec.Measure+30*time.Second); err != nil {
		return nil, err
	}
	return &result, nil
}

// role runs this program in the clients' namespace in one of its roles.
func (s *stage) role(name string, order, result any, limit time.Duration) error {
	in, err := json.Marshal(order)
	if err != nil {
		return err
	}
	out, err := s.clients.Run(s.b.self(name, in), limit)
	if err != nil {
		if failed := s.relay.Failed(); failed != nil {
			return fmt.Errorf("%w; %w", failed, err)
		}
		return err
	}
	return json.Unmarshal(out, result)
}

// self is a command that starts this program in a role.
func (b *bench) self(role string, in []byte, args ...string) world.Command {
	// The loops keep their threads: Go need not preempt anything.
	return world.Command{Path: b.program, Args: append([]string{role}, args...), Env: []string{"GODEBUG=asyncpreemptoff=1"}, Stdin: in}
}
