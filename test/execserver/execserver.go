// Package execserver answers exec requests as a kubelet does, over SPDY.
package execserver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os/exec"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// Serve answers a request: run runs its command, until ctx ends: the client has gone then.
// An error of run is the command's exit status 1.
func Serve(w http.ResponseWriter, r *http.Request, run func(ctx context.Context, command []string, stdin io.Reader, stdout, stderr io.Writer) error) {
	if _, err := httpstream.Handshake(r, w, []string{"v4.channel.k8s.io"}); err != nil {
		return // it has answered
	}
	streams := make(chan httpstream.Stream, 4)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		streams <- s
		return nil
	})
	if conn == nil {
		return
	}
	defer conn.Close()
	named := make(map[string]httpstream.Stream)
	for len(named) < 4 { // error, stdin, stdout, stderr
		select {
		case s := <-streams:
			named[s.Headers().Get("streamType")] = s
		case <-conn.CloseChan():
			return
		}
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		<-conn.CloseChan()
		cancel()
	}()
	status := metav1.Status{Status: metav1.StatusSuccess}
	if err := run(ctx, r.URL.Query()["command"], named["stdin"], named["stdout"], named["stderr"]); err != nil {
		status = metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			status.Reason = "NonZeroExitCode"
			status.Details = &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode", Message: "1"}}}
		}
	}
	_ = json.NewEncoder(named["error"]).Encode(status)
}
