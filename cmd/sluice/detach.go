package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/rs/zerolog"
)

// readyVariable tells a process that detach has started that its first descriptor beside the
// standard ones is for telling that it serves.
const (
	readyVariable   = "SLUICE_DETACHED"
	readyDescriptor = 3
)

var errNotServing = errors.New("the process in the background has ended before it served; its log says why")

// detach starts this program again with the same arguments, and returns once that process serves.
// It ends it if ctx ends before. The other process is not a child of this one, but of who started
// this one: systemd accepts only its own children as main processes without a warning.
func detach(ctx context.Context) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	serves, tell, err := os.Pipe()
	if err != nil {
		return err
	}
	defer serves.Close()
	process, err := os.StartProcess(program, os.Args, &os.ProcAttr{
		Env:   append(os.Environ(), readyVariable+"=1"),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, tell},
		Sys:   &syscall.SysProcAttr{Cloneflags: syscall.CLONE_PARENT},
	})
	_ = tell.Close()
	if err != nil {
		return fmt.Errorf("start %s: %w", program, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = process.Signal(syscall.SIGTERM) })
	defer stop()
	if n, err := serves.Read(make([]byte, 1)); n == 0 && errors.Is(err, io.EOF) {
		return errNotServing
	} else if err != nil {
		return err
	}
	return nil
}

// detached returns where this process tells detach that it serves, or nil.
func detached() *os.File {
	if os.Getenv(readyVariable) == "" {
		return nil
	}
	_ = os.Unsetenv(readyVariable) // it is not for programs that this one starts, nor is the descriptor
	syscall.CloseOnExec(readyDescriptor)
	return os.NewFile(readyDescriptor, "ready")
}

// notifier tells who started this process what becomes of it, and reports whether a service manager is
// told.
func notifier(log zerolog.Logger, serves *os.File) func(state string) bool {
	return func(state string) bool {
		if state == daemon.SdNotifyReady && serves != nil {
			_, _ = serves.WriteString("\n") // whoever waited may be gone
			_ = serves.Close()
		}
		told, err := daemon.SdNotify(false, state)
		if err != nil {
			log.Warn().Err(err).Str("state", state).Msg("cannot tell the service manager")
		}
		return told
	}
}
