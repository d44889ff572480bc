package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/client"
	"github.com/sluice-proxy/sluice/live/explain"
	"github.com/sluice-proxy/sluice/node"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// explainOptions are the flags of sluice explain.
type explainOptions struct {
	*runOptions
	protocol choice
	from     string
	to       string
	file     string
	output   choice
	// podCIDRs replace what run reads of pods' interfaces.
	podCIDRs prefixes
}

func newExplainCommand() *cobra.Command {
	o := &explainOptions{
		runOptions: newRunOptions(),
		protocol:   newChoice("tcp", "udp", "sctp"),
		output:     newChoice("text", "json"),
	}
	cmd := &cobra.Command{
		Use:   "explain [--admin-socket SOCKET | --manifests DIR | --kubeconfig FILE | --config FILE] {--from IP --to IP:PORT | -f FILE}",
		Short: "Say what happens to a connection, and why",
		Long: `Explain decides about a connection with the code of sluice run, and says why:
which service matched, which rules decided, and why each endpoint is a candidate
or not. It sends no packet.

Without flags that change decisions, it asks the proxy that runs in this network
namespace, and says so on standard error: the answer is of the policy in force,
and says since when the Service has been as it is. A connection of before may have
been decided otherwise.
--admin-socket off prevents that.

Otherwise it needs no rights and no running proxy: it accepts all flags of sluice
run, and kube-proxy's configuration file; this help lists those that change
decisions. It reads Services from a directory of manifests, or once from the API
server; --manifests has precedence over the API server of --config. It ignores
the addresses and routes of its machine, so that its answers are the same
everywhere. The node's addresses are those of its Node object, of --node-ip and
of --bind-address; --pod-cidr names the ranges behind pods' interfaces.

With -f, each line of FILE (- for standard input) is a question, and each line of
output the answer:
  {"protocol":"tcp","from":"10.244.0.5","to":"10.96.0.10:80"}
  {"verdict":"accept","service":"shop/web:http","address":"ClusterIP",...}
The answer to an invalid line is {"error":"..."}, and the exit status is then 1.
docs/explain.md describes the fields.`,
		Example: `  sluice explain --from 10.244.0.5 --to 10.96.0.10:80
  sluice explain --manifests DIR --hostname-override node-1 --from 10.244.0.5 --to 10.96.0.10:80
  sluice explain --manifests DIR --hostname-override node-1 --from 203.0.113.9 --to 172.16.0.1:30080 --node-ip 172.16.0.1 -o json
  sluice explain --manifests DIR --hostname-override node-1 -f questions.jsonl | jq -r .verdict | sort | uniq -c`,
		DisableFlagsInUseLine: true,
		Args:                  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(cmd); err != nil {
				return err
			}
			return o.explain(cmd)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.from, "from", "", "address of the client")
	f.StringVar(&o.to, "to", "", "address and port that the client connects to")
	o.protocol.register(cmd, "protocol", "", "protocol of the connection")
	f.StringVarP(&o.file, "file", "f", "", "file of questions, one JSON object on each line; - is standard input; answers are lines of JSON too")
	o.output.register(cmd, "output", "o", "format of the answer")
	o.addTo(cmd, func(flag string) bool { return slices.Contains(decisionFlags, flag) })
	socket := f.Lookup("admin-socket")
	socket.Usage, socket.Hidden = "ask the proxy at this socket: a path, or @ and an abstract name; auto: that of this network namespace, if one runs; off: none", false
	f.Lookup("node-ip").Usage = "this node's own addresses, beside those of its Node object"
	f.Var(&o.podCIDRs, "pod-cidr", "ranges of addresses that this node routes to its pods' interfaces, for --detect-local-mode BridgeInterface and InterfaceNamePrefix")
	return cmd
}

// decisionFlags are the flags of sluice run that change decisions.
var decisionFlags = []string{
	"manifests", "max-manifest-size", "kubeconfig", "master", "config",
	"hostname-override", "service-proxy-name", "node-ip", "bind-address",
	"service-cidr", "allocate-cluster-ips", "cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix",
	"nodeport-addresses", "proxy-mode", "iptables-localhost-nodeports",
	"external-ips", "feature-gates", "masquerade-all",
}

// validate completes the flags as sluice run does, and checks them.
func (o *explainOptions) validate(cmd *cobra.Command) error {
	if err := o.readConfig(cmd.Flags()); err != nil {
		return err
	}
	if o.manifests != "" && !cmd.Flags().Changed("kubeconfig") {
		o.cluster.connection.Kubeconfig = "" // of the configuration file
	}
	single := o.from != "" || o.to != "" || cmd.Flags().Changed("protocol")
	switch {
	case o.file != "" && single:
		return errors.New("-f and --from, --to, --protocol exclude each other: the questions are in the file")
	case o.file != "" && cmd.Flags().Changed("output") && o.output.value != "json":
		return errors.New("-f answers in JSON only")
	case o.file == "" && (o.from == "" || o.to == ""):
		return errors.New("which connection? give --from IP and --to IP:PORT, or -f FILE")
	case len(o.podCIDRs) > 0 && o.podInterfaces() == nil:
		return fmt.Errorf("--pod-cidr counts only with --detect-local-mode %s and %s", detectBridge, detectPrefix)
	}
	return o.runOptions.validate()
}

