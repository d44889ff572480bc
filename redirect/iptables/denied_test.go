package iptables

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestDenied: what a user without rights sees is not taken for a missing module.
func TestDenied(t *testing.T) {
	for _, test := range []struct {
		err  error
		want bool
	}{
		{fmt.Errorf("iptables-save: %w", fmt.Errorf("enter the network namespace: %w", syscall.EPERM)), true},
		{&programError{name: "iptables-restore", text: "Permission denied (you must be root)", err: errors.New("exit status 4")}, true},
		{&programError{name: "iptables-restore", text: "can't initialize iptables table", err: errors.New("exit status 3")}, false},
		{fmt.Errorf("iptables-save: %w", os.ErrNotExist), false},
	} {
		check.Equalf(t, denied(test.err), test.want, "%v", test.err)
	}
}
