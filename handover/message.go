package handover

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
)

// Step says what a message is.
type Step string

// The steps, in their order.
const (
	StepProof   Step = "proof" // with a descriptor that shows that its process may steer
	StepHello   Step = "hello"
	StepWelcome Step = "welcome"
	StepRefuse  Step = "refuse"  // Why says why not
	StepStop    Step = "stop"    // the next process asks the running one to end in an orderly way
	StepKept    Step = "kept"    // the next one asks for good content of manifests, if Running.Keeps; states and over answer
	StepAsk     Step = "ask"     // it has its configuration
	StepSockets Step = "sockets" // with a descriptor for each of Sockets
	StepTaken   Step = "taken"   // Taken descriptors have arrived
	StepClients Step = "clients" // some of the addresses that sockets of open connections have
	StepState   Step = "state"   // State, before over, leaving or left, and until the end
	StepOver    Step = "over"    // that was all
	StepServing Step = "serving" // new connections reach the next process
	StepLeaving Step = "leaving" // the running one stops accepting; this cannot be undone
	StepLeft    Step = "left"    // the running one has closed its listening sockets
	StepMoved   Step = "moved"   // with the descriptors of each of Moved; they are taken, but for Kept
	StepYours   Step = "yours"   // what was taken is the next process's
	StepMine    Step = "mine"    // what was taken stays with the running one after all
)

// Message is one packet. The fields beside Step belong to some steps only.
type Message struct {
	Step Step `json:"step"`

	Running *Running     `json:"running,omitempty"` // of the running process's proof
	Hello   *Hello       `json:"hello,omitempty"`
	Why     string       `json:"why,omitempty"`
	Switch  bool         `json:"switch,omitempty"` // of a refusal: StepStop would be followed
	Wanted  *Wanted      `json:"wanted,omitempty"` // of kept
	Sockets []Socket     `json:"sockets,omitempty"`
	Taken   int          `json:"taken,omitempty"`
	Clients []netip.Addr `json:"clients,omitempty"`
	State   *State       `json:"state,omitempty"`
	Moved   []Moved      `json:"moved,omitempty"`
	Kept    []int        `json:"kept,omitempty"` // numbers of those of Moved that stay
}

// Running says what the running process does, before the next one says hello.
type Running struct {
	Mode  string `json:"mode"`  // which the next one may take without a trial; "" if it is to choose
	Flows bool   `json:"flows"` // it has kernel flows, or is about to
	Keeps bool   `json:"keeps"` // it answers StepKept
}

// Wanted names manifests that the next process cannot use. Directories have a slash at the end.
type Wanted struct {
	Dir   string   `json:"dir"`
	Files []string `json:"files"`
}

// Hello describes the next process, and what it can take over.
type Hello struct {
	Version int    `json:"version"`           // of its messages
	Least   int    `json:"least"`             // the oldest version that it understands
	Program string `json:"program"`           // its version, for the log
	Mode    string `json:"mode"`              // how it steers
	Numbers string `json:"numbers,omitempty"` // of its steering, which sockets and packets of open connections have; "": unknown
	Proxy   string `json:"proxy"`             // --service-proxy-name: whose Services it serves
	Relays  bool   `json:"relays"`            // it has no kernel flows
	Moves   bool   `json:"moves"`             // it takes over open connections
}

// Fits returns why the messages of two processes do not fit, or nil.
func (h *Hello) Fits() error {
	if h.Version < Least || h.Least > Version {
		return fmt.Errorf("sluice %s speaks versions %d to %d of the take-over, this one (%d to %d)", h.Program, h.Least, h.Version, Least, Version)
	}
	return nil
}

// State is something that the running process knows, and the next one may use. A process passes
// over kinds that it does not know.
type State struct {
	Kind string          `json:"kind"`
	Data json.RawMessage `json:"data"`
}

// Socket is one listening socket.
type Socket struct {
	Name  string `json:"name"`            // what it listens for; several may have one name
	State string `json:"state,omitempty"` // what it does, if there are several possibilities
	FD    int    `json:"-"`               // of this process
}

// maxMessage bounds a packet, in bytes.
const maxMessage = 128 << 10

var errNoStep = errors.New("a message without a step")

// parse reads a packet.
func parse(p []byte) (*Message, error) {
	m := new(Message)
	if err := json.Unmarshal(p, m); err != nil {
		return nil, fmt.Errorf("message: %w", err)
	}
	if m.Step == "" {
		return nil, errNoStep
	}
	if m.Step == StepHello && m.Hello == nil || m.Step == StepState && m.State == nil || m.Step == StepKept && m.Wanted == nil {
		return nil, fmt.Errorf("a %s that says nothing", m.Step)
	}
	return m, nil
}
