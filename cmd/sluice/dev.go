package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/dev"
	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/node"
	"github.com/sluice-proxy/sluice/service"
)

// devOptions are the flags of sluice dev.
type devOptions struct {
	zone      string
	address   string // of the DNS server
	ranges    prefixes
	page      string
	hostsFile string
	resolved  choice // whether systemd-resolved is told
	dataPath  choice
	v         int
	inside    bool   // this process is in namespaces of its own
	enter     string // the directory with resolv.conf that a command sees
}

// What sluice dev takes where flags say nothing else.
const (
	devDNS    = "127.83.76.53"
	devPage   = "127.0.0.1:10261"
	devRanges = "10.96.0.0/16,fd00:10:96::/112"
)

// devAddresses are the addresses of the machine in a network namespace of its own: without
// any, clients in it would have the Services' addresses.
var devAddresses = [2]netip.Addr{netip.MustParseAddr("10.83.76.1"), netip.MustParseAddr("fd00:83:76::1")}

func newDevCommand() *cobra.Command {
	o := &devOptions{resolved: newChoice("auto", node.Off), dataPath: newDataPath()}
	cmd := &cobra.Command{
		Use:   "dev [flags] {DIR | FILE...} [-- COMMAND [ARG...]]",
		Short: "Serve Services of manifests for development, without a cluster",
		Long: `Dev serves the Services of ordinary manifests on this machine until Ctrl-C, and
leaves nothing behind. Services without a cluster IP get one, the same each time.
Their names, such as api.shop.svc.cluster.local, are answered by a DNS server.
Which processes serve a Service says its annotation, or an EndpointSlice:

  sluice.dev/endpoints: 127.0.0.1:3000, 127.0.0.1:3001

A command behind -- sees the names by itself: it gets an /etc/resolv.conf of its
own, with the search list of a pod in the namespace default. When it ends, so does
dev, with its status.

Root serves on the machine itself, for all its processes. Where systemd-resolved
runs, they find the names too; else --hosts-file puts these into /etc/hosts meanwhile. Anybody else needs a COMMAND: it runs in network
and user namespaces of its own, where addresses such as 127.0.0.1 are those of what
the command itself starts. Nothing outside is reached from there.`,
		Example: `  sudo sluice dev k8s/
  sudo sluice dev web.yaml api.yaml -- npm start
  sluice dev k8s/ -- sh -c 'npm run api & exec npm test'`,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.enter != "" && len(args) > 0 {
				return enter(o.enter, args)
			}
			files, command := args, []string(nil)
			if n := cmd.ArgsLenAtDash(); n >= 0 {
				files, command = args[:n], args[n:]
			}
			if len(files) == 0 {
				return errors.New("sluice dev: which manifests? for example: sluice dev k8s/")
			}
			if os.Geteuid() != 0 && !o.inside {
				if len(command) == 0 {
					return errors.New("without root's rights, sluice dev serves only what it starts, in a network of its own: give a command (sluice dev k8s/ -- bash), or run it with sudo")
				}
				return isolate()
			}
			if at, err := netip.ParseAddrPort(o.address); len(command) > 0 && (err == nil && at.Port() != 53 || strings.Contains(o.address, ",")) {
				return errors.New("--dns: a command needs one address with port 53, as resolv.conf knows no ports")
			}
			return o.serve(cmd, files, command)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.address, "dns", devDNS, "address of the DNS server, with a port or without (53), or off")
	f.StringVar(&o.zone, "dns-zone", "cluster.local", "domain of the Services' names")
	f.Var(&o.ranges, "allocate-cluster-ips", "ranges of which Services without a cluster IP get one (default: "+devRanges+")")
	f.StringVar(&o.page, "web", devPage, "address and port of the page that shows what happens now, or off")
	f.StringVar(&o.hostsFile, "hosts-file", "", "also write the names into this file, and remove them at the end")
	f.Lookup("hosts-file").NoOptDefVal = "/etc/hosts"
	o.resolved.register(cmd, "resolved", "", "have systemd-resolved ask the DNS server, where it runs and root serves")
	o.dataPath.register(cmd, "datapath", "", "who moves the packets of clients on other hosts and in containers, while root serves: the kernel if it can, the kernel, or the relay")
	f.IntVarP(&o.v, "v", "v", 0, "verbosity of the log; 4 and more is for debugging")
	f.BoolVar(&o.inside, "inside", false, "this process is in namespaces of its own")
	f.StringVar(&o.enter, "enter", "", "run the command with the resolv.conf of this directory")
	for _, hidden := range []string{"inside", "enter"} {
		f.Lookup(hidden).Hidden = true
	}
	return cmd
}

