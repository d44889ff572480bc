package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/dev"
	"github.com/sluice-proxy/sluice/dns"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// listOptions are the flags of sluice hosts and sluice env.
type listOptions struct {
	ranges          prefixes
	zone, namespace string
}

func newHostsCommand() *cobra.Command {
	o := &listOptions{}
	cmd := &cobra.Command{
		Use:   "hosts [flags] {DIR | FILE...}",
		Short: "Print the names of manifests' Services as lines of a hosts file",
		Long: `Hosts prints a line of /etc/hosts for each cluster IP that sluice dev gives to the
Services of manifests. A hosts file knows no headless Services.`,
		Example: `  sluice hosts k8s/ | sudo tee -a /etc/hosts
  docker run $(sluice hosts k8s/ | awk '{print "--add-host " $2 ":" $1}') IMAGE`,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if fault := dns.ZoneFault(o.zone); fault != "" {
				return fmt.Errorf("--dns-zone: %q %s", o.zone, fault)
			}
			return o.print(cmd, args, func(r *manifests.Report) []string { return dev.Hosts(r.Snapshot, o.zone) })
		},
	}
	o.register(cmd)
	cmd.Flags().StringVar(&o.zone, "dns-zone", "cluster.local", "domain of the Services' names")
	return cmd
}

func newEnvCommand() *cobra.Command {
	o := &listOptions{}
	cmd := &cobra.Command{
		Use:   "env [flags] {DIR | FILE...}",
		Short: "Print the variables that pods get for manifests' Services",
		Long: `Env prints the variables that Kubernetes gives to the pods of a namespace, such as
REDIS_MASTER_SERVICE_HOST, and their form of Docker's links, for the cluster IPs that
sluice dev gives to the Services of manifests.`,
		Example: `  env $(sluice env k8s/) npm start
  sluice env -n shop k8s/ > .env`,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(validation.IsDNS1123Label(o.namespace)) > 0 {
				return fmt.Errorf("--namespace: %q cannot be a namespace", o.namespace)
			}
			return o.print(cmd, args, func(r *manifests.Report) []string { return dev.Env(r.Services, o.namespace) })
		},
	}
	cmd.Flags().StringVarP(&o.namespace, "namespace", "n", "default", "namespace whose Services have variables")
	o.register(cmd)
	return cmd
}

func (o *listOptions) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.SortFlags = false
	f.Var(&o.ranges, "allocate-cluster-ips", "ranges of which Services without a cluster IP get one (default: "+devRanges+")")
}

// print prints lines about manifests, unless these have errors: then it prints the errors.
func (o *listOptions) print(cmd *cobra.Command, paths []string, lines func(*manifests.Report) []string) error {
	if len(paths) == 0 {
		return errors.New(cmd.CommandPath() + ": which manifests? for example: " + cmd.CommandPath() + " k8s/")
	}
	report, err := inspect(paths, o.ranges)
	if err != nil {
		return err
	}
	var wrong []error
	for _, f := range report.Findings {
		if f.Severity == manifests.Error {
			wrong = append(wrong, errors.New(findingLine(f)))
		}
	}
	if len(wrong) > 0 {
		return errors.Join(wrong...)
	}
	for _, line := range lines(report) {
		if _, err := fmt.Fprintln(cmd.OutOrStdout(), printable.Text(line)); err != nil {
			return unlessGone(err)
		}
	}
	return nil
}
