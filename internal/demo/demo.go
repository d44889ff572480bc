// Package demo plays the proxy to somebody who has no cluster.
//
// The program starts itself again in network namespaces of its own (and, unless
// root's rights are at hand, in a user namespace of its own), so that nothing on
// the machine changes. In there it lays out a small network with client pods, a
// node and backend pods, writes manifests, runs the real proxy on them as a
// child process, and plays a story whose every step is checked twice: by what
// the clients saw, and by the records in the proxy's connection log.
//
// Afterwards the proxy can go on, and [Exec] runs commands of the user's inside
// that network.
//
// Whatever happens, the proxy and the directory of manifests go away at the end.
package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Options say how the demo is played.
type Options struct {
	// Once ends the demo after the story.
	Once bool
	// Command is how the user called the program: "sluice", "bin/sluice".
	Command string
}

// ErrFailed tells that something went wrong, and that it has been said on
// standard error or standard output.
var ErrFailed = errors.New("the demo failed")

// doorDescriptor is where the inner process finds the listening socket for
// Exec.
const doorDescriptor = 3

// Run plays the demo on standard output and returns when it has ended and
// nothing of it is left: ErrFailed if a step did not hold. Args are the
// arguments that make this program call RunInside with the directory that is
// added to them.
func Run(o Options, args ...string) error {
	dir, err := os.MkdirTemp("", "sluice-demo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var door *os.File
	if !o.Once {
		l, err := openDoor(ownDoorDirs(), os.Geteuid())
		if err != nil {
			return err
		}
		defer closeDoor(l)
		if door, err = l.File(); err != nil {
			return err
		}
		defer door.Close()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, err := newStage(append(args, dir), door)
	if err != nil {
		return err
	}
	return s.wait()
}

// RunInside plays the demo in this process, which Run started, and keeps its
// files in the directory.
func RunInside(o Options, dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// Run removes it too, but Run may have been killed.
	defer os.RemoveAll(dir)
	s, err := newShow(ctx, o, dir)
	defer s.close()
	if err != nil {
		s.fail(err)
		return ErrFailed
	}
	held := s.play(ctx)
	if held && !o.Once && ctx.Err() == nil {
		held = s.stay(ctx)
	}
	if !held {
		return ErrFailed
	}
	return nil
}

// show is everything that the inner process has: the network, the backends, the
// proxy and what is known about connections.
type show struct {
	options  Options
	out      *printer
	world    *world
	backends *backends
	shelf    *shelf
	proxy    *proxy
	ledger   *ledger
	services []*shopService
}

// newShow builds everything and starts the proxy. What it gives has to be
// closed also after an error.
func newShow(ctx context.Context, o Options, dir string) (*show, error) {
	s := &show{options: o, out: newPrinter(os.Stdout), ledger: &ledger{}, services: shopServices()}
	var err error
	if s.world, err = buildWorld(ctx); err != nil {
		return s, explain(err, readSettings(!rootless()))
	}
	if s.backends, err = startBackends(ctx, s.world); err != nil {
		return s, err
	}
	s.shelf = &shelf{dir: filepath.Join(dir, "manifests"), ipv6: s.world.ipv6}
	if err := s.shelf.fill(s.services); err != nil {
		return s, err
	}
	s.introduce()
	s.proxy, err = startProxy(ctx, s.shelf.dir)
	if err != nil {
		return s, err
	}
	return s, nil
}

// close ends everything that is still there.
func (s *show) close() {
	if s.proxy != nil {
		_ = s.proxy.stop()
	}
	if s.backends != nil {
		_ = s.backends.close()
	}
	if s.world != nil {
		s.world.close()
	}
}

// introduce tells where we are.
func (s *show) introduce() {
	p := s.out
	p.line("%s", p.in(bold, "Sluice demo: the real proxy, five small web servers and four client pods"))
	p.line("in network namespaces of their own. Nothing on this machine changes.")
	p.line("")
	p.line("  client pods               node-a            node-b: pods")
	p.line("  10.244.0.11 to .14   ---  sluice run   ---  ash birch cedar elm    10.244.1.11 .12 .13 .15")
	p.line("                            10.96.0.0/16      dogwood (port closed)  10.244.1.14")
	p.line("")
	p.labelled("proxy", plain, proxyCommand(s.shelf.dir))
	if !s.world.ipv6 {
		p.labelled("note", yellow, "this machine has no IPv6; the demo goes without")
	}
}

// fail tells what went wrong, with what the proxy said about it.
func (s *show) fail(err error) {
	if errors.Is(err, context.Canceled) {
		s.out.line("%s", s.out.in(yellow, "interrupted"))
		return
	}
	fmt.Fprintf(os.Stderr, "sluice demo: %v\n", err)
	s.proxySaid()
}

// proxySaid shows the proxy's own log.
func (s *show) proxySaid() {
	if s.proxy == nil {
		return
	}
	s.out.line("")
	s.out.line("  %s", s.out.in(bold, "what the proxy said ("+proxyCommand(s.shelf.dir)+"):"))
	for _, line := range s.proxy.said.text() {
		s.out.line("  %s", s.out.in(dim, line))
	}
}

// stay keeps the proxy running until the context ends, shows each record, and
// lets commands in by the door. It gives false if the proxy ended before.
func (s *show) stay(ctx context.Context) bool {
	l, err := net.FileListener(os.NewFile(doorDescriptor, "door"))
	door, ok := l.(*net.UnixListener)
	if err != nil || !ok {
		s.fail(fmt.Errorf("the socket for sluice demo --exec: %w", err))
		return false
	}
	ctx, cancel := context.WithCancel(ctx)
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel()
	g := &guests{door: door, place: s.place}
	serving.Go(func() { g.serve(ctx) })

	s.invite()
	s.proxy.journal.follow(s.showRecord)
	select {
	case <-ctx.Done():
		s.out.line("")
		s.out.line("ending; nothing is left behind")
		return true
	case <-s.proxy.exited:
		s.fail(s.proxy.ended())
		return false
	}
}

// place gives the namespace that a command runs in.
func (s *show) place(from string) (*namespace, error) {
	switch from {
	case FromClient:
		return s.world.clients, nil
	case FromNode:
		return s.world.nodeA, nil
	}
	return nil, fmt.Errorf("there is no place %q (there are %s and %s)", from, FromClient, FromNode)
}

// showRecord shows one record as it comes.
func (s *show) showRecord(r *record) {
	text, err := r.console()
	if err != nil {
		text = err.Error()
	}
	s.out.record("log", text)
}

// invite tells what can be tried.
func (s *show) invite() {
	p := s.out
	web, cart, search := s.services[0], s.services[1], s.services[2]
	try := func(command, what string) {
		p.line("  %s  %s", pad(s.options.Command+" demo --exec "+command, 62), p.in(dim, what))
	}
	p.line("")
	p.line("%s", p.in(bold, "The proxy goes on. In another terminal:"))
	try("curl -s http://"+s.vip(web, false)+"/", "ash, cedar and elm in turn")
	if s.world.ipv6 {
		try("curl -gs 'http://"+s.vip(web, true)+"/'", "the same over IPv6")
	}
	try("curl -s http://"+s.vip(cart, false)+"/", "always the same")
	try("curl -s http://"+s.vip(search, false)+"/", "never dogwood")
	try("--from node curl -s http://"+s.vip(web, false)+"/", "from the node itself")
	try("--from node nft list ruleset", "what steers, if you have nft")
	try("bash", "a shell on a client pod")
	p.line("Edit the manifests in %s: a change takes effect at once.", s.shelf.dir)
	p.line("Each connection's record appears here when it ends. Ctrl-C ends everything.")
	p.line("")
}

// storyPatience bounds the whole story. Each wait in it has a bound of its own;
// this one is for a machine on which everything is late.
const storyPatience = 60 * time.Second
