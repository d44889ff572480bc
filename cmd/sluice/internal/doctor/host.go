package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/redirect/kubeproxy"
	"github.com/sluice-proxy/sluice/redirect/route"
)

// host asks the machine, in the network namespace that the process is in.
type host struct {
	options            choose.Options
	namespace, answers error // of Scratch
}

// Host returns a Prober of the machine, for a proxy with these options, whatever
// mode they name.
func Host(o choose.Options) Prober {
	h := &host{options: o}
	h.namespace, h.answers = choose.Scratch()
	return h
}

func (h *host) Ways() []string       { return choose.Names() }
func (h *host) Try(way string) error { return choose.Try(way, h.options) }

func (h *host) Scratch() (namespace, answers error) { return h.namespace, h.answers }

func (h *host) Capabilities() (uint64, error) {
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return 0, err
	}
	return parseCapabilities(string(status))
}

func parseCapabilities(status string) (uint64, error) {
	for line := range strings.Lines(status) {
		if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
			return strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		}
	}
	return 0, errors.New("no CapEff in /proc/thread-self/status")
}

func (h *host) BPFFS() error { return bpffs.Check(h.options.BPFRoot) }

func (h *host) Transparent() error { return choose.MayListen(0) }
func (h *host) IPv6() error        { return choose.TryIPv6() }
func (h *host) SCTP() error        { return sys.TrySCTP() }
func (h *host) Flows() error       { return flow.Try() }

func (h *host) Unforwarded() (list []string, err error) {
	u, err := flow.ReadForwarding()
	for _, why := range u {
		if why != nil {
			list = append(list, why.Error())
		}
	}
	return list, err
}

func (h *host) NodeRules() (string, error) {
	nft, err := kernel.OpenNFTables(0)
	if firewall.NoTables(err) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer nft.Close()
	found, err := firewall.ReadOnNode(nft, h.options.Table)
	return found.Judges, err
}

func (h *host) Sysctl(path string) (string, error) {
	value, err := os.ReadFile(filepath.Join("/proc/sys", path))
	return strings.TrimSpace(string(value)), err
}

func (h *host) SourceChecks() ([]string, error)       { return route.SourceChecks(0) }
func (h *host) Files() (uint64, uint64, error)        { return sys.FileLimit() }
func (h *host) LockedMemory() (uint64, uint64, error) { return sys.LockedMemoryLimit() }
func (h *host) Leftovers() ([]string, error)          { return kubeproxy.Leftovers() }
func (h *host) ForwardPolicies() ([]string, error)    { return firewall.ForwardPolicies(0) }

func (h *host) PolicyEngines() ([]firewall.Engine, error) { return firewall.Engines() }

func (h *host) StateRule() (string, error) { return firewall.StateRule(0, h.options.Table) }

func (h *host) SourceCheck() (string, error) { return firewall.SourceCheck(h.options.Table) }

func (h *host) Marks() error {
	options := h.options.Routes
	options.SocketMark = h.options.SocketMark
	r, err := route.Open(options)
	if err != nil {
		return err
	}
	defer r.Close()
	return errors.Join(r.Check(route.State{MarkSteers: true, MarkReplies: true, ReplyPorts: redirect.ReplyPorts}), r.CheckSockets())
}

func (h *host) Running() (pid int, ok bool, err error) {
	lock, err := redirect.AcquireLock(h.options.Table)
	var locked *redirect.LockedError
	switch {
	case errors.As(err, &locked):
		return locked.PID, true, nil
	case err != nil:
		return 0, false, err
	}
	if err := lock.Release(); err != nil {
		return 0, false, fmt.Errorf("release the lock: %w", err)
	}
	return 0, false, nil
}
