// Package demo shows the proxy without a cluster.
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
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/web"
)

// Options say how the demo is played.
type Options struct {
	// Once ends the demo after the story.
	Once bool
	// Command is how the user called the program: "sluice", "bin/sluice".
	Command string
	// Page is the address and port, of this machine, of the page that shows the demo;
	// empty for none. It excludes Once.
	Page string
}

// ErrFailed says that something failed, and that it was reported on standard error
// or standard output.
var ErrFailed = errors.New("the demo failed")

// Where the inner process finds the listening sockets for Exec and of the page.
const (
	doorDescriptor = 3
	pageDescriptor = 4
)

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
	var sockets []*os.File // from doorDescriptor on
	if !o.Once {
		l, err := openDoor(doorOf(os.Geteuid()), os.Geteuid())
		if err != nil {
			return fmt.Errorf("a socket for sluice demo --exec: %w", err)
		}
		defer l.Close()
		door, err := l.File()
		if err != nil {
			return err
		}
		defer door.Close()
		sockets = append(sockets, door)
	}
	if o.Page != "" {
		page, err := listenForPage(o.Page)
		if err != nil {
			return err
		}
		defer page.Close()
		sockets = append(sockets, page)
	}
	ctx, stop := untilSignal()
	defer stop()
	return onStage(ctx, append(args, dir), sockets...)
}

// untilSignal returns a context that ends when the program is to end.
func untilSignal() (ctx context.Context, stop context.CancelFunc) {
	return signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
}

// RunInside plays the demo in this process, which Run started, and keeps its
// files in the directory.
func RunInside(o Options, dir string) error {
	ctx, stop := untilSignal()
	defer stop()
	s := &show{options: o, out: newPrinter(os.Stdout), ledger: &ledger{}, services: shopServices()}
	defer s.close()
	if err := s.run(ctx, dir); err != nil {
		s.fail(err)
		return ErrFailed
	}
	return nil
}

// show is everything that the inner process has: the network, the backends, the
// proxy and what is known about connections.
type show struct {
	options   Options
	out       *printer
	world     *world
	backends  *backends
	manifests *manifestDir
	proxy     *proxy
	ledger    *ledger
	services  []*shopService
	door      *net.UnixListener // nil with Once
	page      *web.Server       // nil without Page
	serving   sync.WaitGroup    // of the page
}

// run plays the whole demo. Steps that do not hold have been shown when it gives
// ErrFailed.
func (s *show) run(ctx context.Context, dir string) error {
	if !s.options.Once {
		if err := s.takeDoor(); err != nil {
			return err
		}
	}
	if err := s.build(ctx, dir); err != nil {
		return err
	}
	if err := s.play(ctx); err != nil || s.options.Once {
		return err
	}
	return s.stay(ctx)
}

// inherited returns a listening socket that Run opened.
func inherited(descriptor uintptr) (net.Listener, error) {
	f := os.NewFile(descriptor, "listener")
	defer f.Close() // the listener has a descriptor of its own
	return net.FileListener(f)
}

// takeDoor takes the listening socket that Run opened.
func (s *show) takeDoor() error {
	l, err := inherited(doorDescriptor)
	if err != nil {
		return fmt.Errorf("the socket for sluice demo --exec: %w", err)
	}
	door, ok := l.(*net.UnixListener)
	if !ok {
		return fmt.Errorf("the socket for sluice demo --exec is a %T", l)
	}
	s.door = door
	return nil
}

// build lays out the network, starts the backends, writes the manifests and
// starts the proxy.
func (s *show) build(ctx context.Context, dir string) error {
	var err error
	if s.world, err = buildWorld(ctx); err != nil {
		return explain(err, readSettings(!rootless()))
	}
	if s.backends, err = startBackends(ctx, s.world); err != nil {
		return err
	}
	s.manifests = &manifestDir{path: filepath.Join(dir, "manifests"), ipv6: s.world.ipv6}
	if err := s.manifests.fill(); err != nil {
		return err
	}
	s.introduce()
	if s.proxy, err = startProxy(ctx, s.manifests.path); err != nil || s.options.Page == "" {
		return err
	}
	return s.openPage(ctx)
}

// close ends everything that is still there, and removes the files: Run does
// that too, but it may have been killed.
func (s *show) close() {
	if s.page != nil {
		s.page.Close()
		s.serving.Wait()
	}
	if s.proxy != nil {
		_ = s.proxy.stop()
	}
	if s.backends != nil {
		_ = s.backends.close()
	}
	if s.world != nil {
		s.world.close()
	}
	if s.manifests != nil {
		_ = os.RemoveAll(s.manifests.path)
		_ = os.Remove(filepath.Dir(s.manifests.path))
	}
	if s.door != nil {
		_ = s.door.Close()
	}
}

