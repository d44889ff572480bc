package iptables

import (
	"fmt"
	"strings"
)

// direction says which end of a packet an element is compared with.
type direction string

const (
	dst direction = "dst"
	src direction = "src"
)

// The tables in which we have chains, and the built-in chains that lead there.
var tableNames = [...]string{"raw", "mangle", "filter"}

// writer writes the rules of one family.
type writer struct {
	strings.Builder
	v          version
	name       string // of sets
	chains     string // prefix of chains: "SLUICE-"
	want       *contents
	sets       bool
	connmark   bool   // the kernel has marks of connections
	steer      string // mark and mask
	reply      string // likewise
	socket     string // likewise
	replyPorts string // that they come to: "10000:29999"
	nodePorts  string // that answers to sockets on the node's addresses come to
	device     string // by which kernel flows answer clients on the node
	transport  []string
}

func newWriter(v version, name string, opts Options, want *contents, sets bool) *writer {
	w := &writer{
		v: v, name: name, chains: chainPrefix(name), want: want, sets: sets,
		steer:     fmt.Sprintf("%#x/%#x", opts.Routes.SteerMark, opts.Routes.SteerMark),
		transport: []string{"tcp", "udp"}, device: opts.device,
	}
	w.replyPorts = fmt.Sprintf("%d:%d", opts.ReplyPorts[0], opts.ReplyPorts[1])
	w.nodePorts = fmt.Sprintf("%d:%d", opts.nodePorts[0], opts.nodePorts[1])
	w.reply = fmt.Sprintf("%#x/%#x", opts.Routes.ReplyMark, opts.Routes.ReplyMark)
	w.socket = fmt.Sprintf("%#x/%#x", opts.Routes.SocketMark, opts.Routes.SocketMark)
	return w
}

func chainPrefix(name string) string { return strings.ToUpper(name) + "-" }

// setName returns a list's name in the kernel: "sluice-refuse-4".
func setName(name string, l list, v version) string {
	return name + "-" + string(l) + "-" + families[v].digit
}

// rule adds a rule. Words with a % in front are chains of ours.
func (w *writer) rule(chain string, words ...string) {
	line := "-A %" + chain + " " + strings.Join(words, " ")
	w.WriteString(strings.ReplaceAll(line, "%", w.chains) + "\n")
}

// each adds a rule for what is in a list: one with ipset, else one for each of
// its elements. Where there is no such list there is none: a packet need not
// pass it.
func (w *writer) each(chain string, l list, d direction, words ...string) {
	if w.sets {
		w.inSet(chain, "", l, d, words...)
		return
	}
	for _, e := range w.want.lists[w.v][l].sorted() {
		w.rule(chain, append([]string{e.match(d)}, words...)...)
	}
}

// eachOf is each for destinations of one protocol, or for any addresses: "tcp", or
// "tcp --syn", which is asked first.
func (w *writer) eachOf(chain string, l list, packets string, words ...string) {
	if w.sets {
		w.inSet(chain, "-p "+packets, l, dst, words...)
		return
	}
	protocol, flags, _ := strings.Cut(packets, " ")
	for _, e := range w.want.lists[w.v][l].sorted() {
		if e.port == 0 {
			w.rule(chain, append([]string{"-p " + packets, e.match(dst)}, words...)...)
		} else if protocolName(e.protocol) == protocol {
			w.rule(chain, append([]string{e.match(dst), flags}, words...)...)
		}
	}
}

// inSet adds a rule for what is in the set of a list.
func (w *writer) inSet(chain, first string, l list, d direction, words ...string) {
	if !w.want.has(w.v, l) {
		return
	}
	dims := string(d)
	if l != listLocal && l != listCluster && l != listNode {
		dims += "," + dims
	}
	w.rule(chain, append([]string{first, "-m set --match-set", setName(w.name, l, w.v), dims}, words...)...)
}

// foreign reports whether there are rules for addresses that are not ours.
func (w *writer) foreign() bool { return w.want.has(w.v, listForeign) }

const (
	// isTransparent matches packets of sockets that are set to IP_TRANSPARENT,
	// but for wildcard sockets, which are not ours: established connections,
	// and packets that TPROXY gave to a listener.
	isTransparent = "-m socket --transparent"
	isUnderWay    = "-p tcp ! --syn"
	// isData matches packets that end what an application has sent.
	isData = "-p tcp --tcp-flags SYN,PSH PSH"
)

