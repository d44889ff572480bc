package route

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// SourceChecks returns the interfaces whose sysctl
// net.ipv4.conf.NAME.src_valid_mark is 1, as VPN tools set it; "all" stands for
// all of them. There the kernel looks up a packet's source with the packet's
// mark and with its ports the other way round (F10). It takes for forged, and drops
// uncounted, what the rules of answers would match that way (see Router.replyRules):
// answers of endpoints whose own port is one of State.ReplyPorts, and ICMP errors. The
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
