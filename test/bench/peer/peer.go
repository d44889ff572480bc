// Package peer describes what the benchmark compares: how to find each program,
// how to set it up on the node of a world, and where a client reaches it.
package peer

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/procstat"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

//go:embed haproxy.cfg nginx.conf
var configs embed.FS

// Peer is one path from the client to the server.
type Peer struct {
	Name    string
	About   string   // for the table's readers
	Extra   bool     // runs only if it is named
	Columns []string // the columns that it has; nil for all
	Variant bool     // other flags of the product, or another build
	Kernel  bool     // the kernel forwards: flags of columns, which are about the relay, are not for it
	Package string   // the Debian package that has the program
	program string   // its name or file; empty if none is needed
	version []string
	start   func(*Site) (*Running, error)
}

// Builds are the files of the product.
type Builds struct {
	Sluice string
	// Others to compare with; each may be empty.
	Base, HAProxy, KubeProxy string
}

// Site is where a peer starts.
type Site struct {
	World    *world.World
	Dir      string   // for its files; empty at first
	Self     string   // this program
	Threads  int      // for the relay
	MaxFiles int      // limit of descriptors of a process
	Flags    []string // additional flags of sluice
}

// Running is a peer at work.
type Running struct {
	Targets []netip.Addr // the service's addresses for a client
	PIDs    []int        // the relay's processes; nil for the kernel's own paths
	Metrics string       // the node's address that serves Prometheus metrics; empty for none
	process *world.Process
	api     net.Listener // of the API server that the process follows; nil for none
}

// All lists the peers in the order of the table.
func All(builds Builds) []Peer {
	// As dnat: nothing of what decides about the source address is configured.
	kernel := func(build, name, about string) Peer {
		p := sluice(build, name, about, "--datapath=kernel")
		p.Kernel = true
		return p
	}
	splice := haproxy("haproxy", "haproxy-splice", "the same, made to splice everything", "request", "response")
	splice.Columns = []string{"bulk1", "bulk16", "rr64", "mixed"}
	peers := []Peer{
		{Name: "direct", About: "routed, no proxy: the client uses the server's own address", start: startDirect},
		{Name: "dnat", About: "kernel DNAT by nftables, what kube-proxy does", start: startDNAT},
		haproxy("haproxy", "haproxy", "Debian's, TPROXY, splice-auto", "auto"),
		splice,
		{Name: "nginx", About: "Debian's stream module, bound to the service's address", Package: "nginx and libnginx-mod-stream", program: "nginx", version: []string{"-v"}, start: startNginx},
		{Name: "goproxy", About: "plain Go: two goroutines for each connection, io.Copy (which splices)", start: startGoProxy},
		sluice(builds.Sluice, "sluice", "the whole product, access log on", fromNode),
		kernel(builds.Sluice, "sluice-kernel", "the whole product, forwarded by the kernel; the server sees the client's address"),
	}
	noSplice := sluice(builds.Sluice, "sluice-nosplice", "the same with --splice=off", fromNode, "--splice=off")
	noSplice.Extra = true
	variants := append(modes(builds.Sluice), noSplice)
	if builds.Base != "" {
		variants = append(variants,
			sluice(builds.Base, "sluice-base", "another build", fromNode),
			kernel(builds.Base, "sluice-kernel-base", "another build, forwarded by the kernel"))
	}
	if builds.HAProxy != "" {
		peers = append(peers, haproxy(builds.HAProxy, "haproxy-other", "another version, TPROXY, splice-auto", "auto"))
	}
	if builds.KubeProxy != "" {
		peers = append(peers, kubeProxy(builds.KubeProxy, "nftables"), kubeProxy(builds.KubeProxy, "iptables"))
	}
	for _, v := range variants {
		v.Variant = true
		peers = append(peers, v)
	}
	return peers
}

// fromNode makes sluice connect to the server from the node's address, as all
// other relays do.
const fromNode = "--masquerade-all"