// chainsOf gives our chains of a table and for each the built-in chain that
// leads there, if any.
var chainsOf = map[string][][2]string{
	"raw":    {{"PREROUTING", "PREROUTING"}, {"OUTPUT", "OUTPUT"}, {"NOTRACK", ""}, {"REPLY", ""}},
	"mangle": {{"PREROUTING", "PREROUTING"}, {"OUTPUT", "OUTPUT"}, {"LOCAL", ""}, {"FOREIGN", ""}, {"MARK", ""}, {"LANES", ""}},
	"filter": {{"INPUT", "INPUT"}, {"FORWARD", "FORWARD"}, {"OUTPUT", "OUTPUT"}, {"REST", ""}, {"REFUSE", ""}, {"SILENCE", ""}},
}

// ruleset is the rules of our chains, a text for each of tableNames.
type ruleset [len(tableNames)]string

// rules returns all rules, a line for each.
func (w *writer) rules() (all ruleset) {
	for i, write := range [len(tableNames)]func(){w.raw, w.mangle, w.filter} {
		w.Reset()
		write()
		all[i] = w.String()
	}
	return all
}

// raw keeps what we carry out of connection tracking, and marks answers to
// clients' addresses that our sockets are bound to (F7).
//
// On the way out, xt_socket cannot be asked. Packets that leave from an address
// that is not this node's, with a port for such sockets, are theirs; sockets on
// an address of this node have a mark. Answers to these are delivered anyway.
func (w *writer) raw() {
	if w.want.replies {
		w.rule("PREROUTING", isUnderWay, "--dport", w.replyPorts, isTransparent, "-g %REPLY")
	}
	if w.want.untracked {
		w.eachOf("PREROUTING", listNode, "tcp ! --syn --dport "+w.nodePorts, isTransparent, "-g %NOTRACK")
	}
	w.each("PREROUTING", listLocal, dst, "-g %NOTRACK")
	w.each("PREROUTING", listOwn, dst, "-g %NOTRACK")
	w.each("PREROUTING", listForeign, dst, "-g %NOTRACK")
	w.each("PREROUTING", listLinger, dst, isTransparent, "-g %NOTRACK")
	w.rule("PREROUTING", "-i", w.device, "-g %NOTRACK") // answers to clients on the node, whose own packets are not tracked
	if w.want.untracked {
		w.eachOf("PREROUTING", listNode, "udp --dport "+w.nodePorts, isTransparent, "-g %NOTRACK")
	}
	if w.want.replies {
		// Not before the services' addresses: a socket that answers from one of
		// them is transparent, and would be taken for the receiver.
		w.rule("PREROUTING", "-p udp --dport", w.replyPorts, isTransparent, "-g %REPLY")
		if !w.want.kept {
			w.rule("REPLY", "-j CT --notrack")
		}
		w.rule("REPLY", "-j MARK --set-xmark", w.reply)
	}
	w.each("OUTPUT", listLocal, src, "-g %NOTRACK")
	w.each("OUTPUT", listLocal, dst, "-o lo -g %NOTRACK")
	for _, l := range []list{listOwn, listForeign, listLinger} {
		w.each("OUTPUT", l, src, "-g %NOTRACK")
	}
	w.each("OUTPUT", listOwn, dst, "-o lo -g %NOTRACK")
	for _, l := range []list{listForeign, listLinger} {
		w.each("OUTPUT", l, dst, "-g %NOTRACK")
	}
	if w.want.untracked {
		w.rule("OUTPUT", "-m mark --mark", w.socket, "-g %NOTRACK")
	}
	if w.want.replies && !w.want.kept {
		w.fromClients("-g %NOTRACK")
	}
	w.rule("NOTRACK", "-j CT --notrack")
}

// fromClients adds rules for what sockets on clients' addresses send.
func (w *writer) fromClients(target string) {
	for _, p := range w.transport {
		w.rule("OUTPUT", "-p", p, "--sport", w.replyPorts, "-m addrtype ! --src-type LOCAL", target)
	}
}

// translated marks answers to clients' addresses where connections are kept in connection
// tracking. Another program may translate them, and iptables has no table in which that
// is undone and routing still to come: the connection itself is marked.
func (w *writer) translated() {
	if !w.want.replies || !w.want.kept || !w.connmark {
		return
	}
	w.fromClients("-j CONNMARK --set-xmark " + w.reply)
	w.rule("PREROUTING", "-m connmark --mark", w.reply, "-j MARK --set-xmark", w.reply)
}

