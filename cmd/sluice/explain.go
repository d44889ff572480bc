package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/explain"
	"github.com/sluice-proxy/sluice/internal/hostnet"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
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
		protocol:   choice{value: "tcp", allowed: []string{"tcp", "udp", "sctp"}},
		output:     choice{value: "text", allowed: []string{"text", "json"}},
	}
	cmd := &cobra.Command{
		Use:   "explain [--manifests DIR | --kubeconfig FILE | --config FILE] {--from IP --to IP:PORT | -f FILE}",
		Short: "Say what happens to a connection, and why",
		Long: `Explain decides about a connection with the code of sluice run, and says why:
which service matched, which rules decided, and why each endpoint is a candidate
or not. It sends no packet, and needs no rights and no running proxy.

It accepts all flags of sluice run, and kube-proxy's configuration file; this help
lists those that change decisions. It reads Services from a directory of manifests,
or once from the API server; --manifests has precedence over the API server of --config.

It ignores the addresses and routes of its machine, so that its answers are the
same everywhere. The node's addresses are those of its Node object, of --node-ip
and of --bind-address; --pod-cidr names the ranges behind pods' interfaces.

With -f, each line of FILE (- for standard input) is a question, and each line of
output the answer:
  {"protocol":"tcp","from":"10.244.0.5","to":"10.96.0.10:80"}
  {"verdict":"accept","service":"shop/web:http","address":"ClusterIP",...}
The answer to an invalid line is {"error":"..."}, and the exit status is then 1. docs/explain.md describes the fields.`,
		Example: `  sluice explain --manifests DIR --hostname-override node-1 --from 10.244.0.5 --to 10.96.0.10:80
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
	f.Var(&o.protocol, "protocol", "protocol of the connection")
	f.StringVarP(&o.file, "file", "f", "", "file of questions, one JSON object on each line; - is standard input; answers are lines of JSON too")
	f.VarP(&o.output, "output", "o", "format of the answer")
	run := &cobra.Command{}
	o.register(run)
	run.Flags().VisitAll(func(flag *pflag.Flag) {
		flag.Hidden = !slices.Contains(decisionFlags, flag.Name)
		f.AddFlag(flag)
	})
	f.Lookup("node-ip").Usage = "this node's own addresses, beside those of its Node object"
	f.Var(&o.podCIDRs, "pod-cidr", "ranges of addresses that this node routes to its pods' interfaces, for --detect-local-mode BridgeInterface and InterfaceNamePrefix")
	return cmd
}

// decisionFlags are the flags of sluice run that change decisions.
var decisionFlags = []string{
	"manifests", "max-manifest-size", "kubeconfig", "master", "config",
	"hostname-override", "service-proxy-name", "node-ip", "bind-address",
	"service-cidr", "cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix",
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
	table, err := o.load(cmd)
	if err != nil {
		return err
	}
	switch {
	case in != nil:
		return answerAll(cmd, table, in)
	case o.output.value == "json":
		return explain.WriteJSON(cmd.OutOrStdout(), table, q)
	}
	return explain.WriteText(cmd.OutOrStdout(), table, q)
}

func answerAll(cmd *cobra.Command, table *policy.Table, in io.Reader) error {
	s, err := explain.Batch(table, in, cmd.OutOrStdout())
	if err != nil {
		return err
	}
	if s.Failed > 0 {
		return fmt.Errorf("%d of %d lines are no questions; the first: %w", s.Failed, s.Failed+s.Answered, s.First)
	}
	return nil
}

// apiPatience bounds the wait for all objects of the API server.
const apiPatience = time.Minute

// load reads the manifests, or the API server, once. It writes problems to standard
// error, as run does.
func (o *explainOptions) load(cmd *cobra.Command) (*policy.Table, error) {
	out := zerolog.ConsoleWriter{Out: cmd.ErrOrStderr(), NoColor: true, PartsExclude: []string{zerolog.TimestampFieldName}}
	log := zerolog.New(textWriter(out)).Level(zerolog.WarnLevel)
	o.logIgnored(log)
	objects, err := o.objects(log)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithTimeout(cmd.Context(), apiPatience)
	defer stop()
	var snap *service.Snapshot
	store := service.NewStore(o.store())
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
	for _, p := range snap.Problems {
		log.Warn().Str("object", p.Object).Msg(p.Text)
	}
	return policy.Compile(nil, snap, o.config(hostnet.State{PodRanges: o.podCIDRs})), nil
}

// objects opens the source of Services: a directory or a cluster.
func (o *explainOptions) objects(log zerolog.Logger) (source, error) {
	if o.manifests != "" {
		return o.openManifests(log), nil
	}
	client, err := o.connect(log)
	if errors.Is(err, kubernetes.ErrNoCluster) {
		return nil, errors.New("there is nothing to decide by: give --manifests DIR, a directory of Kubernetes manifests, or --kubeconfig FILE")
	}
	if err != nil {
		return nil, err
	}
	return o.openCluster(client, log), nil
}
