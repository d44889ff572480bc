// Run runs a static program under User Mode Linux and ends with its exit
// status; see package vm.
//
//	CGO_ENABLED=0 go build -o /tmp/vm ./test/vm/run
//	/tmp/vm -modules veth,ipv6 bin/sluice doctor
//	CGO_ENABLED=0 go test -exec '/tmp/vm -modules veth,ipv6' ./redirect/...
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/test/vm"
)

func main() {
	if vm.IsGuest() {
		vm.Guest()
	}
	// The reader of the program's output may go away: the guest must still end.
	signal.Ignore(syscall.SIGPIPE)
	status, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		status = 125
	}
	os.Exit(status)
}

func run() (status int, err error) {
	modules := flag.String("modules", "", "modules to load, with commas between; none can be loaded later")
	writable := flag.String("writable", "", "host folders that the program may write to, with commas between")
	env := flag.String("env", "", "names of variables that the program gets, with commas between")
	memory := flag.String("memory", "1G", "the guest's memory")
	timeout := flag.Duration("timeout", 5*time.Minute, "when the guest is ended")
	flag.Parse()
	if flag.NArg() == 0 {
		return 0, fmt.Errorf("usage: %s [flags] PROGRAM [ARGUMENT...]", filepath.Base(os.Args[0]))
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	command := flag.Args()
	if command[0], err = filepath.Abs(command[0]); err != nil {
		return 0, err
	}
	c := vm.Config{Init: self, Command: command, Modules: words(*modules), Writable: words(*writable), Memory: *memory, Output: os.Stdout}
	for _, name := range words(*env) {
		c.Env = append(c.Env, name+"="+os.Getenv(name))
	}
	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	return vm.Run(ctx, c)
}

func words(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' })
}
