package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/pods"
)

// newDialStdioCommand returns what kubectl sluice runs in a pod.
func newDialStdioCommand() *cobra.Command {
	o := &asker{}
	cmd := &cobra.Command{
		Use:    pods.Command,
		Short:  "Copy between standard input and output and the admin socket",
		Hidden: true,
		Args:   noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, c, err := o.find(cmd)
			if err != nil {
				return err
			}
			transport, ok := c.Transport().(*http.Transport)
			if !ok {
				return errors.New("not a socket")
			}
			conn, err := transport.DialContext(ctx, "", "")
			if err != nil {
				return err
			}
			return copyBoth(ctx, conn, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	o.register(cmd)
	return cmd
}

// copyBoth copies to a connection and from it until either side or ctx ends. The end of the
// input is the end: the program that asked has gone.
func copyBoth(ctx context.Context, conn net.Conn, in io.Reader, out io.Writer) error {
	ended := make(chan error, 2)
	go func() { // it may wait for input until the process ends
		_, err := io.Copy(conn, in)
		ended <- err
	}()
	go func() {
		_, err := io.Copy(out, conn)
		ended <- err
	}()
	defer conn.Close()
	select {
	case err := <-ended:
		return unlessGone(err)
	case <-ctx.Done():
		return nil
	}
}
