package sklookup

import (
	"errors"
	"syscall"

	"github.com/sluice-proxy/sluice/redirect"
)

// The features whose absence is told apart.
const (
	FeatureBPF      redirect.Feature = "CAP_BPF"
	FeatureBPFCall  redirect.Feature = "BPF"
	FeatureSkLookup redirect.Feature = "sk_lookup"
)

// remedies say what to do when a feature is missing.
var remedies = map[redirect.Feature]string{
	FeatureBPF:      "run as root of the first user namespace, or grant CAP_BPF and CAP_NET_ADMIN there; a user namespace of its own has no BPF",
	FeatureBPFCall:  "use a kernel with CONFIG_BPF_SYSCALL, or choose another mode",
	FeatureSkLookup: "use Linux 5.9 or later with CONFIG_BPF_SYSCALL and CONFIG_INET, or choose another mode",
}

// explain makes a *redirect.MissingError of an error whose number says that
// something is missing: a right, BPF as a whole, or else the feature that was
// asked for.
func explain(err error, feature redirect.Feature) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		feature = FeatureBPF
	case errors.Is(err, syscall.ENOSYS):
		feature = FeatureBPFCall
	case errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.ENOENT):
	default:
		return err
	}
	return &redirect.MissingError{Mode: "steering by sk_lookup", Feature: feature, Remedy: remedies[feature], Err: err}
}
