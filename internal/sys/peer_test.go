package sys

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Both ends of a unix socket learn which process and user the other one is.
func TestPeers(t *testing.T) {
	name := filepath.Join(t.TempDir(), "socket")
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: name}))(t)
	defer l.Close()
	c := must.Get(net.DialUnix("unix", nil, &net.UnixAddr{Name: name}))(t)
	defer c.Close()
	own := unix.Ucred{Pid: int32(os.Getpid()), Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid())}
	check.Equal(t, *must.Get(ListenerCredentials(name))(t), own)
	check.Equal(t, *must.Get(PeerCredentials(c))(t), own)
	check.ErrorIsf(t, must.Err(ListenerCredentials(name+"x")), unix.ENOENT, "nobody listens")

	// The kernel says in two places what this process may do.
	_, missing := Missing(NetAdmin)
	check.Equal(t, must.Get(IsNetAdmin(os.Getpid(), own.Uid))(t), !missing)
	check.Equalf(t, must.Get(IsNetAdmin(os.Getpid(), own.Uid+1))(t), false, "another user's process")
	check.ErrorIsf(t, must.Err(IsNetAdmin(-1, own.Uid)), os.ErrNotExist, "no process")
}
