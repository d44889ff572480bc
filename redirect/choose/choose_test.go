package choose

import (
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// fake is a Redirector that does nothing.
type fake struct {
	redirect.Redirector
	replies redirect.Replies
}

func (fake) Close() error              { return nil }
func (fake) Leave()                    {}
func (f fake) Traits() redirect.Traits { return redirect.Traits{Replies: f.replies} }

// The best of what works is chosen, and what was passed over is named with the
// reason.
func TestBestThatWorksIsChosen(t *testing.T) {
	missing := &redirect.MissingError{Mode: "steering by nftables", Feature: "nf_tables", Remedy: "load it", Err: syscall.EOPNOTSUPP}
	noIPTables := &redirect.MissingError{Mode: "steering by iptables", Feature: "ip_tables", Remedy: "load it", Err: syscall.EPROTONOSUPPORT}
	lost := &RepliesError{errors.New("lost")}
	noBPF := &redirect.MissingError{Mode: "steering by sk_lookup", Feature: "CAP_BPF", Remedy: "grant it", Err: syscall.EPERM}
	for _, c := range []struct {
		name, mode, backend string
		fails               map[string]error
		want                string
	}{
		{"all work", "", "", nil, "steering by sklookup/nftables"},
		{"no BPF", Auto, Auto, map[string]error{"sklookup/nftables": noBPF, "sklookup": noBPF}, "steering by tproxy/nftables; not sklookup/nftables (CAP_BPF is missing)"},
		{"no nf_tables", Auto, Auto, map[string]error{"sklookup/nftables": missing, "tproxy/nftables": missing}, "steering by tproxy/iptables; not sklookup/nftables (nf_tables is missing), not tproxy/nftables (nf_tables is missing)"},
		{"no netfilter", Auto, Auto, map[string]error{"sklookup/nftables": missing, "tproxy/nftables": missing, "tproxy/iptables": noIPTables},
			"steering by sklookup; not sklookup/nftables (nf_tables is missing), not tproxy/nftables (nf_tables is missing), not tproxy/iptables (ip_tables is missing)"},
		{"no netfilter, no BPF", Auto, Auto, map[string]error{"sklookup/nftables": missing, "tproxy/nftables": missing, "tproxy/iptables": noIPTables, "sklookup": noBPF},
			"steering by bind; not sklookup/nftables (nf_tables is missing), not tproxy/nftables (nf_tables is missing), not tproxy/iptables (ip_tables is missing), not sklookup (CAP_BPF is missing)"},
		{"the best brings no answers back", Auto, "", map[string]error{"sklookup/nftables": lost}, "steering by tproxy/nftables; not sklookup/nftables (no answers come back to clients' addresses: lost)"},
		{"those with marks bring no answers back", Auto, "", map[string]error{"sklookup/nftables": lost, "tproxy/nftables": lost, "tproxy/iptables": noIPTables},
			"steering by sklookup; not sklookup/nftables (no answers come back to clients' addresses: lost), not tproxy/nftables (no answers come back to clients' addresses: lost), not tproxy/iptables (ip_tables is missing)"},
		{"those that work bring no answers back", Auto, "", map[string]error{"sklookup/nftables": noBPF, "tproxy/nftables": lost, "tproxy/iptables": noIPTables, "sklookup": noBPF, "bind": lost},
			"steering by tproxy/nftables with the node's address (no answers come back to clients' addresses: lost); not sklookup/nftables (CAP_BPF is missing), not tproxy/iptables (ip_tables is missing), not sklookup (CAP_BPF is missing), not bind (no answers come back to clients' addresses: lost)"},
		{"asked for", Bind, "", map[string]error{"bind": errors.New("never asked")}, "steering by bind, as asked for"},
		{"nothing works", Auto, "", map[string]error{"sklookup/nftables": missing, "tproxy/nftables": missing, "tproxy/iptables": noIPTables, "sklookup": noBPF, "bind": syscall.EPERM}, "no mode works here"},
		{"no such mode", "telepathy", "", nil, `no mode is called "telepathy"`},
		{"no such backend", TProxy, "telepathy", nil, `with the backend "telepathy"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var from []candidate
			for _, w := range all {
				w.open = func(o Options) (redirect.Redirector, error) {
					return fake{replies: redirect.Replies{Diverted: !o.NoReplies}}, nil
				}
				from = append(from, w)
			}
			var got string
			choice, err := open(Options{Mode: c.mode, Backend: c.backend}, from, func(w candidate, _ Options) error { return c.fails[w.name] })
			if err != nil {
				got = err.Error()
			} else {
				got = choice.String()
				if diverted := choice.Redirector.Traits().Replies.Diverted; diverted != (choice.NoReplies == nil) {
					t.Errorf("answers are brought back: %v, though %v", diverted, choice.NoReplies)
				}
			}
			if err == nil && got != c.want || !strings.Contains(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// The mode of a running process is taken whatever a trial says, if the options leave it and it can
// be opened.
func TestModeOfTheRunningProcessIsTaken(t *testing.T) {
	for _, c := range []struct{ mode, running, want string }{
		{Auto, "tproxy/iptables", "steering by tproxy/iptables, as the running sluice does"},
		{TProxy, "tproxy/iptables", "steering by tproxy/iptables, as the running sluice does"},
		{TProxy, "sklookup/nftables", "steering by tproxy/nftables"},
		{Auto, "bind", "steering by sklookup/nftables"},
		{Auto, "telepathy", "steering by sklookup/nftables"},
		{Auto, "", "steering by sklookup/nftables"},
	} {
		var from []candidate
		for _, w := range all {
			w.open = func(Options) (redirect.Redirector, error) {
				if w.name == "bind" {
					return nil, syscall.EPERM
				}
				return fake{replies: redirect.Replies{Diverted: true}}, nil
			}
			from = append(from, w)
		}
		choice, err := open(Options{Mode: c.mode, Running: c.running}, from, func(w candidate, _ Options) error {
			if w.name == c.running {
				return errors.New("the trial fails")
			}
			return nil
		})
		if err != nil || choice.String() != c.want {
			t.Errorf("%s beside %s: %v, %v, want %s", c.mode, c.running, choice, err, c.want)
		}
	}
}

// A mode that brings no answers back in the node's own namespace,
// whatever it did in a trial, is passed over too; asked to leave clients'
// addresses alone, it does not matter.
func TestWhoBringsNoAnswersBackIsPassedOver(t *testing.T) {
	var from []candidate
	for _, w := range all {
		replies := redirect.Replies{Diverted: w.mode == SkLookup, Why: "the mark is in use"}
		w.open = func(Options) (redirect.Redirector, error) { return fake{replies: replies}, nil }
		from = append(from, w)
	}
	works := func(candidate, Options) error { return nil }
	for _, c := range []struct {
		noReplies bool
		want      string
	}{{false, "sklookup"}, {true, "sklookup/nftables"}} {
		choice, err := open(Options{NoReplies: c.noReplies}, from, works)
		if err != nil || choice.Name != c.want {
			t.Errorf("%v, %v, want %s", choice, err, c.want)
		}
	}
}

// Every mode that this kernel should have works in a trial, and a
// trial leaves the namespace alone that steering is for.
func TestTrials(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	before := lab.Node.Dump(t)
	o := Options{Routes: route.Options{NetNS: lab.Node.FD()}, ReplyPorts: [2]uint16{61000, 65534}}
	for _, w := range all {
		begin := time.Now()
		var missing *redirect.MissingError
		switch err := try(w, o); {
		case errors.As(err, &missing):
			t.Errorf("SKIP-NEEDS: %s: %v", w.name, err)
		case err != nil:
			t.Errorf("%s: %v", w.name, err)
		}
		t.Logf("%s took %v", w.name, time.Since(begin))
		check.OKf(t, look(w, o), "%s, in place", w.name)
	}
	check.Textf(t, lab.Node.Dump(t), before, "left behind")
	choice := must.Get(Open(o))(t)
	t.Logf("%s, in %v", choice, choice.Took)
	check.OK(t, choice.Redirector.Close())
}

// What the kernel lacks for a trial is told from what the mode
// lacks: a plan that leads nowhere is found out.
func TestTrialFindsOutWhatDoesNotSteer(t *testing.T) {
	netns.Require(t)
	broken := candidate{name: "broken", open: func(Options) (redirect.Redirector, error) { return idle{}, nil }}
	check.Error(t, try(broken, Options{}), "a connection to TCP ")
}

// A mode that leaves out what brings answers back is told from one
// that does not steer.
func TestTrialFindsOutWhoBringsNoAnswersBack(t *testing.T) {
	netns.Require(t)
	for _, w := range all {
		want := map[string]string{"tproxy/nftables": "were lost", "bind": "are not brought back"}[w.name] // by mark, by port
		if want == "" {
			continue
		}
		deaf := candidate{name: w.name, open: func(o Options) (redirect.Redirector, error) {
			r, err := w.open(o)
			if err != nil {
				return nil, err
			}
			replies := r.Traits().Replies
			if err := r.Close(); err != nil {
				return nil, err
			}
			o.NoReplies = true
			r, err = w.open(o)
			return boaster{r, replies}, err
		}}
		var lost *RepliesError
		if err := try(deaf, Options{}); !errors.As(err, &lost) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", w.name, err)
		}
		check.OKf(t, try(deaf, Options{NoReplies: true}), "%s, not asked for them", w.name)
	}
}

// A mode that takes the answers to other nodes' clients works on one
// node alone: it is not chosen.
func TestTrialFindsOutWhoTakesOtherNodesAnswers(t *testing.T) {
	netns.Require(t)
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		for _, w := range all {
			if w.name != "bind" && w.name != "sklookup" {
				continue
			}
			hog := candidate{name: w.name, open: func(o Options) (redirect.Redirector, error) {
				r, err := w.open(o)
				return greedy{r, o.Routes.NetNS, family}, err
			}}
			var lost *RepliesError
			if err := try(hog, Options{}); !errors.As(err, &lost) || !strings.Contains(err.Error(), "a client of another node") {
				t.Errorf("%s, family %d: got %v", w.name, family, err)
			}
		}
	}
}

// greedy has one more rule, for all packets to the ports of answers.
type greedy struct {
	redirect.Redirector
	namespace, family int
}

func (g greedy) Apply(p redirect.Plan) error {
	if err := g.Redirector.Apply(p); err != nil {
		return err
	}
	nl, err := netlink.NewHandleAt(vnetns.NsHandle(g.namespace), syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer nl.Close()
	const table = 9999
	everything := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if g.family == netlink.FAMILY_V6 {
		everything = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	replies := g.Traits().Replies
	rule := netlink.NewRule()
	rule.Family, rule.Table, rule.Priority, rule.IPProto = g.family, table, 1000, syscall.IPPROTO_TCP
	rule.Dport = netlink.NewRulePortRange(replies.FirstPort, replies.LastPort)
	return errors.Join(nl.RuleAdd(rule),
		nl.RouteAdd(&netlink.Route{Table: table, Type: syscall.RTN_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: 1, Dst: everything}))
}

// boaster claims that it brings answers back.
type boaster struct {
	redirect.Redirector
	replies redirect.Replies
}

func (b boaster) Traits() redirect.Traits {
	t := b.Redirector.Traits()
	t.Replies = b.replies
	return t
}

// idle accepts every plan and does nothing for it.
type idle struct{ fake }

func (idle) Traits() redirect.Traits   { return redirect.Traits{} }
func (idle) Apply(redirect.Plan) error { return nil }