// isolate runs the same command line in a user and a network namespace.
func isolate() error {
	runtime.LockOSThread() // the end of this thread would be taken for that of the process
	defer runtime.UnlockOSThread()
	inner := exec.Command("/proc/self/exe", append([]string{"dev", "--inside"}, os.Args[2:]...)...)
	inner.Stdin, inner.Stdout, inner.Stderr = os.Stdin, os.Stdout, os.Stderr
	inner.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWUSER, Pdeathsig: syscall.SIGTERM,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	if err := inner.Start(); err != nil {
		return fmt.Errorf("a network of its own: %w; the kernel has to allow user namespaces, and sudo sluice dev needs none", err)
	}
	go func() {
		for s := range signals {
			_ = inner.Process.Signal(s)
		}
	}()
	return statusOf(inner.Wait())
}

// statusOf makes the end of a command that of this program.
func statusOf(err error) error {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return exitCode(128 + int(ws.Signal()))
	}
	return exitCode(exit.ExitCode())
}

// enter replaces this process, which has a mount namespace of its own, by a command that
// sees another /etc/resolv.conf.
func enter(dir string, command []string) error {
	if err := dev.CoverResolvConf(dir); err != nil {
		return err
	}
	path, err := exec.LookPath(command[0])
	if err != nil {
		fmt.Fprintln(os.Stderr, "sluice: "+err.Error())
		return exitCode(127)
	}
	return syscall.Exec(path, command, os.Environ())
}

// serve runs the proxy, and the command if there is one.
func (o *devOptions) serve(cmd *cobra.Command, files, command []string) error {
	if o.inside {
		own, err := scratch.Own("of sluice dev")
		if err != nil {
			return err
		}
		defer own.Close()
		for _, a := range devAddresses {
			// Without IPv6, the machine serves IPv4 alone.
			if err := own.AddAddresses("lo", netip.PrefixFrom(a, a.BitLen())); err != nil && a.Is4() {
				return err
			}
		}
		o.page = node.Off // nobody outside could ask for it
	}
	dir, err := os.MkdirTemp("", "sluice-dev-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	sources, err := dev.Sources(filepath.Join(dir, "manifests"), files)
	if err != nil {
		return err
	}
	run, err := o.runOptions(sources)
	if err != nil {
		return err
	}
	log, flush := newLogger(run)
	defer flush()
	signals := []os.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT}
	if len(command) > 0 { // Ctrl-C is the command's, such as a shell's
		signal.Notify(make(chan os.Signal, 1), signals[2])
		signals = signals[:2]
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), signals...)
	defer stop()
	c := run.config()
	var hosts *dev.HostsFile
	if o.hostsFile != "" {
		hosts = &dev.HostsFile{Path: o.hostsFile}
		defer func() { cmd.PrintErr(errorLine(hosts.Remove())) }()
	}
	var told *dev.Resolved
	defer func() { told.Close() }()
	ready := make(chan struct{})
	var first sync.Once
	c.Applied = func(snap *service.Snapshot) {
		if hosts != nil {
			if err := hosts.Write(dev.Hosts(snap, o.zone)); err != nil {
				log.Error().Err(err).Msg("the names are not in the hosts file")
			}
		}
		first.Do(func() {
			// Not before: systemd-resolved thinks little of a server that does not answer yet.
			told = o.tellResolved(ctx, &c, log)
			o.introduce(cmd.ErrOrStderr(), snap, &c, told != nil)
			close(ready)
		})
	}
	p, err := node.New(c, log)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var status error
	err = p.Run(ctx, nil, func(ctx context.Context) error {
		if len(command) == 0 {
			return nil
		}
		select {
		case <-ready:
			status = o.command(ctx, dir, command)
			cancel()
		case <-ctx.Done():
		}
		return nil
	})
	return cmp.Or(err, status)
}

func errorLine(err error) string {
	if err == nil {
		return ""
	}
	return "sluice: " + err.Error() + "\n"
}

