package sys

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// While a listening socket takes the place of another one both share their port.
// No stranger of the same user does.
func TestSharedPortIsNotJoined(t *testing.T) {
	if err := CanDisown(); err != nil {
		t.Skipf("SKIP-NEEDS: CAP_CHOWN: %v", err)
	}
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		ours := must.Get(ListenTCP(netip.MustParseAddrPort(address), ListenOptions{ReusePort: true}))(t)
		defer Close(ours)
		at, e := LocalAddr(ours)
		must.Equal(t, e, 0)
		second, err := ListenTCP(at, ListenOptions{ReusePort: true})
		must.OKf(t, err, "a second one of ours")
		defer Close(second)
		stranger, e := socket(family(at.Addr()), unix.SOCK_STREAM, unix.IPPROTO_TCP)
		must.Equal(t, e, 0)
		defer Close(stranger)
		setInt(stranger, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		setInt(stranger, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		check.Equalf(t, bind(stranger, at), EADDRINUSE, "a stranger binds %s", at)
	}
}
