package demo

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
)

func TestExplain(t *testing.T) {
	perm := &os.PathError{Op: "fork/exec", Path: self, Err: syscall.EPERM}
	for _, c := range []struct {
		err  error
		s    settings
		want string
	}{
		{perm, settings{cloneSysctl: "0"}, "sudo sysctl kernel.unprivileged_userns_clone=1"},
		{perm, settings{cloneSysctl: "1", apparmorSysctl: "1"}, "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"},
		{fmt.Errorf("bring up lo: %w", syscall.EPERM), settings{apparmorSysctl: "1"}, "AppArmor"},
		{&os.PathError{Err: syscall.ENOSPC}, settings{maxUserSysctl: "0"}, "sudo sysctl user.max_user_namespaces=15000"},
		{&os.PathError{Err: syscall.ENOSPC}, settings{maxNetSysctl: "0"}, "sudo sysctl user.max_net_namespaces=15000"},
		{&os.PathError{Err: syscall.EUSERS}, settings{maxUserSysctl: "100"}, "too many"},
		{perm, settings{"root": "true", apparmorSysctl: "1"}, "CAP_SYS_ADMIN"},
		{perm, settings{maxUserSysctl: "100"}, "seccomp"},
		{&os.PathError{Err: syscall.EINVAL}, settings{}, "CONFIG_USER_NS"},
		{fmt.Errorf("veth pair: %w", syscall.EOPNOTSUPP), settings{"root": "true"}, "CONFIG_VETH"},
		{syscall.EIO, settings{}, "input/output error"},
	} {
		got := explain(c.err, c.s)
		if got == nil || !strings.Contains(got.Error(), c.want) {
			t.Errorf("%v with %v: %v, want %q in it", c.err, c.s, got, c.want)
		}
	}
	if explain(nil, settings{}) != nil {
		t.Error("no error is explained")
	}
}
