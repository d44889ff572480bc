package tproxy

import (
	"errors"
	"fmt"
	"syscall"
)

// Feature is something that this way of steering needs.
type Feature string

// The features whose absence is told apart.
const (
	FeatureNetAdmin Feature = "CAP_NET_ADMIN"
	FeatureNFTables Feature = "nf_tables"
	FeatureTProxy   Feature = "nft_tproxy"
	FeatureSocket   Feature = "nft_socket"
	FeatureReject   Feature = "nft_reject_inet"
	FeatureNoTrack  Feature = "nft_ct"
)

// remedies say what to do when a feature is missing.
var remedies = map[Feature]string{
	FeatureNetAdmin: "run as root, or grant CAP_NET_ADMIN in the user namespace that owns the network namespace",
	FeatureNFTables: "load the module nf_tables (CONFIG_NF_TABLES, CONFIG_NF_TABLES_INET), or choose another way of steering",
	FeatureTProxy:   "load the module nft_tproxy (CONFIG_NFT_TPROXY), or choose another way of steering",
	FeatureSocket:   "load the module nft_socket (CONFIG_NFT_SOCKET), or choose another way of steering",
	FeatureReject:   "load the module nft_reject_inet (CONFIG_NFT_REJECT_INET), or choose another way of steering",
	FeatureNoTrack:  "load the module nft_ct (CONFIG_NFT_CT, for notrack), or choose another way of steering",
}

// MissingError says what the kernel or the process lacks for this way of
// steering, and what can be done about it.
type MissingError struct {
	Feature Feature
	Err     error // what the kernel answered
}

// Error names the feature and the remedy.
func (e *MissingError) Error() string {
	return fmt.Sprintf("steering by nftables: %s is missing (%v): %s", e.Feature, e.Err, remedies[e.Feature])
}

// Unwrap gives the kernel's answer.
func (e *MissingError) Unwrap() error { return e.Err }

// ClashError says that somebody else has what only one can have.
type ClashError struct {
	What string // what is there
}

// Error names what is there.
func (e *ClashError) Error() string { return e.What + " is there and not ours" }

// explain makes a *MissingError of an error whose number says that something is
// missing: the capability, or else the feature that was asked for.
func explain(err error, feature Feature) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		return &MissingError{Feature: FeatureNetAdmin, Err: err}
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.EPROTONOSUPPORT),
		errors.Is(err, syscall.EAFNOSUPPORT), errors.Is(err, syscall.EINVAL):
		return &MissingError{Feature: feature, Err: err}
	}
	return err
}
