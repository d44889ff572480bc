// Package kubeproxyconfig reads kube-proxy's configuration file, a
// KubeProxyConfiguration of the API group kubeproxy.config.k8s.io/v1alpha1, with
// kube-proxy's defaults and checks (A.9), so that the file of a cluster that
// ran kube-proxy serves as it is.
//
//	file, err := kubeproxyconfig.Load("/var/lib/kube-proxy/config.conf")
//	for _, w := range file.Warnings { ... }
//	names := file.Ignored() // what has no meaning here
//
// The rules are those of pkg/proxy/apis/config of k8s.io/kubernetes, whose code
// cannot be imported; a test in test/cluster compares the defaults with those that
// the real kube-proxy writes.
package kubeproxyconfig