// modes are variants of sluice that have their own columns: each steering mode,
// one without the log, one that keeps the client's address, and one with another algorithm.
func modes(build string) []Peer {
	noLog := sluice(build, "sluice-nolog", "the same with --access-log=off", fromNode, "--access-log=off")
	noLog.Columns = []string{"rr64", "crc"}
	peers := []Peer{
		sluice(build, "sluice-client", "the whole product; the server sees the client's address"),
		sluice(build, "sluice-nftables", "steered to by nftables", fromNode, "--redirect=tproxy", "--tproxy-backend=nftables"),
		sluice(build, "sluice-iptables", "steered to by iptables", fromNode, "--redirect=tproxy", "--tproxy-backend=iptables"),
		sluice(build, "sluice-sklookup", "steered to by BPF", fromNode, "--redirect=sklookup"),
		sluice(build, "sluice-bind", "a listener for each service, no steering but routes", fromNode, "--redirect=bind"),
	}
	for i := range peers {
		peers[i].Columns = []string{"rr1", "rr64", "crc", "udp-rr64"}
	}
	p2c := sluice(build, "sluice-p2c", "the same with --balancer=power-of-two: -endpoints 4", fromNode, "--balancer=power-of-two")
	p2c.Columns, p2c.Extra = []string{"crc"}, true
	return append(peers, noLog, p2c)
}

// Find tells whether the peer can run here. The error names what to install.
func (p Peer) Find() error {
	if p.program == "" {
		return nil
	}
	if _, err := lookPath(p.program); err != nil {
		if p.Package == "" {
			return fmt.Errorf("%s: %w (make build)", p.Name, err)
		}
		return fmt.Errorf("%s: %s is not installed: apt-get install %s, or test/bench/install-deps.sh",
			p.Name, p.program, strings.ReplaceAll(p.Package, " and", ""))
	}
	if p.program == "nginx" {
		if _, err := nginxModules(); err != nil {
			return fmt.Errorf("nginx: %w: apt-get install libnginx-mod-stream, or test/bench/install-deps.sh", err)
		}
	}
	return nil
}

// Version is the first line of the program's version output; empty if there is no
// program.
func (p Peer) Version() string {
	if p.program == "" {
		return ""
	}
	path, err := lookPath(p.program)
	if err != nil {
		return ""
	}
	out, err := exec.Command(path, p.version...).CombinedOutput()
	if err != nil {
		return "unknown"
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line)
}

// lookPath also searches root's directories, which a plain user's PATH may lack.
func lookPath(program string) (string, error) {
	path, err := exec.LookPath(program)
	if err == nil || strings.Contains(program, "/") {
		return path, err
	}
	return exec.LookPath(filepath.Join("/usr/sbin", program))
}

// Start starts the peer on the site. The peer may not answer yet.
func (p Peer) Start(s *Site) (*Running, error) {
	r, err := p.start(s)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.Name, err)
	}
	return r, nil
}

// Settle finds the relay's processes, once it answers.
func (r *Running) Settle() error {
	if r.process == nil {
		return nil
	}
	pids, err := procstat.Tree(r.process.PID())
	if err != nil {
		return fmt.Errorf("processes: %w", err)
	}
	r.PIDs = pids
	return nil
}

// Failed reports that the relay has ended, with its last output.
func (r *Running) Failed() error {
	if r.process == nil {
		return nil
	}
	select {
	case <-r.process.Done():
		return fmt.Errorf("it has ended: %s", r.process.Log())
	default:
		return nil
	}
}

// Log is the end of the relay's output; empty without a relay.
func (r *Running) Log() string {
	if r.process == nil {
		return ""
	}
	return r.process.Log()
}

// Stop ends the relay.
func (r *Running) Stop() {
	if r.process != nil {
		r.process.Stop()
	}
	if r.api != nil {
		_ = r.api.Close()
	}
}

func startDirect(s *Site) (*Running, error) {
	return &Running{Targets: s.World.Endpoints}, nil
}

func startDNAT(s *Site) (*Running, error) {
	if err := s.World.DNAT(); err != nil {
		return nil, err
	}
	return s.running(nil), nil
}

