package route

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// SourceChecks gives the interfaces whose sysctl
// net.ipv4.conf.NAME.src_valid_mark is 1, as VPN tools set it; "all" stands for
// all of them. There the kernel looks up a packet's source with the packet's
// mark (F10): in the reply table, where every address is local, so that it
// takes answers from endpoints for forged ones and drops them uncounted, unless
// the rule that leads there asks for more than the mark (State.ReplyPorts). The
// steer table has no endpoint's address.
//
// netNS is a descriptor of the network namespace to look into; 0 is the one
// that it is called in.
func SourceChecks(netNS int) (interfaces []string, err error) {
	err = sys.InNetNS(netNS, func() error {
		files, err := filepath.Glob("/proc/sys/net/ipv4/conf/*/src_valid_mark")
		if err != nil {
			return err
		}
		for _, file := range files {
			value, err := os.ReadFile(file)
			switch {
			case errors.Is(err, os.ErrNotExist), errors.Is(err, os.ErrPermission): // the interface is gone, or not shown
			case err != nil:
				return fmt.Errorf("source checks: %w", err)
			case strings.TrimSpace(string(value)) == "1":
				interfaces = append(interfaces, filepath.Base(filepath.Dir(file)))
			}
		}
		return nil
	})
	return interfaces, err
}

// AllSourcesChecked tells whether SourceChecks would name "all". It reads one
// file, for those who look often.
func AllSourcesChecked(netNS int) (bool, error) {
	var value []byte
	err := sys.InNetNS(netNS, func() (err error) {
		value, err = os.ReadFile("/proc/sys/net/ipv4/conf/all/src_valid_mark")
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
			return nil // a sandbox that does not show it
		}
		return err
	})
	return strings.TrimSpace(string(value)) == "1", err
}
