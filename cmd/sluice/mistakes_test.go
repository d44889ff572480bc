package main

import (
	"testing"

	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestMistakesNameTheFlagOrTheFile, not what a library calls them.
func TestMistakesNameTheFlagOrTheFile(t *testing.T) {
	for flag, want := range map[string]string{
		"--nft-table=a b":          `--nft-table: "a b" is not a name`,
		"--nft-table=":             `--nft-table: "" is not a name`,
		"--socket-mark=0x1000":     "--socket-mark",
		"--route-table-steer=8377": "--route-table-steer",
		"--conntrack=kep":          "is not one of auto, bypass, keep",
		"--kube-api-qps=NaN":       "--kube-api-qps",
		"--config=" + writeFile(t, "passwd", "root:x:0:0\n"): "not a KubeProxyConfiguration",
	} {
		check.Errorf(t, must.Err(runFlags(t, "--manifests="+t.TempDir(), flag)), want, "%s", flag)
	}
	for _, args := range [][]string{{"dev"}, {"dev", "--enter=" + t.TempDir()}} {
		root := newRootCommand()
		root.SetArgs(args)
		check.Errorf(t, root.Execute(), "which manifests?", "%v", args)
	}
	file := writeFile(t, "kubeconfig", "apiVersion: v1\nkind: Config\nclusters: []\n")
	check.Errorf(t, must.Err(kubernetes.Connect(kubernetes.Connection{Kubeconfig: file})), file+": it names no cluster", "a kubeconfig without a cluster")
	file = writeFile(t, "config", "apiVersion: v1\nkind: Config\nclusters: [{name: a, cluster: {server: https://h}}]\ncontexts: [{name: a, context: {cluster: a}}]\ncurrent-context: a\n")
	check.Errorf(t, must.Err(kubernetes.Connect(kubernetes.Connection{Kubeconfig: file, Master: "https://a b"})), "--master", "an address that is none")
}
