// Command bench measures Sluice and other paths from a client to a Kubernetes
// service: the plain route, kernel DNAT, HAProxy, nginx and a plain Go proxy. All
// run in the program's own network namespaces, which disappear with it, in one
// run, taking turns.
//
//	make build && go run ./test/bench
//
// docs/benchmarks.md describes what is measured and how to read it. The program
// needs root. test/bench/install-deps.sh installs the other programs.
//
// The program starts itself again as the load's client, its server, and the plain
// Go proxy; the first argument then names the role.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/peer"
	"github.com/sluice-proxy/sluice/test/vm"
)

// The roles of a child process, as its first argument. Each reads its input from
// standard input.
const (
	loadRole    = "@load"    // load.Spec; writes a load.Result
	serveRole   = "@serve"   // load.ServerSpec
	holdRole    = "@hold"    // load.HoldCommand after the target in the second argument
	patternRole = "@pattern" // patternOrder; writes a patternResult
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if vm.IsGuest() {
		vm.Guest()
	}
	if len(args) > 0 && args[0] != "" && args[0][0] == '@' {
		return play(args)
	}
	opts, err := parseFlags(args)
	if err != nil || opts == nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("root is needed to make network namespaces (sudo go run ./test/bench)")
	}
	b, err := newBench(*opts)
	if err != nil {
		return err
	}
	defer b.close()

	// Children and namespaces die with this process; only files must be removed.
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-stop
		b.close()
		os.Exit(130)
	}()
	return opts.mode(b)
}

// play runs a child process's role.
func play(args []string) error {
	orders := json.NewDecoder(os.Stdin)
	switch role := args[0]; role {
	case loadRole:
		return answer(orders, load.Run)
	case patternRole:
		return answer(orders, runPatterns)
	case serveRole:
		var spec load.ServerSpec
		if err := orders.Decode(&spec); err != nil {
			return err
		}
		return load.Serve(spec)
	case peer.GoProxyRole:
		var spec peer.GoProxySpec
		if err := orders.Decode(&spec); err != nil {
			return err
		}
		return peer.RunGoProxy(spec)
	case peer.LeastRelayRole:
		var spec peer.LeastRelaySpec
		if err := orders.Decode(&spec); err != nil {
			return err
		}
		return peer.RunLeastRelay(spec)
	case holdRole:
		target, err := netip.ParseAddr(args[1])
		if err != nil {
			return err
		}
		return load.Hold(target, os.Stdin, os.Stdout)
	default:
		return fmt.Errorf("no role %s", role)
	}
}

// answer reads one order, executes it and writes the result.
func answer[Order, Result any](orders *json.Decoder, do func(Order) (Result, error)) error {
	var order Order
	if err := orders.Decode(&order); err != nil {
		return err
	}
	result, err := do(order)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}
