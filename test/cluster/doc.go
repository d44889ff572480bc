// Package cluster tests Sluice in a cluster: the real etcd, kube-apiserver and
// kube-controller-manager run on a node made of network namespaces, and one table
// of cases is played with Sluice and with the real kube-proxy on that node.
//
//	make test-cluster
//
// builds the programs from the module in controlplane (some minutes, once) and
// runs the tests, which have the build tag cluster. SLUICE_CLUSTER_BIN is where
// the programs are.
package cluster