func (o *explainOptions) explain(cmd *cobra.Command) error {
	var q explain.Question
	var in io.Reader
	switch o.file {
	case "":
		var err error
		if q, err = explain.ParseQuestion(o.protocol.value, o.from, o.to); err != nil {
			return errors.New("--" + err.Error())
		}
	case "-":
		in = cmd.InOrStdin()
	default:
		f, err := os.Open(o.file)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	ask, err := o.asker(cmd)
	if err != nil {
		return err
	}
	if in != nil {
		return answerAll(cmd, ask, in)
	}
	a, err := ask(q)
	switch {
	case err != nil:
		return err
	case o.output.value == "json":
		a.Text = ""
		return explain.WriteJSON(cmd.OutOrStdout(), a)
	}
	_, err = io.WriteString(cmd.OutOrStdout(), a.Text)
	return err
}

func answerAll(cmd *cobra.Command, ask explain.Asker, in io.Reader) error {
	s, err := explain.Batch(ask, in, cmd.OutOrStdout())
	if err != nil {
		return err
	}
	if s.Failed > 0 {
		return fmt.Errorf("%d of %d lines are no questions; the first: %w", s.Failed, s.Failed+s.Answered, s.First)
	}
	return nil
}

// asker returns who answers: the proxy that runs here if the flags name no other
// configuration than its own, else the policy of manifests or of the API server.
func (o *explainOptions) asker(cmd *cobra.Command) (explain.Asker, error) {
	own := slices.ContainsFunc(append([]string{"pod-cidr"}, decisionFlags...), cmd.Flags().Changed)
	text := o.file == "" && o.output.value == "text"
	var none error // why no proxy is asked
	if !own && o.node.AdminSocket != node.Off {
		var c *client.Client
		if c, none = client.Find(cmd.Context(), o.node.AdminSocket); none == nil {
			cmd.PrintErrf("the running proxy answers: node %s, process %d, %s\n", printable.Name(c.Version.Node), c.Version.PID, c.Name)
			return askProxy(cmd.Context(), c, text), nil
		}
		if cmd.Flags().Changed("admin-socket") {
			return nil, none
		}
	}
	table, err := o.load(cmd)
	if errors.Is(err, errNothingToDecideBy) && none != nil {
		return nil, fmt.Errorf("%w; and %w", err, none)
	}
	if err != nil {
		return nil, err
	}
	return func(q explain.Question) (*explain.Answer, error) {
		return explain.Ask(table, q, text, nil, nil), nil
	}, nil
}

// askProxy has a running proxy answer by the policy in force.
func askProxy(ctx context.Context, c *client.Client, text bool) explain.Asker {
	return func(q explain.Question) (*explain.Answer, error) {
		a := new(explain.Answer)
		query := url.Values{
			"protocol": {q.Protocol.String()}, "from": {q.From.String()}, "to": {q.To.String()}, "text": {strconv.FormatBool(text)},
		}
		return a, c.Get(ctx, api.PathExplain, query, a)
	}
}

// apiPatience bounds the wait for all objects of the API server.
const apiPatience = time.Minute

// load reads the manifests, or the API server, once. It writes problems to standard
// error, as run does.
func (o *explainOptions) load(cmd *cobra.Command) (*policy.Table, error) {
	out := zerolog.ConsoleWriter{Out: cmd.ErrOrStderr(), NoColor: true, PartsExclude: []string{zerolog.TimestampFieldName}}
	log := zerolog.New(textWriter(out)).Level(zerolog.WarnLevel)
	o.logIgnored(log)
	config := o.config()
	objects, _, err := config.OpenSource(log)
	if errors.Is(err, kubernetes.ErrNoCluster) {
		return nil, errNothingToDecideBy
	}
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithTimeout(cmd.Context(), apiPatience)
	defer stop()
	var snap *service.Snapshot
	store := service.NewStore(config.Store)
	err = objects.Run(ctx, func(c service.Change) {
		if snap == nil {
			c.Host = &service.Host{Addresses: o.nodeIPs}
			snap = store.Apply(c)
		}
		stop()
	})
	if err != nil {
		return nil, err
	}
	if snap == nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil, fmt.Errorf("the Services are not known after %s", apiPatience)
		}
		return nil, ctx.Err() // interrupted
	}
	from, _ := objects.(*manifests.Watcher)
	for _, p := range snap.Problems {
		node.LogProblem(log, from, p)
	}
	config.Policy.PodRanges = o.podCIDRs
	return policy.Compile(nil, snap, config.Policy), nil
}

var errNothingToDecideBy = errors.New("there is nothing to decide by: give --manifests DIR, a directory of Kubernetes manifests, or --kubeconfig FILE")
