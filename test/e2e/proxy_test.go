package e2e

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/bpffs"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The service ranges of every test.
const (
	serviceCIDRs = "10.96.0.0/16,fd00:96::/112"
	vip4         = "10.96.0.10"
	vip6         = "fd00:96::10"
)

// metricsAddress is the node's.
const metricsAddress = "127.0.0.1:10249"

// Generous bounds for everything that is not under test. The kernel's verifier alone took
// more than a minute for the programs of kernel flows, on a machine that had much else to do.
const (
	readyTimeout = 5 * time.Minute
	startTimeout = time.Minute
	stopTimeout  = time.Minute
)

// Timeouts of attempts. A proxy of the tests has time for an endpoint that a busy machine
// makes answer late: otherwise it would take that for dead, set it aside for a while, and
// have one attempt more in the record. Tests of dead endpoints have the program's own
// timeouts, which give up earlier.
const (
	patientDials = "--dial-timeouts=10s,10s"
	promptDials  = "--dial-timeouts=250ms,500ms,1s,2s"
)

// proxy is a running `sluice run` on a node.
type proxy struct {
	t         *testing.T
	node      *netns.Host
	mode      mode   // the zero value lets the proxy choose
	manifests string // directory
	accessLog string // file
	// credential is the user that it runs as, with CAP_NET_ADMIN alone. If nil, it
	// runs as the tests do.
	credential *syscall.Credential
	files      int      // its limit of open files; 0 for the tests' own
	under      []string // a program and its arguments that starts it, such as setpriv
	program    string   // sluice; empty for the one under test
	relayed    string   // why the relay serves forwarded clients too; empty if it must not
	cmd        *exec.Cmd
	stderr     *output.Text
	ends       [][2]time.Time // when it got the signal to end, and was ready again
	exited     chan struct{}  // closed when it has ended and was waited for
}

// startProxy writes the services and runs the proxy until the test ends. It
// returns when the first configuration is in force.
func startProxy(t *testing.T, lab *netns.Lab, services []webService, flags ...string) *proxy {
	t.Helper()
	p := prepareProxy(t, lab, services)
	p.start(flags...)
	return p
}

// startMode is startProxy in a mode.
func startMode(t *testing.T, lab *netns.Lab, m mode, services []webService, flags ...string) *proxy {
	t.Helper()
	p := prepareProxy(t, lab, services)
	p.mode = m
	p.start(flags...)
	return p
}

// prepareProxy writes the services and starts nothing.
func prepareProxy(t *testing.T, lab *netns.Lab, services []webService) *proxy {
	t.Helper()
	p := newProxy(t, lab.Node)
	for _, s := range services {
		p.apply(s)
	}
	return p
}

// newProxy prepares a proxy without manifests.
func newProxy(t *testing.T, node *netns.Host) *proxy {
	t.Helper()
	dir := t.TempDir()
	p := &proxy{t: t, node: node, manifests: filepath.Join(dir, "manifests"), accessLog: filepath.Join(dir, "access.log")}
	must.OK(t, os.Mkdir(p.manifests, 0o755))
	// A later node's network namespace may get the number of this one's inode, and a killed
	// proxy leaves pins.
	t.Cleanup(func() {
		for _, dir := range pinDirs(t, node) {
			_ = os.RemoveAll(dir)
		}
	})
	return p
}

// start runs the proxy and waits until it is ready.
func (p *proxy) start(flags ...string) {
	p.t.Helper()
	p.launch(flags...)
	p.awaitReady()
}

// awaitReady waits until the proxy is ready.
func (p *proxy) awaitReady() {
	p.t.Helper()
	wait.For(p.t, "sluice is ready", readyTimeout, func() error {
		select {
		case <-p.exited:
			p.t.Fatalf("sluice ended before it was ready: %v", p.cmd.ProcessState)
		default:
		}
		if !p.stderr.Contains(`"message":"ready"`) {
			return errNotYet
		}
		return nil
	})
	if n := len(p.ends); n > 0 && p.ends[n-1][1].IsZero() {
		p.ends[n-1][1] = time.Now()
	}
}