// haproxy is HAProxy with one of its options splice-….
func haproxy(program, name, about string, splice ...string) Peer {
	p := Peer{
		Name: name, About: about, program: program, version: []string{"-v"},
		start: func(s *Site) (*Running, error) { return startHAProxy(s, program, splice) },
	}
	if program == "haproxy" {
		p.Package = program
	}
	return p
}

func startHAProxy(s *Site, program string, splice []string) (*Running, error) {
	if err := s.steer(); err != nil {
		return nil, err
	}
	// Descriptors: two for each connection and each pipe, and a few dozen.
	maxConn := (s.MaxFiles - 500) * 2 / 5
	config, err := s.config("haproxy.cfg", map[string]any{
		"Threads": s.Threads, "MaxConn": maxConn, "MaxPipes": maxConn / 4,
		"Bind": bracket(s.World.Loopback()), "Splice": splice,
	})
	if err != nil {
		return nil, err
	}
	path, err := lookPath(program)
	if err != nil {
		return nil, err
	}
	return s.launch(world.Command{Path: path, Args: []string{"-db", "-f", config}})
}

func startNginx(s *Site) (*Running, error) {
	if err := s.World.AnyIP(); err != nil {
		return nil, err
	}
	modules, err := nginxModules()
	if err != nil {
		return nil, err
	}
	config, err := s.config("nginx.conf", map[string]any{
		"Threads": s.Threads, "MaxFiles": s.MaxFiles, "Modules": modules,
		"Dir": s.Dir, "Bind": bracket(s.World.VIP),
	})
	if err != nil {
		return nil, err
	}
	path, err := lookPath("nginx")
	if err != nil {
		return nil, err
	}
	// Its workers survive a killed master, unless they share a PID namespace with
	// it.
	return s.launch(world.Command{Path: path, Args: []string{"-p", s.Dir, "-c", config}, OwnPIDs: true})
}

func nginxModules() (string, error) {
	for _, dir := range []string{"/usr/lib/nginx/modules", "/usr/lib64/nginx/modules"} {
		if _, err := os.Stat(filepath.Join(dir, "ngx_stream_module.so")); err == nil {
			return dir, nil
		}
	}
	return "", errors.New("its stream module is not installed")
}

func startGoProxy(s *Site) (*Running, error) {
	if err := s.steer(); err != nil {
		return nil, err
	}
	spec, err := json.Marshal(GoProxySpec{Listen: s.World.Loopback(), Ports: load.Ports, Endpoints: s.World.Endpoints})
	if err != nil {
		return nil, err
	}
	return s.launch(world.Command{Path: s.Self, Args: []string{GoProxyRole}, Stdin: spec})
}

// steer redirects the service's address to the same ports of the loopback address.
func (s *Site) steer() error {
	if err := s.World.AnyIP(); err != nil {
		return err
	}
	return s.World.TPROXY()
}

func (s *Site) launch(c world.Command) (*Running, error) {
	process, err := s.World.Node.Start(c)
	if err != nil {
		return nil, err
	}
	return s.running(process), nil
}

func (s *Site) running(p *world.Process) *Running {
	return &Running{Targets: []netip.Addr{s.World.VIP}, process: p}
}

// config renders one of the configurations into the site's directory.
func (s *Site) config(name string, values map[string]any) (string, error) {
	values["Ports"], values["UDPPorts"] = load.Ports, load.UDPPorts
	var endpoints []string
	for _, e := range s.World.Endpoints {
		endpoints = append(endpoints, bracket(e))
	}
	values["Endpoints"] = endpoints
	text, err := render(name, values)
	if err != nil {
		return "", err
	}
	path := filepath.Join(s.Dir, name)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return "", err
	}
	return path, nil
}

func render(name string, values map[string]any) ([]byte, error) {
	t, err := template.New(name).Option("missingkey=error").ParseFS(configs, name)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, values); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// bracket writes an address as in front of a port.
func bracket(a netip.Addr) string {
	if a.Is6() {
		return "[" + a.String() + "]"
	}
	return a.String()
}