// introduce prints the network.
func (s *show) introduce() {
	p := s.out
	p.line("%s", p.in(bold, "Sluice demo: the real proxy, five small web servers and four client pods"))
	p.line("in network namespaces of their own. Nothing on this machine changes.")
	p.line("")
	p.line("  client pods               node-a               pods on node-b")
	p.line("  10.244.0.11 to .14  ----  sluice run  -------  ash, birch, cedar, elm")
	p.line("                            10.96.0.0/16         dogwood, whose port is closed")
	p.line("")
	p.labelled("proxy", plain, proxyCommand(s.manifests.path), " --")
	if !s.world.ipv6 {
		p.labelled("note", yellow, "this machine has no IPv6; the demo goes without", " ")
	}
}

// fail says what went wrong, with what the proxy said about it.
func (s *show) fail(err error) {
	switch {
	case errors.Is(err, ErrFailed): // has been shown
	case errors.Is(err, context.Canceled):
		s.out.line("%s", s.out.in(yellow, "interrupted"))
	default:
		fmt.Fprintf(os.Stderr, "sluice demo: %v\n", err)
		s.proxySaid()
	}
}

// proxySaid shows the proxy's own log.
func (s *show) proxySaid() {
	if s.proxy == nil {
		return
	}
	s.out.line("")
	s.out.line("  %s", s.out.in(bold, "what the proxy said ("+proxyCommand(s.manifests.path)+"):"))
	for _, line := range s.proxy.said.text() {
		s.out.line("  %s", s.out.in(dim, line))
	}
}

// stay keeps the proxy running until the context ends, shows each record, and
// lets commands in by the door.
func (s *show) stay(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel()
	g := &guests{door: s.door, place: s.place}
	serving.Go(func() { g.serve(ctx) })

	s.invite()
	if s.page != nil {
		s.proxy.journal.forget() // the page shows records
		serving.Go(func() { s.traffic(ctx) })
	} else {
		s.proxy.journal.follow(s.showRecord)
	}
	select {
	case <-ctx.Done():
		s.out.line("")
		s.out.line("ending; nothing is left behind")
		return nil
	case <-s.proxy.exited:
		return fmt.Errorf("the proxy: %w", s.proxy.ended())
	}
}

// place returns the namespace that a command runs in.
func (s *show) place(from string) (*scratch.Namespace, error) {
	switch from {
	case FromClient:
		return s.world.clients, nil
	case FromNode:
		return s.world.nodeA, nil
	}
	return nil, fmt.Errorf("there is no place %q (there are %s and %s)", from, FromClient, FromNode)
}

// showRecord shows one record as it comes.
func (s *show) showRecord(r *record) { s.out.record("log", r.console()) }

// invite says what can be tried.
func (s *show) invite() {
	p := s.out
	url := func(i int) string { return "http://" + s.services[i].vip(v4).Addr().String() + "/" }
	lines := [][2]string{
		{"curl -s " + url(0), "ash, cedar and elm in turn"},
		{"curl -gs 'http://[" + s.services[0].vip(v6).Addr().String() + "]/'", "the same over IPv6"},
		{"curl -s " + url(1), "always the same"},
		{"curl -s " + url(2), "never dogwood, which is dead"},
		{"--from node curl -s " + url(0), "from the node itself"},
		{"--from node nft list ruleset", "what steers, if there is nft"},
		{"bash", "a shell where the client pods are"},
	}
	if !s.world.ipv6 {
		lines = slices.Delete(lines, 1, 2)
	}
	width := 0
	for _, l := range lines {
		width = max(width, len(l[0]))
	}
	p.line("")
	p.line("%s", p.in(bold, "The proxy goes on. In another terminal:"))
	for _, l := range lines {
		p.line("  %s demo --exec %s  %s", s.options.Command, pad(l[0], width), p.in(dim, "# "+l[1]))
	}
	p.line("Edit the manifests in %s and see it follow.", s.manifests.path)
	if s.page != nil {
		p.line("The clients go on asking: %s shows each connection. Ctrl-C ends everything.", s.page.URL())
	} else {
		p.line("Each connection's record appears here when it ends. Ctrl-C ends everything.")
	}
	p.line("")
}

// storyPatience bounds the whole story. Each wait in it has a bound of its own;
// this one is for a machine on which everything is late.
const storyPatience = 60 * time.Second