// launch runs the proxy and does not wait for it. The flags in SLUICE_TEST_FLAGS
// come first, so that the whole suite can run in another mode. A proxy that still
// runs when the test ends or is killed is killed.
func (p *proxy) launch(flags ...string) {
	p.t.Helper()
	args := append([]string{"run", "--manifests", p.manifests, "--hostname-override", "node",
		"--service-cidr", serviceCIDRs, "--access-log", p.accessLog, "--access-log-format", "json",
		"--logging-format", "json", "--metrics-bind-address", metricsAddress, "--bpf-root", bpfRoot(), patientDials}, strings.Fields(os.Getenv("SLUICE_TEST_FLAGS"))...)
	if !strings.Contains(os.Getenv("SLUICE_TEST_FLAGS"), "--datapath") {
		args = append(args, "--datapath", "relay")
	}
	args = slices.Concat(args, p.mode.flags, flags)
	program := cmp.Or(p.program, built(p.t))
	p.cmd, p.stderr, p.exited = exec.Command(program, args...), &output.Text{}, make(chan struct{})
	if p.files > 0 {
		p.cmd = exec.Command("sh", slices.Concat([]string{"-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, p.files), program}, args)...)
	}
	if len(p.under) > 0 {
		p.cmd = exec.Command(p.under[0], slices.Concat(p.under[1:], []string{program}, args)...)
	}
	cmd, stderr, exited := p.cmd, p.stderr, p.exited
	cmd.Stdout, cmd.Stderr = stderr, stderr
	cmd.Env = p.mode.environment(p.t)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.credential != nil {
		cmd.SysProcAttr.Credential = p.credential
		cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_NET_ADMIN}
	}
	must.OK(p.t, p.node.Do(cmd.Start))
	go func() {
		_ = cmd.Wait()
		close(exited)
	}()
	p.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-exited
		_ = os.Remove(fmt.Sprintf("/run/sluice/admin-%d.sock", p.namespace())) // it may have been killed
		_ = os.Remove("/run/sluice")                                           // if it is empty
		if !slices.Contains(flags, "--datapath") {
			p.checkPaths()
		}
		text := stderr.String()
		if strings.Contains(text, "DATA RACE") || strings.Contains(text, "panic:") {
			p.t.Error("sluice panicked or raced")
		}
		if p.t.Failed() {
			p.t.Logf("sluice %s said:\n%s", strings.Join(args, " "), text)
		}
	})
}

// namespace returns the number of the node's network namespace.
func (p *proxy) namespace() (number uint64) {
	_ = p.node.Do(func() error { // 0 if the namespace is gone
		info, err := os.Stat("/proc/thread-self/ns/net")
		if err == nil {
			number = info.Sys().(*syscall.Stat_t).Ino
		}
		return err
	})
	return number
}

// stop ends the proxy with SIGTERM and expects exit status 0.
func (p *proxy) stop() {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	p.waitExit()
	check.Equalf(p.t, p.cmd.ProcessState.ExitCode(), 0, "sluice run: exit status")
}

// kill ends the proxy like a crash.
func (p *proxy) kill() {
	p.t.Helper()
	p.signal(syscall.SIGKILL)
	p.waitExit()
	// A child that has not executed its program yet has all sockets of its parent.
	wait.For(p.t, "its children are other programs", stopTimeout, func() error {
		lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, name := range lines {
			line, _ := os.ReadFile(name) // some have ended meanwhile
			if bytes.Contains(line, []byte("\x00run\x00")) && bytes.Contains(line, []byte("\x00"+p.accessLog+"\x00")) {
				return fmt.Errorf("%s is a copy of the proxy", name)
			}
		}
		return err
	})
}

func (p *proxy) signal(s syscall.Signal) {
	p.t.Helper()
	if s == syscall.SIGTERM || s == syscall.SIGKILL {
		p.ends = append(p.ends, [2]time.Time{time.Now()})
	}
	must.OK(p.t, p.cmd.Process.Signal(s))
}

func (p *proxy) waitExit() {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(stopTimeout):
		p.t.Fatalf("sluice did not end within %v", stopTimeout)
	}
}

// apply writes a service's manifest.
func (p *proxy) apply(s webService) {
	p.t.Helper()
	p.write(s.name+".yaml", s.yaml())
}

// write replaces a manifest as editors do: it renames a new file.
func (p *proxy) write(name, text string) {
	p.t.Helper()
	temporary := filepath.Join(p.manifests, "."+name+".new")
	must.OK(p.t, os.WriteFile(temporary, []byte(text), 0o644))
	must.OK(p.t, os.Rename(temporary, filepath.Join(p.manifests, name)))
}

// remove deletes a service's manifest.
func (p *proxy) remove(name string) {
	p.t.Helper()
	must.OK(p.t, os.Remove(filepath.Join(p.manifests, name+".yaml")))
}

// metrics returns the sum of each metric over its labels, and each series by its
// name with labels.
func (p *proxy) metrics() (map[string]float64, error) {
	client := p.scraper()
	defer client.CloseIdleConnections()
	return scrape(client)
}

// awaitMetrics waits until the metrics are as they should be.
func (p *proxy) awaitMetrics(what string, holds func(m map[string]float64) bool) {
	p.t.Helper()
	wait.For(p.t, what, startTimeout, func() error {
		m, err := p.metrics()
		if err == nil && !holds(m) {
			err = fmt.Errorf("the metrics are %v", m)
		}
		return err
	})
}

