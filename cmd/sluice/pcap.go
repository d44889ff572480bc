package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/capture"
	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/client"
	"github.com/sluice-proxy/sluice/live/socket"
)

// pcapOptions are the flags of sluice pcap.
type pcapOptions struct {
	asker
	file         string
	snap         int
	lasts, wait  time.Duration
	size, memory resource.QuantityValue
}

func newPcapCommand() *cobra.Command {
	o := &pcapOptions{
		size:   resource.QuantityValue{Quantity: resource.MustParse("100Mi")},
		memory: resource.QuantityValue{Quantity: resource.MustParse("64Mi")},
	}
	cmd := &cobra.Command{
		Use:   "pcap [FILTER] -w FILE",
		Short: "Write the packets of connections, for Wireshark or tcpdump",
		Long: `Pcap writes the packets of the connections that match, until Ctrl-C: those between
client and proxy, and those between proxy and endpoint, at all interfaces of the
node. It needs root, or CAP_NET_RAW.

All packets wait in memory for --wait until it is known which connection they belong
to. So a filter may also ask for what only the end of a connection says: with
end=endpoint_reset, all packets of short connections that an endpoint reset are in
the file. The record does not tell from which port an endpoint was tried in vain: all
packets to and from that endpoint at that time are in the file too.

` + filterHelp,
		Example: `  sluice pcap service=shop/cart -w cart.pcap
  sluice pcap end=endpoint_reset --for 1m -w resets.pcap
  sluice pcap client=10.244.1.7 -w - | tcpdump -n -r -`,
		ValidArgsFunction: o.completeFilter,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.register(cmd)
	f := cmd.Flags()
	f.StringVarP(&o.file, "write", "w", "", "file to write, which only its owner may read; - for standard output")
	f.IntVarP(&o.snap, "snap", "s", 256, "bytes of each packet to keep, from the IP header on")
	f.DurationVar(&o.lasts, "for", 10*time.Minute, "end after this time; 0 for never")
	f.Var(&o.size, "size", "end when the file has this size")
	f.DurationVar(&o.wait, "wait", 5*time.Second, "how long packets wait for their connection to match")
	f.Var(&o.memory, "memory", "memory for packets that wait; beyond it they wait shorter")
	return cmd
}

func (o *pcapOptions) check() error {
	switch {
	case o.file == "":
		return errors.New("-w is missing: name a file, or - for standard output")
	case o.file == "-" && isTerminal(os.Stdout):
		return errors.New("-w: packets are nothing for a terminal: name a file")
	case o.lasts < 0:
		return fmt.Errorf("--for: %s is negative", o.lasts)
	}
	const most = 1 << 40
	return errors.Join(
		between("snap", o.snap, 64, 65535),
		between("wait", o.wait, 100*time.Millisecond, time.Hour),
		between("size", o.size.Value(), 1<<10, most),
		between("memory", o.memory.Value(), 1<<20, most),
	)
}

func (o *pcapOptions) run(cmd *cobra.Command, args []string) error {
	if err := o.check(); err != nil {
		return err
	}
	ctx, c, text, err := o.findFor(cmd, args)
	if err != nil {
		return err
	}
	if c.Version.Namespace != socket.Namespace() {
		return fmt.Errorf("the proxy runs in another network namespace than this command: start it with nsenter --net=/proc/%d/ns/net", c.Version.PID)
	}
	sniffer, err := sys.NewSniffer(o.snap)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w: it takes root, or CAP_NET_RAW", err)
		}
		return err
	}
	defer sniffer.Close()
	out, finish, err := o.open(cmd)
	if err != nil {
		return err
	}
	file, err := capture.NewFile(out, o.snap)
	if err != nil {
		return unlessGone(err)
	}
	if o.lasts > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.lasts)
		defer cancel()
	}
	flows := capture.NewFlows()
	w := watcher{client: c, filter: text, flows: flows}
	ctx, stop := context.WithCancelCause(ctx)
	go func() {
		if err := w.watch(ctx); err != nil {
			stop(err)
		}
	}()
	cmd.PrintErrln("capturing: Ctrl-C ends")
	bounds := capture.Bounds{Wait: o.wait, Memory: o.memory.Value(), Size: o.size.Value()}
	result, err := capture.New(sniffer, flows, file, bounds).Run(ctx, func() error { return w.last(cmd.Context(), o.wait) })
	if err = errors.Join(err, finish()); err == nil && !errors.Is(context.Cause(ctx), context.Canceled) && !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		err = context.Cause(ctx) // of the watcher
	}
	o.report(cmd, result, flows)
	return unlessGone(err)
}