// runOptions returns the options of sluice run that dev stands for.
func (o *devOptions) runOptions(manifests string) (*runOptions, error) {
	args := []string{"--manifests=" + manifests, "--access-log-format=console", "--v=" + fmt.Sprint(o.v), "--dns-zone=" + o.zone,
		"--bpf-root="} // nothing stays in the kernel after a kill
	if len(o.ranges) == 0 {
		if err := o.ranges.Set(devRanges); err != nil {
			return nil, err
		}
	}
	args = append(args, "--allocate-cluster-ips="+o.ranges.String(),
		"--nodeport-addresses=localhost") // processes on loopback are not opened to the network
	if o.inside { // all clients are on this node
		args = append(args, "--datapath="+string(node.RelayPath), "--node-ip="+joined(devAddresses[:]))
	} else {
		args = append(args, "--datapath="+o.dataPath.value)
	}
	if o.page != node.Off {
		args = append(args, "--web-bind-address="+o.page)
	}
	if o.address != node.Off {
		args = append(args, "--dns="+o.address)
		if !o.inside {
			for _, r := range dev.Resolvers("/etc/resolv.conf") {
				if r.Addr().String() != o.dnsAddress() { // left there by hand: it would ask itself
					args = append(args, "--dns-forward="+r.String())
				}
			}
		}
	}
	run := newRunOptions()
	flags := &cobra.Command{}
	run.register(flags)
	if err := flags.ParseFlags(args); err != nil {
		return nil, err
	}
	run.flags = flags.Flags()
	return run, run.validate()
}

// tellResolved has systemd-resolved ask the DNS server, if it runs; else it returns nil.
func (o *devOptions) tellResolved(ctx context.Context, c *node.Config, log zerolog.Logger) *dev.Resolved {
	if o.inside || len(c.DNS.Addresses) == 0 || o.resolved.value == node.Off || !dev.ResolvedRuns() {
		return nil
	}
	server := c.DNS.Addresses[0].String()
	if c.DNS.Addresses[0].Port() == 53 {
		server = c.DNS.Addresses[0].Addr().String()
	}
	told, err := dev.TellResolved(ctx, server, o.zone, devAddresses[0])
	if err != nil {
		log.Warn().Err(err).Msg("systemd-resolved does not ask for the names; --resolved=off leaves it alone, --hosts-file does without it")
		return nil
	}
	return told
}

// introduce says what is served, and where names and page are.
func (o *devOptions) introduce(out io.Writer, snap *service.Snapshot, c *node.Config, told bool) {
	for _, line := range dev.Served(snap, o.zone) {
		fmt.Fprintln(out, "  "+line)
	}
	switch {
	case len(c.DNS.Addresses) == 0:
	case o.inside:
		fmt.Fprintf(out, "names: %s answers for %s; the command uses it by itself\n", c.DNS.Addresses[0], o.zone)
	case told:
		fmt.Fprintf(out, "names: %s answers for %s; systemd-resolved asks it, so all programs find them\n", c.DNS.Addresses[0], o.zone)
	case o.hostsFile != "":
		fmt.Fprintf(out, "names: %s answers for %s, and they are in %s\n", c.DNS.Addresses[0], o.zone, o.hostsFile)
	default:
		fmt.Fprintf(out, "names: %s answers for %s; a command behind -- uses it by itself. For others: --hosts-file,\n"+
			"       or \"nameserver %s\" as the first line of /etc/resolv.conf, which dev answers for all names\n", c.DNS.Addresses[0], o.zone, o.dnsAddress())
	}
	if c.PageAddress != "" {
		fmt.Fprintf(out, "page:  http://%s/\n", c.PageAddress)
	}
	if o.inside {
		fmt.Fprintln(out, "It ends with the command; nothing is left behind.")
		return
	}
	fmt.Fprintln(out, "Ctrl-C ends it; nothing is left behind.")
}

// command runs a program that finds the Services by their names, until it ends.
func (o *devOptions) command(ctx context.Context, dir string, command []string) error {
	args := []string{"/proc/self/exe", "dev", "--enter=" + dir, "--"}
	if o.address == node.Off {
		args = nil
	} else if err := dev.WriteResolvConf(dir, o.dnsAddress(), o.zone); err != nil {
		return err
	}
	args = append(args, command...)
	child := exec.CommandContext(ctx, args[0], args[1:]...)
	child.Cancel = func() error { return child.Process.Signal(syscall.SIGTERM) }
	child.WaitDelay = commandPatience
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := child.Start(); err != nil {
		return fmt.Errorf("%s: %w", command[0], err)
	}
	err := child.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return statusOf(err)
}

// commandPatience is what a command gets to end after SIGTERM.
const commandPatience = 5 * time.Second

// dnsAddress is the address of the DNS server for resolv.conf, which knows no ports.
func (o *devOptions) dnsAddress() string {
	if at, err := netip.ParseAddrPort(o.address); err == nil {
		return at.Addr().String()
	}
	return o.address
}
