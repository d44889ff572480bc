package flow

import (
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// Rules of other programs for forwarded packets, such as network policies at FORWARD, judge what
// the kernel forwards, and not what the relay serves: its connections are the node's own. While
// there are such rules, the relay must not serve a client that it would then let past them. So it
// asks (Refuses) before it serves a client; whatever made the kernel leave the client to the relay
// does not matter.

// refusalsInterval is the shortest time between two log lines about refused clients.
const refusalsInterval = time.Second

// judges follows such rules. Refuses is safe for concurrent use; only one goroutine may call
// check.
type judges struct {
	find    func() ([]string, error) // Options.Judges; nil: there are none
	log     zerolog.Logger
	trouble once.Trouble
	rules   atomic.Pointer[string] // names of the rules; nil: none
	refused atomic.Uint64
	told    atomic.Uint64 // value of refused at the last log line
	last    atomic.Int64  // time of the last log line
}

// check looks for rules, and reports whether they appeared or went. At the start, rules that
// cannot be read count as present; later a failure to read them changes nothing.
func (j *judges) check(first bool) (changed bool) {
	if j.find == nil {
		return false
	}
	found, err := j.find()
	if err != nil {
		if j.trouble.New(err.Error()) {
			j.log.Warn().Err(err).Msg("kernel flows: rules for forwarded packets are not known")
		}
		if !first {
			return false
		}
		found = []string{"rules that cannot be read"}
	} else {
		j.trouble.Over()
	}
	was, is := j.rules.Load(), strings.Join(found, ", ")
	if is == "" {
		j.rules.Store(nil)
	} else {
		j.rules.Store(&is)
	}
	switch {
	case is != "" && (was == nil || *was != is):
		j.log.Info().Strs("rules", found).Msg("kernel flows: rules judge what the kernel forwards, so that the relay serves this node's own clients alone")
	case is == "" && was != nil:
		j.log.Info().Msg("kernel flows: no rules judge what the kernel forwards any more; the relay serves what it does not forward")
	}
	return (was == nil) != (is == "")
}

// judged reports whether there are rules.
func (j *judges) judged() bool { return j.rules.Load() != nil }

// refuse counts a client that the relay refuses, and logs it at most once per refusalsInterval,
// with the count since then.
func (j *judges) refuse(client, vip netip.AddrPort, port *service.Port) {
	n, now, last := j.refused.Add(1), poll.Nanotime(), j.last.Load()
	if last != 0 && now-last < int64(refusalsInterval) || !j.last.CompareAndSwap(last, now) {
		return
	}
	rules := "none any more"
	if r := j.rules.Load(); r != nil {
		rules = *r
	}
	j.log.Warn().Stringer("client", client).Stringer("vip", vip).Stringer("service", port.Name).
		Uint64("refused", n-j.told.Swap(n)).Str("rules", rules).
		Msg("kernel flows: a client is refused that the kernel did not forward: the relay would let it past these rules; docs/datapath.md lists what is not forwarded")
}

// Refuses reports whether the relay must not serve a client of a Service that it does not serve
// yet: rules of others judge what the kernel forwards, and the kernel could have forwarded this
// client's packets. It counts and logs that. It is safe for concurrent use.
func (s *Server) Refuses(client, vip netip.AddrPort, port *service.Port) bool {
	path := s.paths[port.Name.Protocol]
	if !s.judges.judged() {
		return false
	}
	st, from := path.state.Load(), client.Addr()
	if !st.forwards[service.FamilyOf(from)] || st.host.Has(from) || from.IsLoopback() {
		return false
	}
	s.judges.refuse(client, vip, port)
	if path.protocol == service.UDP && !s.left.Load() { // the kernel may forward the next datagram
		key := bpf.TupleOf(syscall.IPPROTO_UDP, client, vip)
		_ = s.kernel.Maps.Relayed.Delete(&key)
		_ = s.kernel.Maps.Sessions.Delete(&key) // leaveToRelay may have found one that then ended
	}
	return true
}

// boundHandshakes bounds the incomplete handshakes of a service port. Beyond that, a flood meets
// the relay's SYN cookies; or, where the relay refuses, the endpoints', as without a proxy.
func (s *Server) boundHandshakes(judged bool) {
	most := uint32(mostUnconfirmed)
	if judged {
		most = s.kernel.Control.MostFlows
	}
	atomic.StoreUint32(&s.kernel.Control.MostUnconfirmed, most)
}

// Judged names the rules of others that judge what the kernel forwards; "" is none. It is safe for
// concurrent use.
func (s *Server) Judged() string {
	if r := s.judges.rules.Load(); r != nil {
		return *r
	}
	return ""
}