// open opens the file. finish writes what is buffered, and closes it.
func (o *pcapOptions) open(cmd *cobra.Command) (out io.Writer, finish func() error, err error) {
	if o.file == "-" {
		b := bufio.NewWriterSize(cmd.OutOrStdout(), 64<<10)
		return b, b.Flush, nil
	}
	f, err := os.OpenFile(o.file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, nil, err
	}
	b := bufio.NewWriterSize(f, 64<<10)
	return b, func() error { return errors.Join(b.Flush(), f.Close()) }, nil
}

// report says what is in the file, and what is missing.
func (o *pcapOptions) report(cmd *cobra.Command, r capture.Result, flows *capture.Flows) {
	connections, leftOut := flows.Count()
	cmd.PrintErrf("%d packets of %d connections\n", r.Packets, connections)
	if r.Full {
		cmd.PrintErrf("the file has reached %s: see --size\n", amount.Bytes(uint64(o.size.Value())))
	}
	if r.Early > 0 {
		cmd.PrintErrf("%d packets waited shorter than %s, as they took more than %s: see --memory\n", r.Early, o.wait, amount.Bytes(uint64(o.memory.Value())))
	}
	if r.Dropped > 0 {
		cmd.PrintErrf("the kernel dropped %d packets, as they were read too slowly\n", r.Dropped)
	}
	if leftOut > 0 {
		cmd.PrintErrf("%d connections are left out, as there are too many at once\n", leftOut)
	}
}

// watcher learns which connections match.
type watcher struct {
	client *client.Client
	filter string
	flows  *capture.Flows
}

// watch adds the connections that match, when they have reached their endpoint and when
// they end, and each second those that still connect, until ctx ends.
func (w watcher) watch(ctx context.Context) error {
	connecting := make(chan error, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		err := w.list(ctx, api.PathStream, url.Values{"filter": {w.filter}})
		for err == nil && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-tick.C:
				err = w.list(ctx, api.PathStream, url.Values{"filter": {w.filter + " state=connecting"}})
			}
		}
		connecting <- err
		cancel()
	}()
	err := follow(ctx, w.client, api.PathTap, url.Values{"filter": {w.filter}, "opens": {"true"}}, func(_ []byte, c *api.Connection) error {
		if c.Protocol != "" { // else it says how many are lost
			w.flows.Add(c)
		}
		return nil
	})
	cancel()
	return errors.Join(err, <-connecting)
}

// last adds what the last packets may belong to: the open connections, and those that
// ended a moment ago.
func (w watcher) last(ctx context.Context, wait time.Duration) error {
	err := w.list(ctx, api.PathStream, url.Values{"filter": {w.filter}})
	if err == nil {
		since := float64(time.Now().Add(-wait).UnixMilli()) / 1000
		_ = w.list(ctx, api.PathPast, url.Values{"filter": {w.filter}, "since": {strconv.FormatFloat(since, 'f', 3, 64)}}) // without --past, the tap must do
	}
	return err
}

func (w watcher) list(ctx context.Context, path string, query url.Values) error {
	return w.client.Stream(ctx, path, query, func(line []byte) error {
		var c api.Connection
		if err := decode(line, &c); err != nil {
			return err
		}
		if c.Protocol != "" {
			w.flows.Add(&c)
		}
		return nil
	})
}
