package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/pods"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/client"
)

// Names of the program as a plugin of kubectl, and as what completes the plugin's words.
const (
	pluginName     = "kubectl-sluice"
	completionName = "kubectl_complete-sluice"
)

// commandFor returns the command by the name that the program was started by, and its
// arguments.
func commandFor(args []string) (*cobra.Command, []string) {
	switch filepath.Base(args[0]) {
	case pluginName:
		return newPluginCommand(), args[1:]
	case completionName:
		return newPluginCommand(), append([]string{cobra.ShellCompRequestCmd}, args[1:]...)
	}
	return newRootCommand(), args[1:]
}

// newPluginCommand is newClusterCommand as kubectl starts it.
func newPluginCommand() *cobra.Command {
	cmd := newClusterCommand()
	cmd.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl sluice"}
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetFlagErrorFunc(explainFlagError)
	completeChoices(cmd)
	return cmd
}

// clusterAsker is what the subcommands share that ask the proxies of all nodes.
type clusterAsker struct {
	place    pods.Place
	nodes    []string
	parallel int
	timeout  time.Duration
}

func newClusterCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Ask the proxies of all nodes of a cluster, as kubectl sluice",
		Long: `Cluster asks the proxies of all nodes at once, through the API server, with the rights
of your kubeconfig: to list pods and to get and create pods/exec in Sluice's
namespace. Under the name kubectl-sluice in PATH the program is a plugin of kubectl:
kubectl sluice conns is sluice cluster conns.

Nodes that do not answer are named with the reason on standard error, and the exit
status is 1 then. Nodes without a pod of Sluice are not asked.`,
		Example: `  kubectl sluice status
  kubectl sluice conns client=10.1.2.3
  kubectl sluice slow service=shop/cart
  kubectl sluice failures --node node-1,node-2`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newClusterConnsCommand(), newClusterTapCommand(), newClusterTopCommand(), newClusterSlowCommand(),
		newClusterFailuresCommand(), newClusterStatusCommand(), newClusterWebCommand())
	return cmd
}

// Bounds of asking many nodes.
const (
	maxParallel    = 1000
	maxNodeTimeout = 5 * time.Minute
)

func (o *clusterAsker) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.place.Kubeconfig, "kubeconfig", "", "kubeconfig file (default: as kubectl, $KUBECONFIG or ~/.kube/config)")
	f.StringVar(&o.place.Context, "context", "", "context of the kubeconfig (default: the current one)")
	f.StringVarP(&o.place.Namespace, "namespace", "n", "kube-system", "namespace of Sluice's pods")
	f.StringVarP(&o.place.Selector, "selector", "l", "app.kubernetes.io/name=sluice", "labels of Sluice's pods")
	f.StringSliceVar(&o.nodes, "node", nil, "ask only the proxies of these nodes")
	f.IntVar(&o.parallel, "parallel", 100, "ask at most so many nodes at the same time")
	f.DurationVar(&o.timeout, "timeout", 10*time.Second, "give up on a node that has not answered in this time")
}

func (o *clusterAsker) validate() error {
	if err := between("parallel", o.parallel, 1, maxParallel); err != nil {
		return err
	}
	return between("timeout", o.timeout, time.Second, maxNodeTimeout)
}

// list returns the pods to ask, and a context that ends with Ctrl-C.
func (o *clusterAsker) list(cmd *cobra.Command) (context.Context, *pods.Cluster, []pods.Pod, error) {
	ctx, _ := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM) // for as long as the process lasts
	if err := o.validate(); err != nil {
		return ctx, nil, nil, err
	}
	silence()
	cluster, err := pods.Connect(o.place)
	if err != nil {
		return ctx, nil, nil, err
	}
	listing, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	all, err := cluster.List(listing, o.nodes)
	return ctx, cluster, all, err
}

// silence discards what client-go logs: each connection that we close. Only the first call has
// an effect: klog's logger must not change while a connection is open.
var silence = sync.OnceFunc(func() { klog.SetSlogLogger(slog.New(slog.DiscardHandler)) })

// unanswered is why a node has not answered.
type unanswered struct {
	node string
	err  error
}

// String returns one line.
func (s unanswered) String() string {
	return printable.Text(s.node + ": " + strings.Join(strings.Fields(s.err.Error()), " "))
}

// visit calls ask for each pod, o.parallel at the same time, and told with each error, one
// at a time. It returns how many there were.
func (o *clusterAsker) visit(ctx context.Context, cluster *pods.Cluster, all []pods.Pod, ask func(context.Context, pods.Pod, *client.Client) error, told func(unanswered)) int {
	var running sync.WaitGroup
	var mu sync.Mutex // guards count and calls of told
	count := 0
	slots := make(chan struct{}, o.parallel)
	for _, pod := range all {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			err := pod.Trouble
			if err == nil {
				err = o.askOne(ctx, cluster, pod, ask)
			}
			if err == nil || ctx.Err() != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			count++
			told(unanswered{pod.Node, err})
		})
	}
	running.Wait()
	return count
}

// askOne connects to a pod and calls ask.
func (o *clusterAsker) askOne(ctx context.Context, cluster *pods.Cluster, pod pods.Pod, ask func(context.Context, pods.Pod, *client.Client) error) error {
	greeting, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	c, err := client.Reach(greeting, "pod "+pod.Name, func() (net.Conn, error) { return cluster.Dial(pod) })
	if c != nil {
		defer c.Close()
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("pod %s: no answer in %s", pod.Name, o.timeout)
	}
	if failed := (*pods.ExecError)(nil); errors.As(err, &failed) {
		return fmt.Errorf("pod %s: %w", pod.Name, failed) // without what HTTP makes of it
	}
	if err != nil {
		return err
	}
	return ask(ctx, pod, c)
}

// gather asks the proxies of all nodes, each of which has wait more than --timeout to answer,
// and calls take with each answer, one at a time. Then it names the nodes that did not
// answer, and returns errReported if there are any.
func gather[Answer any](o *clusterAsker, cmd *cobra.Command, wait time.Duration, ask func(context.Context, *client.Client) (Answer, error),
	take func(node string, a Answer), end func() error) error {
	ctx, cluster, all, err := o.list(cmd)
	if err != nil {
		return err
	}
	var mu sync.Mutex // take is called under it
	var silent []unanswered
	o.visit(ctx, cluster, all, func(ctx context.Context, pod pods.Pod, c *client.Client) error {
		ctx, cancel := context.WithTimeout(ctx, o.timeout+wait)
		defer cancel()
		answer, err := ask(ctx, c)
		if ctx.Err() != nil {
			return fmt.Errorf("pod %s: no whole answer in %s", pod.Name, o.timeout+wait)
		}
		if err != nil {
			return pointed(err)
		}
		mu.Lock()
		defer mu.Unlock()
		take(pod.Node, answer)
		return nil
	}, func(s unanswered) { silent = append(silent, s) })
	if ctx.Err() != nil {
		return errReported
	}
	if err := end(); err != nil {
		return unlessGone(err)
	}
	return tellSilent(cmd, len(all), silent)
}

// tellSilent names the nodes that did not answer.
func tellSilent(cmd *cobra.Command, all int, silent []unanswered) error {
	if len(silent) == 0 {
		return nil
	}
	slices.SortFunc(silent, func(a, b unanswered) int { return strings.Compare(a.node, b.node) })
	cmd.PrintErrf("%d of %d nodes did not answer:\n", len(silent), all)
	for _, s := range silent {
		cmd.PrintErrln("  " + s.String())
	}
	return errReported
}
