package scale

import (
	"fmt"
	"strings"
)

// PublicSizes are those of reports by users of kube-proxy (kubernetes/kubernetes#135639 and
// #139513), and one that is larger than they are.
var PublicSizes = []Size{published, wide, largest}

var published, wide, largest = Size{5006, 50}, Size{44125, 1}, Size{30000, 33}

// PublicRate is the rollout's number of changed slices a second.
const PublicRate = 1000

// PublicModes are both data paths, and a kube-proxy if there is one. It does not meet the
// largest size, where it would take longer than a run waits.
func PublicModes(kubeProxy string) []Mode {
	const noLimit = 1 << 20
	modes := []Mode{
		{Name: "relay", Flags: []string{"--redirect", "tproxy", "--tproxy-backend", "nftables"}, Most: noLimit},
		{Name: "kernel flows", Flags: []string{"--datapath", "kernel"}, Kernel: true, Most: noLimit},
	}
	if kubeProxy != "" {
		modes = append(modes, Mode{Name: "kube-proxy", Program: kubeProxy, Most: noLimit, MostEndpoints: 500_000, Flags: []string{
			"--proxy-mode", "nftables", "--cluster-cidr", "10.128.0.0/9", "--conntrack-max-per-core", "0",
		}})
	}
	return modes
}

var publicGoals = []goal{
	{"5,006 services, 250,251 endpoints: start to first sync, ms", published, 3000, start},
	{"… one endpoint changed, median, ms", published, 10, change},
	{"… the same in a rollout of 1,000 slices a second, ms", published, 100, lagging},
	{"44,125 services, one endpoint each: start to first sync, ms", wide, 3000, start},
	{"… one endpoint changed, median, ms", wide, 10, change},
	{"… the same in a rollout of 1,000 slices a second, ms", wide, 100, lagging},
	{"30,000 services, 989,968 endpoints: start to first sync, ms", largest, 6000, start},
	{"… memory at the end of the start, MiB", largest, 600, memory},
	{"… memory later, MiB", largest, 600, func(r Result) float64 { return float64(r.RSSLater >> 20) }},
	{"… one endpoint changed, median, ms", largest, 10, change},
	{"… the same in a rollout of 1,000 slices a second, ms", largest, 100, lagging},
}

// PublicGoals compares results with the goals of the public sizes, as a Markdown table.
func PublicGoals(results []Result) string {
	return judge(publicGoals, []string{"relay", "kernel flows"}, results)
}

// PublicTable returns results as a Markdown table.
func PublicTable(results []Result) string {
	var b strings.Builder
	b.WriteString("| services | endpoints | | start [ms] | CPU [s] | RSS [MiB] | later [MiB] | BPF maps [MiB] | one endpoint changed [ms] | CPU of a change [ms] | rollout: changes [/s] | a change's lag [ms] | CPU [cores] |\n")
	b.WriteString("|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n")
	for _, r := range results {
		fmt.Fprintf(&b, "| %s | %s | %s | ", thousands(r.Services), thousands(r.Endpoints), r.Mode)
		if r.Error != "" {
			reason, _, _ := strings.Cut(r.Error, "\n")
			fmt.Fprintf(&b, "%s | | | | | | | | | |\n", strings.ReplaceAll(reason, "|", "/"))
			continue
		}
		fmt.Fprintf(&b, "%s | %.2f | %d | %d | %d | %s (%s) | %.1f | %.0f | %s (%s) | %.2f |\n",
			thousands(int(r.Start.Milliseconds())), r.CPU.Seconds(), r.RSS>>20, r.RSSLater>>20, r.Maps>>20, ms(r.Endpoint[0]), ms(r.Endpoint[1]),
			float64(r.CPUChange.Microseconds())/1000/float64(r.Changes), r.Rollout.Rate, ms(r.Rollout.Lag[0]), ms(r.Rollout.Lag[1]), r.Rollout.Cores)
	}
	return b.String()
}