// scraper keeps its connection to the proxy's metrics open, so that it can read
// them when the proxy has no descriptor left.
func (p *proxy) scraper() *http.Client {
	return &http.Client{
		Timeout: startTimeout,
		Transport: &http.Transport{
			DisableCompression: true, // it takes as long as the metrics themselves
			DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
				return p.node.Dial(network, address)
			},
		},
	}
}

func scrape(client *http.Client) (map[string]float64, error) {
	response, err := client.Get("http://" + metricsAddress + "/metrics")
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	values := map[string]float64{}
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		line := lines.Text()
		cut := strings.LastIndexByte(line, ' ')
		if cut < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		value, err := strconv.ParseFloat(line[cut+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("metrics: %q: %w", line, err)
		}
		name, _, labelled := strings.Cut(line[:cut], "{")
		values[name] += value
		if labelled {
			values[line[:cut]] += value
		}
	}
	return values, lines.Err()
}

// descriptors counts the proxy's open files.
func (p *proxy) descriptors() int {
	p.t.Helper()
	list := must.Get(os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)))(p.t)
	return len(list)
}

// memory returns the proxy's resident memory in bytes.
func (p *proxy) memory() int {
	p.t.Helper()
	statm := must.Read(p.t, fmt.Sprintf("/proc/%d/statm", p.cmd.Process.Pid))
	var total, resident int
	must.OK(p.t, must.Err(fmt.Sscan(string(statm), &total, &resident)))
	return resident * os.Getpagesize()
}

// awaitLog waits until the proxy has said something: its output comes by a pipe, and may
// come late.
func (p *proxy) awaitLog(what string) {
	p.t.Helper()
	wait.Until(p.t, fmt.Sprintf("the log says %q", what), startTimeout, func() bool { return p.stderr.Contains(what) })
}

// bpfRoot is a BPF file system for all nodes; empty if this process may not have one,
// nor BPF.
var bpfRoot = sync.OnceValue(func() string {
	path, _, err := bpffs.Open()
	if err != nil {
		return ""
	}
	return path
})

// pinDirs are the directories of a node's proxies in the BPF file system.
func pinDirs(t *testing.T, node *netns.Host) []string {
	t.Helper()
	inode := must.Get(sys.NetNSInode(node.FD()))(t)
	dirs, _ := filepath.Glob(filepath.Join(bpfRoot(), "sluice", fmt.Sprintf("*-%d", inode)))
	return dirs
}

// sluice runs another subcommand on the node and returns its output.
func sluice(t *testing.T, lab *netns.Lab, args ...string) (string, error) {
	t.Helper()
	if args[0] == "cleanup" {
		args = append(args, "--bpf-root", bpfRoot())
	}
	out, err := lab.Node.Command(t, built(t), args...).CombinedOutput()
	return string(out), err
}

// says has another subcommand say something, and succeed.
func says(t *testing.T, lab *netns.Lab, want string, args ...string) {
	t.Helper()
	out, err := sluice(t, lab, args...)
	check.OKf(t, err, "sluice %s says %s", args, out)
	check.Contains(t, out, want)
}

// addresses returns host:port for each address.
func addresses(port uint16, addrs ...string) []string {
	var list []string
	for _, a := range addrs {
		list = append(list, netip.AddrPortFrom(netip.MustParseAddr(a), port).String())
	}
	return list
}

// on returns the port on both addresses of each host.
func on(port uint16, hosts ...*netns.Host) []netip.AddrPort {
	var list []netip.AddrPort
	for _, h := range hosts {
		list = append(list, netip.AddrPortFrom(h.IPv4, port), netip.AddrPortFrom(h.IPv6, port))
	}
	return list
}

// unanswered expects no answer, neither accept nor refusal (A3.12: an address of a
// service range that no service has).
func unanswered(from *netns.Host, address string) error {
	c, err := from.Dialer(&net.Dialer{Timeout: 50 * time.Millisecond}, "tcp", address)
	if err == nil {
		c.Close()
		return errors.New("connected")
	}
	if timeout := net.Error(nil); !errors.As(err, &timeout) || !timeout.Timeout() {
		return fmt.Errorf("%w, want silence", err)
	}
	return nil
}

// refused expects connect itself to be refused.
func refused(from *netns.Host, address string) error {
	c, err := from.Dial("tcp", address)
	if err == nil {
		c.Close()
		return errors.New("connected")
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w, want ECONNREFUSED", err)
	}
	return nil
}

// ended reads until the connection ends and returns its end: nil for a FIN.
func ended(c net.Conn) error {
	_ = c.SetReadDeadline(time.Now().Add(stopTimeout))
	_, err := io.Copy(io.Discard, c)
	return err
}
