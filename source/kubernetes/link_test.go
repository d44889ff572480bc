package kubernetes

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/output"
)

// A watch that client-go could not begin for lack of an answer comes without an
// error; what its attempts met tells.
func TestAttemptsTellOfALostServer(t *testing.T) {
	log := &output.Text{}
	l, ctx := newLink(zerolog.New(log), "server"), context.Background()
	timeout := errors.New("i/o timeout")
	for range 3 {
		l.tripped(ctx, "services", timeout)
	}
	check.ErrorIsf(t, l.answered(ctx, "services", nil), timeout, "a watch without a server")
	if s := l.stats(); s.Connected || s.Errors != 3 {
		t.Errorf("without a server: %+v", s)
	}
	l.tripped(ctx, "services", nil)
	if err := l.answered(ctx, "services", nil); err != nil || !l.stats().Connected {
		t.Errorf("with a server: %v, %+v", err, l.stats())
	}
	for _, text := range []string{"cannot be reached", "is reached again"} {
		check.Equalf(t, strings.Count(log.String(), text), 1, "how often %q is said", text)
	}
}

// A server that has just started refuses everything for some moments. That is
// said if it lasts, or if it was never otherwise.
func TestRefusalsThatPassAreNotSaid(t *testing.T) {
	log := &output.Text{}
	l, ctx := newLink(zerolog.New(log), "server"), context.Background()
	forbidden := apierrors.NewForbidden(corev1.Resource("services"), "", nil)
	refuse := func() { _ = l.answered(ctx, "services", forbidden) }
	said := func(want bool) {
		t.Helper()
		if strings.Contains(log.String(), "does not show us") != want || l.stats().Connected {
			t.Errorf("said must be %t: %s", want, log)
		}
	}
	l.listed("services", 1)
	refuse()
	l.refused["services"].since = time.Now().Add(time.Hour) // however long the test takes
	refuse()
	said(false)
	_ = l.answered(ctx, "services", nil)
	if !l.stats().Connected || log.String() != "" {
		t.Errorf("afterwards: %s", log)
	}
	refuse()
	l.refused["services"].since = time.Now().Add(-misgiving)
	refuse()
	refuse()
	said(true)
	check.Equalf(t, strings.Count(log.String(), "does not show us"), 1, "how often it is said")

	// The rights to watch and to list are missed in turn; each is said once.
	watching := apierrors.NewForbidden(corev1.Resource("services"), "", errors.New("watch"))
	for range 3 {
		refuse()
		_ = l.answered(ctx, "services", watching)
	}
	check.Equalf(t, strings.Count(log.String(), "does not show us"), 2, "how often two refusals in turn are said")

	first := newLink(zerolog.New(log), "server")
	_ = first.answered(ctx, "nodes", forbidden)
	check.Containsf(t, log.String(), "does not show us the nodes", "the first refusal of all is not said")
}