// mangle hands packets to listeners. Data for an established connection needs
// nothing of it: the kernel finds the socket by itself, and its route with it,
// and where there is none the filter's INPUT turns the packet away. What may open
// a connection passes on: a SYN, and an ACK alone, which may answer a SYN cookie.
// It meets a look-up for each listener, unless it is of an established connection.
// One that opens a connection must not be taken for one of an established
// socket, which may be waiting for its end: TPROXY knows what to do then.
//
// What is sent to addresses that are not ours is marked, so that routing
// delivers it here; this node's own packets to them are marked on their way
// out and come back by lo. On its way out, a packet to a destination that is no
// longer served cannot be told to belong to an established connection: all are
// marked, and this node's new connections there are refused until the last of
// the old ones has ended.
func (w *writer) mangle() {
	w.translated()
	w.data()
	w.each("PREROUTING", listLocal, dst, "-g %LOCAL")
	w.each("PREROUTING", listForeign, dst, "-g %FOREIGN")
	w.each("PREROUTING", listLinger, dst, isTransparent, "-g %MARK")
	if w.foreign() {
		// A refused datagram is not marked: the answer comes from the filter's
		// OUTPUT.
		w.eachOf("OUTPUT", listRefuse, "udp", "-j RETURN")
		w.rule("OUTPUT", "-m mark --mark", w.socket, "-j RETURN") // to an endpoint with such an address
	}
	w.each("OUTPUT", listForeign, dst, "-g %MARK")
	w.each("OUTPUT", listLinger, dst, "-g %MARK")

	w.rule("LOCAL", isUnderWay, isTransparent, "-j RETURN")
	w.rule("LOCAL", "-g %LANES")

	if w.foreign() {
		w.rule("FOREIGN", isUnderWay, isTransparent, "-g %MARK")
		w.eachOf("FOREIGN", listRefuse, "tcp", "-g %MARK")
		w.each("FOREIGN", listRefuse, dst, "-j RETURN")
		w.each("FOREIGN", listSilent, dst, "-j DROP")
		w.rule("FOREIGN", "-j MARK --set-xmark", w.steer)
		w.rule("FOREIGN", "-g %LANES")
	}
	w.rule("MARK", "-j MARK --set-xmark", w.steer)
	for _, l := range w.want.listeners(w.v) {
		w.eachOf("LANES", l.list(), protocolName(l.protocol), "-j TPROXY",
			"--on-ip", families[w.v].listen.String(), "--on-port", fmt.Sprint(l.port))
	}
}

// data lets data pass that is not for an address of somebody else's, ours and
// that of the rest of the node: those are marked, whatever is sent to them.
func (w *writer) data() {
	words := []string{isData}
	for _, l := range []list{listForeign, listLinger} {
		if !w.want.has(w.v, l) {
			continue
		}
		if !w.sets {
			return // one rule cannot say that an address is none of many
		}
		words = append(words, "-m set ! --match-set", setName(w.name, l, w.v), "dst,dst")
	}
	w.rule("PREROUTING", append(words, "-j RETURN")...)
}

// filter refuses or drops what is for services' addresses and that nobody took:
// the host's own wildcard servers stay unreachable there (F4, A3.12).
// Established connections go on whatever the lists say (A8.1, A8.7): they are
// asked for first, as the kernel has found their sockets by now.
//
// Datagrams to a refused destination that is not on an address of ours are on
// their way through or out: an ICMP answer can only be sent from an address
// that the kernel takes for its own.
func (w *writer) filter() {
	w.rule("INPUT", isUnderWay, isTransparent, "-j RETURN")
	w.each("INPUT", listLocal, dst, "-g %REST")
	w.each("INPUT", listForeign, dst, "-g %REST")
	w.each("INPUT", listLinger, dst, isTransparent, "-j RETURN")
	w.each("INPUT", listLinger, dst, "-g %REFUSE") // the node's own; see mangle
	if w.foreign() {
		w.eachOf("FORWARD", listRefuse, "udp", "-g %REFUSE")
		w.eachOf("OUTPUT", listRefuse, "udp", "-g %REFUSE")
	}
	w.rule("REST", "-p sctp -j RETURN") // the kernel finds its socket, or aborts
	// One that opens a connection is turned away even if a socket of an earlier
	// connection between the same ports is waiting for its end.
	w.eachOf("REST", listRefuse, "tcp --syn", "-g %REFUSE")
	w.eachOf("REST", listSilent, "tcp --syn", "-g %SILENCE")
	// A socket that answers over UDP from the address takes nothing there.
	w.eachOf("REST", listRefuse, "udp", "-g %REFUSE")
	w.eachOf("REST", listSilent, "udp", "-g %SILENCE")
	w.rule("REST", isTransparent, "-j RETURN")
	w.each("REST", listRefuse, dst, "-g %REFUSE")
	w.each("REST", listSilent, dst, "-g %SILENCE")
	w.each("REST", listCluster, dst, "-g %REFUSE")
	w.rule("REST", "-g %SILENCE")
	w.rule("REFUSE", "-p tcp -j REJECT --reject-with tcp-reset")
	for _, p := range w.transport[1:] {
		w.rule("REFUSE", "-p", p, "-j REJECT")
	}
	for _, p := range w.transport {
		w.rule("SILENCE", "-p", p, "-j DROP")
	}
}
