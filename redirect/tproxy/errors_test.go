package tproxy

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
)

func TestExplain(t *testing.T) {
	other := errors.New("something else")
	for _, c := range []struct {
		err  error
		want redirect.Feature
		text string
	}{
		{os.NewSyscallError("sendmsg", syscall.EPERM), redirect.FeatureNetAdmin,
			"steering by nftables: CAP_NET_ADMIN is missing (sendmsg: operation not permitted): run as root, or grant CAP_NET_ADMIN in the user namespace that owns the network namespace"},
		{fmt.Errorf("rule: %w", syscall.ENOENT), FeatureTProxy,
			"steering by nftables: nft_tproxy is missing (rule: no such file or directory): load the module nft_tproxy (CONFIG_NFT_TPROXY), or choose another mode"},
		{syscall.EOPNOTSUPP, FeatureTProxy, ""},
		{other, "", ""},
	} {
		err := explain(c.err, FeatureTProxy)
		var missing *redirect.MissingError
		switch {
		case c.want == "":
			check.Equalf(t, err, c.err, "what %v became", c.err)
		case !errors.As(err, &missing) || missing.Feature != c.want || !errors.Is(err, c.err):
			t.Errorf("%v: got %v, want %s", c.err, err, c.want)
		case c.text != "" && err.Error() != c.text:
			t.Errorf("got  %s\nwant %s", err, c.text)
		}
	}
	for feature := range remedies {
		if remedies[feature] == "" {
			t.Errorf("%s: no remedy", feature)
		}
	}
	if explain(nil, FeatureTProxy) != nil {
		t.Error("nil became an error")
	}
}
