package tproxy

import (
	"errors"
	"syscall"

	"github.com/sluice-proxy/sluice/redirect"
)

// The features whose absence is told apart.
const (
	FeatureNFTables redirect.Feature = "nf_tables"
	FeatureTProxy   redirect.Feature = "nft_tproxy"
	FeatureSocket   redirect.Feature = "nft_socket"
	FeatureReject   redirect.Feature = "nft_reject_inet"
	FeatureNoTrack  redirect.Feature = "nft_ct"
)

// remedies say what to do when a feature is missing.
var remedies = map[redirect.Feature]string{
	redirect.FeatureNetAdmin: redirect.RemedyNetAdmin,
	FeatureNFTables:          "load the module nf_tables (CONFIG_NF_TABLES, CONFIG_NF_TABLES_INET), or choose another mode",
	FeatureTProxy:            "load the module nft_tproxy (CONFIG_NFT_TPROXY), or choose another mode",
	FeatureSocket:            "load the module nft_socket (CONFIG_NFT_SOCKET), or choose another mode",
	FeatureReject:            "load the module nft_reject_inet (CONFIG_NFT_REJECT_INET), or choose another mode",
	FeatureNoTrack:           "load the module nft_ct (CONFIG_NFT_CT, for notrack), or choose another mode",
}

// explain makes a *redirect.MissingError of an error whose number says that something is
// missing: the capability, or else the feature that was asked for.
func explain(err error, feature redirect.Feature) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		return missing(redirect.FeatureNetAdmin, err)
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.EPROTONOSUPPORT),
		errors.Is(err, syscall.EAFNOSUPPORT), errors.Is(err, syscall.EINVAL):
		return missing(feature, err)
	}
	return err
}

func missing(feature redirect.Feature, err error) error {
	return &redirect.MissingError{Mode: "steering by nftables", Feature: feature, Remedy: remedies[feature], Err: err}
}
