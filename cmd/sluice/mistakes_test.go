package main

import (
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/source/kubernetes"
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
		if _, err := runFlags(t, "--manifests="+t.TempDir(), flag); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", flag, err, want)
		}
	}
	for _, args := range [][]string{{"dev"}, {"dev", "--enter=" + t.TempDir()}} {
		root := newRootCommand()
		root.SetArgs(args)
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), "which manifests?") {
			t.Errorf("%v: %v", args, err)
		}
	}
	file := writeFile(t, "kubeconfig", "apiVersion: v1\nkind: Config\nclusters: []\n")
	if _, err := kubernetes.Connect(kubernetes.Connection{Kubeconfig: file}); err == nil || !strings.Contains(err.Error(), file+": it names no cluster") {
		t.Errorf("a kubeconfig without a cluster: %v", err)
	}
	file = writeFile(t, "config", "apiVersion: v1\nkind: Config\nclusters: [{name: a, cluster: {server: https://h}}]\ncontexts: [{name: a, context: {cluster: a}}]\ncurrent-context: a\n")
	if _, err := kubernetes.Connect(kubernetes.Connection{Kubeconfig: file, Master: "https://a b"}); err == nil || !strings.Contains(err.Error(), "--master") {
		t.Errorf("an address that is none: %v", err)
	}
}
